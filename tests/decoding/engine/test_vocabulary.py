"""A drafter of some of the target's tokens: mapped, verified as drawn, and checked."""

import functools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

from data.text.tokenizer import fingerprint
from decoding import custom_generate
from decoding.engine import vocabulary
from decoding.engine.params import SamplingParams
from decoding.engine.warp import fit_vocabulary
from decoding.loading import load
from decoding.samplers import deer
from tests.support import tiny
from tests.support.drafters import PROMPTS, V, padded, target, write_drafter
from tests.support.enumerating import output_distribution
from tests.support.results import as_plain

IDS = torch.tensor([9, 0, 3, 5, 2])  # the random target mostly says 5 and 9


class SmallHead(LlamaForCausalLM):
    """A class of its own: stock transformers would not load it."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, len(IDS), bias=False)
        self.post_init()


def load_drafter(path, dtype, **options):
    return SmallHead.from_pretrained(path, dtype=dtype)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A drafter's export whose head knows the tokens IDS alone."""
    monkeypatch.setattr(deer, "METHOD", replace(deer.METHOD, load_drafter=load_drafter))
    drafter = LlamaForCausalLM.from_pretrained(write_drafter(tmp_path / "stock", target()))
    small = SmallHead(drafter.config)
    weights = drafter.state_dict()
    weights["lm_head.weight"] = weights["lm_head.weight"][IDS]
    small.load_state_dict(weights)
    small.config.parade |= {vocabulary.KEY: vocabulary.FILE, "target": str(tmp_path / "target")}
    small.config.parade["tokenizer_fingerprint"] = fingerprint(tiny.tokenizer(V))
    folder = tmp_path / "small"
    small.save_pretrained(folder)
    tiny.tokenizer(V).save_pretrained(folder)
    (folder / vocabulary.FILE).write_bytes(vocabulary.stored(IDS))
    target().save_pretrained(tmp_path / "target")
    tiny.tokenizer(V).save_pretrained(tmp_path / "target")
    return folder


def test_logits_go_to_the_targets_ids_and_nothing_else_can_be_drawn():
    logits = torch.randn(2, 3, 5)
    found = fit_vocabulary(logits, V, (5,), IDS)
    assert found.shape == (2, 3, V)
    kept = [9, 0, 3, 2]
    assert torch.equal(found[..., kept], logits[..., [0, 1, 2, 4]])
    others = [t for t in range(V) if t not in kept]
    assert (found[..., others] == float("-inf")).all()
    # Negative control: without the map the logits are those of the first tokens.
    assert torch.equal(fit_vocabulary(logits, V, ())[..., :5], logits)


@pytest.mark.parametrize("verify", ["coupled", "tree"])
def test_a_reduced_vocabulary_loads_and_decodes_losslessly(folder, verify):
    sampler = load(str(folder), dtype="float32")
    assert torch.equal(sampler.draft_ids, IDS)
    params = SamplingParams(max_new_tokens=24, temperature=0.0, verify=verify)
    found = as_plain(sampler, PROMPTS, params)
    drafted = [n for r in found for n in r.stats.emitted]
    assert sum(drafted) > len(drafted)  # the map is right: its drafts are the target's tokens


@pytest.mark.parametrize("head", ["reduced", "whole"])
@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_the_exact_distribution_is_that_of_plain_decoding(verify, head):
    model, drafter = tiny.causal_lm(3, seed=0), tiny.causal_lm(5, seed=1)
    ids = torch.tensor([2, 0])
    if head == "reduced":
        drafter.lm_head.weight = nn.Parameter(drafter.lm_head.weight[ids])
    sampler = deer.DeerSampler(
        model, tiny.tokenizer(3), drafter, block_size=2, mask_id=3, sep_id=4, draft_ids=ids
    )
    params = SamplingParams(max_new_tokens=2, verify=verify)
    found = output_distribution(sampler, [0, 1, 1], params)
    plain = tiny.plain_distribution(model, [0, 1, 1], params)
    assert tiny.total_variation(found, plain) <= 1e-9


def test_a_whole_head_drafts_as_one_reduced_to_the_same_tokens():
    model, ids = tiny.causal_lm(3, seed=0), torch.tensor([2, 0])
    params = SamplingParams(max_new_tokens=12, seed=1, verify="rejection")

    def decoded(rows, ids):
        drafter = tiny.causal_lm(5, seed=1)
        drafter.lm_head.weight = nn.Parameter(drafter.lm_head.weight[rows])
        sampler = deer.DeerSampler(
            model, tiny.tokenizer(3), drafter, block_size=2, mask_id=3, sep_id=4, draft_ids=ids
        )
        (result,) = sampler.generate([[0, 1, 1]], params)
        return result.token_ids, result.stats.emitted

    whole = decoded(torch.arange(5), ids)
    assert whole == decoded(ids, ids)
    assert whole != decoded(torch.arange(5), None)  # negative control: all tokens


def test_stock_transformers_decodes_with_it_too(folder):
    generate = functools.partial(custom_generate.generate, deer.METHOD, drafter=str(folder))
    model = target()
    found = generate(model, **padded(), max_new_tokens=12, do_sample=False)
    assert torch.equal(found, target().generate(**padded(), max_new_tokens=12, do_sample=False))


@pytest.mark.parametrize(
    ("ids", "message"),
    [([0, V], "not among"), ([-1, 2], "not among"), ([], "not among"), ([3, 3], "twice")],
)
def test_ids_that_are_not_the_targets(ids, message):
    with pytest.raises(ValueError, match=message):
        vocabulary.check_vocabulary(None, V, torch.tensor(ids, dtype=torch.long))


def test_sizes_without_a_map_may_differ_by_padding_only():
    vocabulary.check_vocabulary(151_936, 152_064)
    vocabulary.check_vocabulary(None, 152_064)
    with pytest.raises(ValueError, match=r"32000.*152064"):
        vocabulary.check_vocabulary(32_000, 152_064)
    vocabulary.check_vocabulary(32_000, 152_064, torch.arange(32_000))


def test_a_file_that_is_missing_or_of_something_else(folder):
    (folder / vocabulary.FILE).unlink()
    with pytest.raises(ValueError, match=vocabulary.FILE) as error:
        load(str(folder))
    assert "\n" not in str(error.value)
    save_file({"ids": torch.zeros(2, 2)}, folder / vocabulary.FILE)
    with pytest.raises(ValueError, match="no list of token ids"):
        vocabulary.read(folder / vocabulary.FILE)

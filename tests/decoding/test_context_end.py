"""Drafts past the end of a context, and rotary embeddings that depend on all rows of a pass."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decoding.engine import cache
from decoding.engine.params import SamplingParams
from decoding.engine.running import Running
from decoding.loading import load
from decoding.samplers import dflash as dflash_sampler
from decoding.samplers.deer import DeerSampler
from decoding.samplers.dflash import DFlashSampler
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.plain import PlainSampler
from models.context import context, guard, rotary_range
from tests.support import tiny
from tests.support.results import ids

V, RANGE = 24, 28
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4, "original_max_position_embeddings": RANGE,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 400.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = {"max_position_embeddings": 8 * RANGE, "original_max_position_embeddings": RANGE}
SHORT = {"max_position_embeddings": RANGE}
SCALES = {"short_mscale": 1.0, "long_mscale": 1.5}
KINDS = {
    "phi3": (LONG, LONGROPE),
    "phimoe": ({**LONG, "num_local_experts": 2}, LONGROPE | SCALES),
    "llama": (SHORT, DYNAMIC),
    "hunyuan_v1_dense": ({**SHORT, "head_dim": 8}, DYNAMIC | {"alpha": 10.0}),
    "gemma3_text": (
        {**SHORT, "head_dim": 8, "sliding_window": 512, "layer_types": ["full_attention"] * 2},
        {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
    ),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [9] * 6]


TABLES = {
    "gpt2": {"n_positions": RANGE, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "opt": {**SHORT, "ffn_dim": 24, "word_embed_proj_dim": 16},
}


def network(kind):
    sizes, rope = KINDS.get(kind) or (TABLES[kind], None)
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
            "rope_parameters": rope,
        } | sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.6)
    return (model if kind == "phimoe" else model.double()).eval()  # experts have no float64


def filling(prompt):
    """Parameters by which an answer ends at the last position of the range."""
    return SamplingParams(RANGE - len(prompt), temperature=0, ignore_eos=True)


def alone(sampler):
    return [sampler.generate([p], filling(p))[0].token_ids for p in PROMPTS]


def stock(model):
    """Answers of transformers' generate, in which every position is in the range."""
    options = {"do_sample": False, "pad_token_id": 0}
    return [
        model.generate(torch.tensor([p]), max_new_tokens=RANGE - len(p), **options)[0, len(p) :]
        for p in PROMPTS
    ]


def drafting(model, kind):
    """Samplers whose last drafts reach beyond the range."""
    tokenizer = tiny.tokenizer(V)
    jacobi = JacobiSampler(model, tokenizer, block_size=8)
    own = DeerSampler(model, tokenizer, network(kind), block_size=7, mask_id=0, attention="causal")
    return [jacobi, own]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_neighbours_and_pieces_change_nothing(kind):
    model = network(kind)
    expected = [row.tolist() for row in stock(model)]
    plain = PlainSampler(model, tiny.tokenizer(V))
    assert plain.context == RANGE
    assert alone(plain) == expected
    for sampler in [plain, *drafting(model, kind)]:
        found = sampler.generate(PROMPTS, [filling(p) for p in PROMPTS])
        assert ids(found) == alone(sampler) == expected
        tree = SamplingParams(RANGE - 3, temperature=0, ignore_eos=True, verify="tree")
        if "tree" in sampler.rules:
            assert sampler.generate(PROMPTS[:1], tree)[0].token_ids == expected[0]
    params = filling(PROMPTS[1])
    pieces = Running(plain, plain.shared(params), plain.capacity(PROMPTS[1:2], params), 3)
    pieces.admit([0], PROMPTS[1:2], [0], [params])
    chunks = []
    while pieces:
        chunks += pieces.step()
    assert chunks[-1].result.token_ids == expected[1]


@pytest.mark.parametrize("kind", ["phi3", "phimoe", "llama"])
def test_a_pass_beyond_the_range_would_change_the_text(kind, monkeypatch):
    """The control: without the limit on positions, drafts past the end change earlier tokens."""
    model = network(kind)
    expected = [row.tolist() for row in stock(model)]
    monkeypatch.setattr(cache, "clamped", lambda positions, limit: positions)
    assert any(
        ids(sampler.generate(PROMPTS, [filling(p) for p in PROMPTS])) != expected
        for sampler in drafting(model, kind)
    )


def test_drafters_of_a_target_with_such_a_rotary_agree(monkeypatch):
    model = network("llama")
    expected = [row.tolist() for row in stock(model)]
    drafter = tiny.dflash(model)
    assert rotary_range(drafter.config) == (RANGE, "dynamic")
    drafter.config.block_size = 8
    sampler = DFlashSampler(model, tiny.tokenizer(V), drafter, block_size=7, mask_id=V - 1)
    assert ids(sampler.generate(PROMPTS, [filling(p) for p in PROMPTS])) == expected
    drafts = [r.stats.emitted for r in sampler.generate(PROMPTS, [filling(p) for p in PROMPTS])]
    one = [sampler.generate([p], filling(p))[0].stats.emitted for p in PROMPTS]
    assert drafts == one  # the drafter's own results depend on no other row either
    monkeypatch.setattr(dflash_sampler, "clamped", lambda positions, limit: positions)
    seen = []
    drafter.rotary_emb.register_forward_pre_hook(lambda _, given: seen.append(int(given[1].max())))
    sampler.generate(PROMPTS[:1], filling(PROMPTS[0]))
    assert max(seen) >= RANGE


@pytest.mark.parametrize("kind", TABLES)
def test_drafts_past_a_learned_table_of_positions(kind, monkeypatch):
    model = network(kind)
    expected = [row.tolist() for row in stock(model)]
    assert alone(PlainSampler(model, tiny.tokenizer(V))) == expected
    for sampler in drafting(model, kind):
        assert ids(sampler.generate(PROMPTS, [filling(p) for p in PROMPTS])) == expected
    monkeypatch.setattr(cache, "clamped", lambda positions, limit: positions)
    with pytest.raises(IndexError):  # the control
        sampler.generate(PROMPTS, [filling(p) for p in PROMPTS])


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_a_text_that_outgrows_the_range_is_refused_in_one_line(kind, tmp_path):
    model = network(kind).float()
    model.save_pretrained(tmp_path)
    tiny.tokenizer(V).save_pretrained(tmp_path)
    sampler = load(str(tmp_path))
    name = {"phi3": "longrope", "llama": "dynamic"}[kind]
    with pytest.raises(ValueError, match=f"context of {RANGE}.*{kind}'s {name}") as error:
        sampler.generate([[1] * RANGE], SamplingParams(max_new_tokens=1))
    assert "\n" not in str(error.value)
    # Training, likelihoods and collections run the network itself.
    fits = torch.ones(2, RANGE, dtype=torch.long)
    sampler.target(fits)
    with pytest.raises(ValueError, match=f"{RANGE + 1} tokens.*{kind}'s {name}"):
        sampler.target(torch.ones(2, RANGE + 1, dtype=torch.long))


def test_other_rotary_types_keep_the_whole_context():
    for rope in (PLAIN, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
                 {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                  "original_max_position_embeddings": 16}):  # fmt: skip
        model = guard(tiny.causal_lm(V, rope_parameters=rope))
        assert rotary_range(model.config) == (None, "")
        assert context(model.config) == 512
        assert not model.model.rotary_emb._forward_pre_hooks
    for key in ("rope_type", "type"):  # as older configs and classes of a repository say it
        config = json.loads(json.dumps(LONGROPE)) | {key: "longrope"}
        if key == "type":
            del config["rope_type"]
        assert rotary_range(tiny.causal_lm(V, rope_parameters=config).config)[0] == RANGE

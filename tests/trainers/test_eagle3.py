"""EAGLE-3's module: its weights, what it refuses, and an export that decodes."""

import json
from statistics import fmean

import pytest
import torch

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.samplers.eagle3 import Eagle3Sampler
from recipes.compose import compose
from tests.support import tiny
from tests.support.lab import Lab
from tests.support.results import as_plain
from tests.support.runs import curve
from trainers.base import Optimization
from trainers.eagle3 import Eagle3
from trainers.losses.rollout import step_weight

V = 12
OWN = "network.draft_ids={_target_: data.corpora.answers.frequent_tokens, source: %s, count: 100}"


def module(model, **options):
    given = {"method": "eagle3", "block_size": 3, "target_name": "x", **options}
    network, tokenizer = tiny.eagle3(model, 1), tiny.tokenizer(V)
    return Eagle3(network, tokenizer, Optimization(1e-3), model, **given)


def test_the_weights_of_steps():
    masked = torch.tensor([True, True, False, True])
    assert step_weight(masked, 0.5).tolist() == [1, 0.5, 0, 0.125]


def test_a_block_without_a_state_before_it_does_not_count():
    """The second token of a text is drafted from no state of that text."""
    blocks = DraftBlocks(5, 3, SuffixNoise(3), tiny.tokenizer(V), "none")
    document = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    row = {
        "input_ids": torch.arange(9),
        "document": document,
        "position": torch.tensor([*range(4), *range(5)]),
        "trained": torch.ones(9, dtype=torch.bool),
    }
    anchors = torch.tensor([1, 2, 5, 6, 7])
    sample = blocks.lay_out(row, anchors, SuffixNoise(3)(5, 3, torch.Generator()))
    weight = module(tiny.causal_lm(V)).block_weight({k: x[None] for k, x in sample.items()})
    beta = 0.8
    expected = [[0, 0, 0], [1, beta, 0], [0, 0, 0], [1, beta, beta**2], [1, beta, 0]]
    torch.testing.assert_close(weight[0], torch.tensor(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "dflash"}, "unknown layout 'dflash'"),
        ({"markov_rank": 2}, "knows the token before"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        module(tiny.causal_lm(V), **options)


def test_another_target_is_refused():
    with pytest.raises(ValueError, match="vocab_size=12, and this one has 9"):
        module(tiny.causal_lm(V)).attach_target(tiny.causal_lm(9))


def test_a_beta_above_one_is_refused():
    with pytest.raises(ValueError, match="beta=2"):
        compose(["recipe=eagle3", "module.beta=2"], "fit")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A target that has learned something, and its answers."""
    lab = Lab(tmp_path_factory.mktemp("eagle3"))
    lab.fit("ar_target", "trainer.max_steps=120", "optimization.lr=3.0e-3")
    lab.collect()
    return lab


@pytest.mark.slow
@pytest.mark.parametrize("head", ["whole", "reduced", "parallel"])
def test_it_learns_and_its_export_decodes(prepared, head):
    own = [OWN % (prepared.runs / "deer_answers")] if head == "reduced" else []
    own += ["network.parallel=true"] if head == "parallel" else []
    steps = ["trainer.max_steps=60", "trainer.validate_every=30", "optimization.lr=3.0e-3"]
    # A fitted projection would begin where this target, which hardly reads its context, ends.
    steps += ["trainer.log_every=1", "network.text=null"]
    export = prepared.fit("eagle3", f"name={head}", *steps, *own)
    loss = curve(export.parent)
    assert fmean(loss[s] for s in range(50, 61)) < 0.8 * loss[1]
    sampler = load(str(export), dtype="float32")
    assert type(sampler) is Eagle3Sampler
    assert (len(sampler.draft_ids) < sampler.vocabulary) == (head == "reduced")
    assert sampler.tail == (head != "parallel")
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "draft_vocabulary" not in config["parade"]
    for rule in ("coupled", "tree"):
        as_plain(sampler, ["def value"], SamplingParams(24, 1.0, verify=rule, seed=3))
    # Without our entry it is a drafter that was trained elsewhere.
    target = config.pop("parade")["target"]
    (export / "config.json").write_text(json.dumps(config))
    published = load(str(export), target=target, dtype="float32")
    assert (type(published), published.block_size) == (Eagle3Sampler, 5)
    as_plain(published, ["def value"], SamplingParams(24, 0.0, verify="tree"))

"""A recurrent drafter's module: what it learns, and an export that decodes."""

import json

import pytest
import torch

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.samplers.plain import PlainSampler
from decoding.samplers.redrafter import RedrafterSampler
from tests.support import tiny
from tests.support.lab import Lab
from tests.support.results import as_plain
from trainers.base import Optimization
from trainers.redrafter import Redrafter

V = 12


def module_of(model):
    given = {"method": "redrafter", "block_size": 3, "target_name": "x"}
    return Redrafter(tiny.redrafter(model), tiny.tokenizer(V), Optimization(1e-3), model, **given)


def test_it_learns_what_the_target_says():
    """On greedy texts of a target, whose next tokens its states tell."""
    model = tiny.causal_lm(V, layers=3)
    params = SamplingParams(30, 0.0, ignore_eos=True)
    prompts = [[a, b] for a in range(4) for b in range(4)]
    texts = PlainSampler(model, tiny.tokenizer(V)).generate(prompts, params)
    rows = torch.tensor([[*p, *r.token_ids] for p, r in zip(prompts, texts)])
    blocks, S = DraftBlocks(8, 3, SuffixNoise(3), tiny.tokenizer(V), "none"), rows.shape[1]
    fixed = {
        "document": torch.zeros(S, dtype=torch.long),
        "position": torch.arange(S),
        "trained": torch.ones(S, dtype=torch.bool),
    }
    draw = torch.Generator().manual_seed(0)
    samples = [blocks({"input_ids": row, **fixed}, draw) for row in rows]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    module, losses = module_of(model), []
    optimizer = torch.optim.Adam(module.network.parameters(), 1e-2)
    for _ in range(40):
        loss, weight = module.losses(batch)
        losses.append((loss * weight).sum() / weight.sum())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]


def test_a_validation_drafts_for_many_prompts():
    sampler = module_of(tiny.causal_lm(V)).sampler()
    results = sampler.generate([[1, 2, 3, 4]] * 16, SamplingParams(8, 0.0))
    assert all(result.stats.drafted for result in results)
    assert results[0].stats.emitted == results[1].stats.emitted  # none learns from another


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A target that has learned something, and its answers."""
    lab = Lab(tmp_path_factory.mktemp("redrafter"))
    lab.fit("ar_target", "trainer.max_steps=120", "optimization.lr=3.0e-3")
    lab.collect()
    return lab


@pytest.mark.slow
@pytest.mark.parametrize("states", ["computed", "stored"])
def test_its_export_decodes(prepared, states):
    own = ["data.stored_states=1", "module.soft=0"] if states == "stored" else []
    steps = ["trainer.max_steps=20", "optimization.lr=3.0e-3"]
    export = prepared.fit("redrafter", f"name={states}", *steps, *own)
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["Redrafter"]
    assert config["parade"]["method"] == "redrafter"
    sampler = load(str(export), dtype="float32")
    assert type(sampler) is RedrafterSampler
    for rule in ("coupled", "tree"):
        as_plain(sampler, ["def value"], SamplingParams(24, 1.0, verify=rule, seed=3))
    earlier = f"answers={prepared.runs / 'deer_answers'}"
    sampler = load(str(export), dtype="float32", sampler=[earlier])
    assert len(sampler.ngrams) > 100
    as_plain(sampler, ["def value"], SamplingParams(24, 0.0, verify="tree"))

"""Trajectories, round 1, trajectories of its model, round 2: the lab's commands on a tiny chain."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from data.rows.trajectories import rows
from data.text.tokenizer import train_tokenizer
from decoding.collect import collect
from decoding.engine.params import SamplingParams
from decoding.loading import load, load_tokenizer
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.jacobi_mr import JacobiMRSampler
from decoding.samplers.plain import PlainSampler
from models.attention import GROUPED
from recipes.compose import compose
from tests.support.lab import SMALL, Lab
from tests.support.results import as_plain
from tests.support.runs import rows as shards
from trainers.fit import fit


class Chain(Lab):
    """The lab's commands for pcLLM."""

    def collect(self, *overrides):
        arguments = [
            "recipe=pcllm_trajectories",
            f"runs={self.runs}",
            f"prompts.source={self.corpus}",
            "prompts.count=120",
            "prompts.length=8",
            "collector.max_new_tokens=12",
            "collector.dtype=float32",
            "shard_size=40",
        ]
        return collect(compose([*arguments, *overrides], "collect"))

    def round(self, number, *overrides):
        arguments = [
            f"recipe=pcllm_round{number}",
            f"runs={self.runs}",
            f"acceptance.source={self.corpus}",
            *SMALL,
        ]
        return fit(compose([*arguments, *overrides], "fit"))


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    chain = Chain(tmp_path_factory.mktemp("pcllm"))
    chain.fit("ar_target")
    chain.collect("collector.block_size=4")
    model = chain.round(1)
    chain.collect("name=round2", f"collector.teacher={model}", "collector.block_size=6")
    chain.round(2)
    return chain


@pytest.mark.parametrize("number", [1, 2])
def test_the_export_gives_the_text_of_its_own_plain_decoding(chain, number):
    export = str(chain.runs / f"pcllm_round{number}" / "export")
    served = load(export, dtype="float32")
    assert isinstance(served, JacobiMRSampler)
    assert served.block_size == 16 * number
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)
    prompts = ["self return", "def class print list"]
    others = [["method=jacobi", "block_size=5"], ["blocks=4", "pool_size=1", "spawn_ratio=0.2"]]
    for sampler in (served, *(load(export, dtype="float32", sampler=knobs) for knobs in others)):
        as_plain(sampler, prompts, params)


def test_an_ordinary_model_decodes_with_any_method(chain):
    target = str(chain.runs / "ar_target" / "export")
    sampler = load(target, sampler=["method=jacobi", "running=false"])
    assert (type(sampler), sampler.running) == (JacobiSampler, False)
    assert isinstance(load(target), PlainSampler)


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("block=4", "unknown knob of jacobi_mr 'block'. Did you mean 'blocks'"),
        ("blocks=many", "blocks='many' is of type str, but int is needed"),
        ("blocks=0", "blocks=0 is not allowed"),
        ("method=jacoby", "unknown method 'jacoby'. Did you mean 'jacobi'"),
        ("blocks", "'blocks' is not of the form key=value"),
    ],
)
def test_mistakes_in_knobs(chain, knob, message):
    with pytest.raises(ValueError, match=message):
        load(str(chain.runs / "pcllm_round1" / "export"), sampler=[knob])


@pytest.mark.parametrize(
    "form",
    [
        ["data.corruption.state=tail"],
        ["module.mask=nc_ic", "module.window=1", "data.corruption.state=any"],  # CLLM*
    ],
    ids=["tail", "cllm"],
)
def test_every_reading_of_the_loss_trains_other_weights(chain, form, request):
    export = chain.round(1, f"name={request.node.callspec.id}", *form)
    default = load_file(chain.runs / "pcllm_round1" / "export" / "model.safetensors")
    trained = load_file(export / "model.safetensors")
    assert trained.keys() == default.keys()
    assert any(not torch.equal(trained[name], x) for name, x in default.items())


def test_an_adapter_is_trained_and_served(chain):
    export = chain.round(1, "name=adapter", "lora.rank=4")
    base = load_file(chain.runs / "ar_target" / "export" / "model.safetensors")
    trained = load_file(export / "model.safetensors")
    changed = {k for k in base if not torch.equal(base[k], trained[k])}
    assert changed
    assert all("proj" in k for k in changed)
    served = load(str(export), dtype="float32")
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    as_plain(served, ["self return"], params)


def test_validation_measures_the_sampler_and_both_terms(chain):
    names = (chain.runs / "pcllm_round2" / "metrics.csv").read_text().splitlines()[0].split(",")
    terms = {"val_consistency", "val_ar", "val_right_guesses"}
    assert {"acceptance_length_t0", "val_loss", *terms} <= {*names}


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(chain):
    middle = chain.runs / "pcllm_round1" / "checkpoints" / "step-2.ckpt"
    resumed = chain.round(1, "name=resumed", f"resume={middle}")
    whole = load_file(chain.runs / "pcllm_round1" / "export" / "model.safetensors")
    again = load_file(resumed / "model.safetensors")
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    other = load_file(chain.round(1, "name=other", "seed=1") / "model.safetensors")
    assert not all(torch.equal(whole[k], other[k]) for k in whole)


def test_a_collection_gone_on_with_is_the_one_that_was_not_stopped(chain):
    whole = chain.runs / "pcllm_trajectories"
    part = whole / "part"
    shutil.copytree(whole, part, ignore=shutil.ignore_patterns("round2", "part", "complete.json"))
    (part / "shards" / "00001.parquet").unlink()
    chain.collect("name=part", "collector.block_size=4")
    assert shards(part) == shards(whole)
    chain.collect("name=other", "collector.block_size=4", "seed=1")
    assert shards(whole / "other") != shards(whole)


def test_trajectories_of_another_model_or_tokenizer_are_refused(chain, tmp_path):
    source, target = (
        str(chain.runs / "pcllm_trajectories"),
        str(chain.runs / "ar_target" / "export"),
    )
    tokenizer = load_tokenizer(target)
    assert len(rows(source, target, tokenizer, str(tmp_path))) > 100
    trained = str(chain.runs / "pcllm_round1" / "export")
    with pytest.raises(ValueError, match=r"another model .* \(weights .* collect it again"):
        rows(source, trained, tokenizer, str(tmp_path))
    with pytest.raises(ValueError, match="was collected with another tokenizer"):
        rows(source, target, train_tokenizer(["ab"], 300), str(tmp_path))
    with pytest.raises(ValueError, match=r"no collection at"):
        rows(str(tmp_path), target, tokenizer, str(tmp_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.corruption.order=cosine", "unknown data.corruption.order 'cosine'"),
        ("data.corruption.window=0", "window=0 is not allowed"),
        ("module.mask=ic", "unknown module.mask 'ic'"),
        ("module.w=-1.0", "w=-1.0 is not allowed"),
    ],
)
def test_mistakes_in_a_recipe(chain, override, message):
    with pytest.raises(ValueError, match=message):
        chain.round(1, f"name={override.replace('=', '_')}", override)


def test_a_compiled_run_with_adapters_exports_what_it_trained(chain, monkeypatch):
    """Its copy without adapters is checked with the fused kernel, its sampler's network, too."""
    # What compiling would add are minutes; attention is written out all the same.
    monkeypatch.setattr(torch.nn.Module, "compile", lambda network: None)
    run = ["trainer.compile=true", "trainer.precision=32-true", "lora.rank=2", "lora.alpha=4"]
    compiled = chain.round(1, "name=compiled", *run)
    fused = chain.round(1, "name=fused", *run[1:])
    weights, expected = (load_file(f"{e}/model.safetensors") for e in (compiled, fused))
    base = load_file(chain.runs / "ar_target" / "export" / "model.safetensors")
    assert all(torch.allclose(weights[name], x, atol=1e-4) for name, x in expected.items())
    assert any(not torch.allclose(weights[name], x, atol=1e-4) for name, x in base.items())
    assert load(str(compiled)).target.config._attn_implementation == GROUPED

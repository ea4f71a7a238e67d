"""DFlash's recipe: it learns, validates as exported, and resumes; its loss weighs early tokens."""

import csv
import json
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from decoding import SamplingParams
from decoding.external.vllm_engine import speculative_config
from decoding.loading import load
from decoding.samplers.dflash import DFlashSampler
from decoding.samplers.plain import PlainSampler
from recipes.compose import compose
from tests.support import tiny
from tests.support.lab import Lab, finish
from tests.support.modules import dflash as module
from tests.support.results import as_plain
from tests.support.runs import curve, cut, same_run
from trainers.base import DISTRIBUTIONS, HIDDEN_STATES, Optimization
from trainers.dflash import DFlash
from trainers.losses.dflash import decay_weight

pytestmark = pytest.mark.usefixtures("forked")

V = 12
OWN_HEAD = (
    "network.draft_ids={_target_: data.corpora.answers.frequent_tokens, source: %s, count: 64}"
)


def test_weights_fall_to_1_over_e():
    """Example of the docstring, and the published gamma of blocks of 16."""
    halves = decay_weight(torch.tensor([True, True, False, True]), 1 / torch.tensor(2.0).log())
    torch.testing.assert_close(halves, torch.tensor([1.0, 0.5, 0.0, 0.125]))
    weights = decay_weight(torch.ones(15, dtype=torch.bool), 7.0)
    torch.testing.assert_close(weights[7], torch.tensor(1.0).exp().reciprocal())


def test_what_it_reads_of_the_target():
    model = tiny.causal_lm(V)
    assert module(model).needs_target == {HIDDEN_STATES}
    assert module(model, soft=0.5).needs_target == {HIDDEN_STATES, DISTRIBUTIONS}
    assert module(model, soft=0.5, teacher="answers").needs_target == {HIDDEN_STATES}
    config = module(model).network.config
    assert (config.block_size, config.dflash_config["mask_token_id"]) == (4, V - 1)
    assert "sample_from_anchor" not in config.dflash_config
    anchored = module(model, layout="dspark").network.config
    assert (anchored.block_size, anchored.dflash_config["sample_from_anchor"]) == (3, True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gamma=0", "gamma=0 is not allowed"),
        ("soft=2", "soft=2 is not allowed"),
        ("teacher=nobody", "unknown module.teacher 'nobody'"),
        ("teacher_loss=total_variatio", "Did you mean 'total_variation'"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        compose(["recipe=dflash", f"module.{setting}"], "fit")


def test_a_layout_of_other_drafters_is_refused():
    with pytest.raises(ValueError, match="unknown layout 'pard'"):
        module(tiny.causal_lm(V), layout="pard")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "layout=dflash is not allowed with network.tail=1"),
        ({"layout": "dspark", "markov_rank": 2}, r"a part of its network, network\.markov_rank"),
    ],
)
def test_what_does_not_fit_a_tail(options, message):
    with pytest.raises(ValueError, match=message):
        module(tiny.causal_lm(V), drafter={"tail": 1}, **options)


def test_a_block_wider_than_the_window_is_one_line():
    """A block of three tokens and the last committed one."""
    assert module(tiny.causal_lm(V), drafter={"window": 4}).network.config.sliding_window == 4
    with pytest.raises(ValueError, match=r"block_size=3 .*window of 3 tokens .*at most 2"):
        module(tiny.causal_lm(V), drafter={"window": 3})
    module(tiny.causal_lm(V), drafter={"window": 3}, layout="dspark")  # it reads a mask less
    with pytest.raises(ValueError, match=r"network.window=0 is not allowed"):
        compose(["recipe=dflash", "network.window=0"], "fit")


def test_another_target_is_refused():
    with pytest.raises(ValueError, match="num_target_layers=2, and this one has 3"):
        module(tiny.causal_lm(V)).attach_target(tiny.causal_lm(V, layers=3))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A target that has learned something, and its answers."""
    lab = Lab(tmp_path_factory.mktemp("dflash"))
    lab.fit("ar_target", "trainer.max_steps=120", "optimization.lr=3.0e-3")
    lab.collect()
    return lab


ANCHORED = [
    "layout=dspark", "network.causal=true", "network.context=layerwise", "network.layers=[1,2]"
]  # fmt: skip
SHARED = ["network.context=shared" if "context" in key else key for key in ANCHORED]
OWN = {
    "its own": [],
    "layerwise": ANCHORED,
    "shared": [*SHARED, "network.tail=2"],
    "tail": [*ANCHORED, "network.tail=1"],
    "markov": ["layout=dspark", "network.markov_rank=4", "optimization.aux_lr=3.0e-2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("head", ["the target's", *OWN])
def test_it_learns_and_its_export_decodes(prepared, head):
    own = [OWN_HEAD % (prepared.runs / "deer_answers")] if head == "its own" else []
    own += OWN.get(head, [])
    steps = ["trainer.max_steps=60", "trainer.validate_every=30", "optimization.lr=3.0e-3"]
    # A fitted projection would begin where this target, which hardly reads its context, ends.
    steps += ["trainer.log_every=1", "network.text=null"]
    export = prepared.fit("dflash", f"name={head[:3]}", *steps, *own)
    loss = curve(export.parent)
    last, first = [loss[s] for s in range(50, 61)], [loss[s] for s in range(1, 6)]
    layerwise = head in ("layerwise", "shared", "tail")
    if layerwise:  # its layers begin with the target's own keys and values
        assert fmean(last) < fmean(first)
    else:
        # The corpus's words are at random, so a few steps come near the least loss.
        assert max(last) < 0.5 * loss[1]
    sampler = load(str(export), dtype="float32")
    assert type(sampler) is DFlashSampler
    assert (sampler.draft_ids is not None) == (head == "its own")
    drafter = sampler.drafter
    assert drafter.causal == drafter.layerwise == layerwise
    assert drafter.samples_from_anchor == (layerwise or head == "markov")
    if head == "markov":
        config = json.loads((export / "config.json").read_text())
        assert config["architectures"] == ["Qwen3DSparkModel"]
        assert config["sample_from_anchor"] is True
        assert drafter.markov_head.markov_w1.weight.any()
        assert speculative_config(export)["method"] == "dspark"
    assert drafter.tail == {"tail": 1, "shared": 2}.get(head, 0)
    if head == "tail":
        assert drafter.token_before.weight.any()  # it was trained
    if layerwise:
        ours, theirs = drafter.layers[0], sampler.target.model.layers[1]
        kept = ("input_layernorm.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
        for name, weight in ours.named_parameters():
            same = torch.equal(weight, theirs.get_parameter(name))
            assert same == (head == "shared" and name in kept), name
    entry = json.loads((export / "config.json").read_text())["parade"]
    assert "draft_vocabulary" not in entry  # the weights say which tokens
    # Engines read every file of weights that they find.
    assert [f.name for f in export.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.slow
@pytest.mark.processes
def test_one_command_trains_fits_to_the_machine_and_measures(prepared, capfd):
    given = [f"acceptance.source={prepared.runs / 'deer_answers'}"]
    export = prepared.fit("drafter", *given)
    shown = capfd.readouterr().out
    calibrated, measured = (shown.index(f"decoding.{name}") for name in ("calibrate", "bench"))
    assert shown.index(f"exported to {export}") < calibrated < measured
    sampler = load(str(export), dtype="float32")
    entry = json.loads((export / "config.json").read_text())["parade"]
    assert sampler.chain.lengths
    assert sampler.tree.least == {n: entry["least"][str(n)] for n in (1, 8)}
    rows = [*csv.DictReader((export.parent / "bench" / "bench.csv").open())]
    assert {"plain", "dflash", "dflash, tree"} <= {row["sampler"] for row in rows}
    as_plain(sampler, ["def value"], SamplingParams(24, 1.0, verify="tree", seed=3))
    # The target alone, as its own sampler decodes.
    alone = load(str(export), dtype="float32", sampler=["method=plain"])
    assert type(alone) is PlainSampler
    # Given again, the command has nothing to do.
    assert prepared.fit("drafter", *given) == export
    assert "next: " not in capfd.readouterr().out


def test_a_fitted_projection_begins_lower(prepared):
    steps = ["trainer.max_steps=1", "trainer.log_every=1"]
    fitted = prepared.fit("dflash", "name=fitted", *steps)
    random = prepared.fit("dflash", "name=random", *steps, "network.text=null")
    assert curve(fitted.parent)[1] < 0.5 * curve(random.parent)[1]


def test_a_head_for_a_finished_drafter(prepared):
    """Also for one of others with a head of its own: weights stay, the export decodes with it."""
    own = OWN_HEAD % (prepared.runs / "deer_answers")
    steps = ["trainer.max_steps=4", "optimization.lr=0.1"]
    drafter = prepared.fit("dflash", "name=finished", *steps, own)
    config = json.loads((drafter / "config.json").read_text())
    del config["parade"]  # as published: no word of ours
    (drafter / "config.json").write_text(json.dumps(config))
    given = [f"drafter={drafter}", "network.markov_rank=4", *steps]
    export = prepared.fit("dflash_markov", *given)
    ours, theirs = (load_file(f / "model.safetensors") for f in (export, drafter))
    new = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert ours.keys() - theirs.keys() == new
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(ours[name].abs().sum() > 0 for name in new)
    sampler = load(str(export), dtype="float32")
    assert sampler.markov.head.markov_w2.weight.shape == (len(sampler.draft_ids), 4)
    assert load(str(export), sampler=["markov_head=false"]).markov is None
    params = SamplingParams(24, 1.0, verify="tree", seed=3)
    as_plain(sampler, ["def value"], params)


def test_a_new_drafter_cannot_be_frozen_nor_one_with_another_mask():
    model = tiny.causal_lm(V)
    with pytest.raises(ValueError, match="no trained drafter of method=dflash"):
        module(model, drafter={"markov_rank": 2}, train_drafter=False)
    tokenizer, network = tiny.tokenizer(V), tiny.dflash(model)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(V - 2)
    given = {"method": "dflash", "block_size": 3, "target_name": "x"}
    with pytest.raises(ValueError, match=rf"token {V - 1} as its mask, and the tokenizer has"):
        DFlash(network, tokenizer, Optimization(1e-3), model, **given)
    network.config.dflash_config["mask_token_id"], network.name_or_path = V - 2, "a folder"
    with pytest.raises(ValueError, match="layout=dspark is not allowed: the drafter to start from"):
        DFlash(network, tokenizer, Optimization(1e-3), model, **given, layout="dspark")


def test_a_killed_run_goes_on_as_if_it_had_not_been(prepared):
    steps = ("trainer.max_steps=6", "trainer.checkpoint_every=2", "trainer.log_every=1")
    whole = prepared.fit("dflash", *steps, "name=whole").parent
    killed = cut(whole, "killed", 2)
    prepared.fit("dflash", *steps, "name=killed")
    assert same_run(whole, killed)


@pytest.mark.processes
def test_two_processes_give_the_loss_curve_of_one(prepared):
    steps = ("trainer.max_steps=8", "trainer.log_every=1", "trainer.micro_batch_size=2")
    one = prepared.fit("dflash", *steps, "name=one").parent
    for strategy in ("ddp", "fsdp2"):
        two = ("trainer.devices=2", f"strategy={strategy}", f"name={strategy}")
        finish(prepared.start("dflash", *steps, *two))
        ours, theirs = curve(one), curve(one.with_name(strategy))
        assert ours.keys() == theirs.keys()
        assert max(abs(ours[s] - theirs[s]) for s in ours) < 1e-5

"""Sharded training: the curve of one process, whole exports, exact resumes, clear refusals."""

import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, modeling_utils

from recipes.compose import build, compose, names
from tests.support import runs, tiny
from tests.support.lab import finish
from trainers import export, strategies
from trainers.fit import resolve_precision
from trainers.strategies import DeepSpeed, strategy_of, with_weights, without_weights

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

WEIGHTS = "model.safetensors"
STEPS = ("trainer.max_steps=24", "trainer.log_every=1", "trainer.validate_every=12",
         "trainer.keep_last=99")  # fmt: skip
REDUCED = (
    "+module.draft_ids={_target_: data.corpora.answers.frequent_tokens, "
    "source: '${answers}', count: 64}"
)
TWO = ("trainer.devices=2", "trainer.micro_batch_size=2", "strategy=fsdp2")


def curve(lab, name, metric="loss"):
    return runs.curve(lab.runs / "deer_stage2" / name, metric)


def weights(lab, name):
    return load_file(lab.runs / "deer_stage2" / name / "export" / WEIGHTS)


def distance(a, b):
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


@pytest.fixture(scope="module")
def one(lab):
    lab.fit("deer_stage2", *STEPS, "name=one_process")
    return "one_process"


@pytest.fixture(scope="module")
def sharded(lab):
    finish(lab.start("deer_stage2", *STEPS, *TWO, "name=sharded"))
    return "sharded"


class TestFSDP2:
    def test_two_processes_train_as_one(self, lab, one, sharded):
        a, b = curve(lab, one), curve(lab, sharded)
        assert a.keys() == b.keys()
        assert max(abs(a[s] - b[s]) for s in a) <= 2e-6
        for metric in ("acceptance_length_t0", "acceptance_length_t1"):
            assert curve(lab, one, metric) == curve(lab, sharded, metric)

    def test_the_export_is_whole_and_ordinary(self, lab, one, sharded):
        assert distance(weights(lab, one), weights(lab, sharded)) <= 1e-6
        folder = lab.runs / "deer_stage2" / sharded / "export"
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == sum(
            p.numel() for p in weights(lab, sharded).values()
        )

    def test_accumulation_checkpointed_activations_and_bfloat16(self, lab, one, sharded):
        """The first two change nothing; in bfloat16 the masters, and the export, are float32."""
        more = (*TWO, "trainer.micro_batch_size=1", "trainer.checkpoint_activations=true")
        finish(lab.start("deer_stage2", *STEPS, *more, "name=sharded_more"))
        a, b = curve(lab, one), curve(lab, "sharded_more")
        assert max(abs(a[s] - b[s]) for s in a) <= 2e-6
        half = (*more, "trainer.precision=bf16-mixed", "name=sharded_half")
        finish(lab.start("deer_stage2", *STEPS, *half))
        b = curve(lab, "sharded_half")
        assert 1e-5 < max(abs(a[s] - b[s]) for s in a) < 3e-2
        exported = weights(lab, "sharded_half")
        assert {w.dtype for w in exported.values()} == {torch.float32}
        rounded = {n: w.bfloat16().float() for n, w in exported.items()}
        assert distance(exported, rounded) > 0, "the masters are bfloat16"

    def test_a_reduced_vocabulary_and_frozen_embeddings(self, lab, one):
        """The head is sharded too, so its rows are chosen after the product instead of before."""
        fewer = ("+module.train_embeddings=false", REDUCED)
        lab.fit("deer_stage2", *STEPS, *fewer, "name=one_reduced")
        finish(lab.start("deer_stage2", *STEPS, *fewer, *TWO, "name=sharded_reduced"))
        a, b = curve(lab, "one_reduced"), curve(lab, "sharded_reduced")
        assert max(abs(a[s] - b[s]) for s in a) <= 2e-6
        assert distance(weights(lab, "one_reduced"), weights(lab, "sharded_reduced")) <= 1e-6
        whole = curve(lab, one)
        assert max(abs(a[s] - whole[s]) for s in a) > 1e-3  # negative control

    def test_a_sharded_checkpoint_becomes_an_ordinary_export(self, lab, sharded):
        run = lab.runs / "deer_stage2" / sharded
        last, before = run / "checkpoints" / "step-24.ckpt", run / "checkpoints" / "step-22.ckpt"
        assert last.is_dir()
        export.run([f"run={run}", f"checkpoint={last}"])
        export.run([f"run={run}", f"checkpoint={before}"])
        assert distance(load_file(run / "export-step-24" / WEIGHTS), weights(lab, sharded)) == 0
        assert distance(load_file(run / "export-step-22" / WEIGHTS), weights(lab, sharded)) > 0

    def test_another_seed_is_another_curve(self, lab, one, sharded):
        """Negative control of the comparisons above."""
        lab.fit("deer_stage2", *STEPS, "name=other_seed", "seed=1")
        a, b = curve(lab, "other_seed"), curve(lab, sharded)
        assert max(abs(a[s] - b[s]) for s in a) > 1e-3
        assert distance(weights(lab, "other_seed"), weights(lab, sharded)) > 1e-3

    def test_a_stopped_run_goes_on_bit_for_bit(self, lab, sharded):
        process = lab.start("deer_stage2", *STEPS, *TWO, "name=sharded_stopped")
        checkpoints = lab.runs / "deer_stage2" / "sharded_stopped" / "checkpoints"
        while process.poll() is None and not (checkpoints / "step-4.ckpt").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM, output
        assert all(p.is_dir() for p in checkpoints.iterdir())
        finish(lab.start("deer_stage2", *STEPS, *TWO, "name=sharded_stopped"))
        assert curve(lab, "sharded_stopped") == curve(lab, sharded)
        assert distance(weights(lab, "sharded_stopped"), weights(lab, sharded)) == 0

    def test_a_sharded_checkpoint_goes_on_with_another_number_of_processes(self, lab, sharded):
        """Two processes, then one."""
        runs.cut(lab.runs / "deer_stage2" / sharded, "fewer", 4)
        told = finish(lab.start("deer_stage2", *STEPS, "name=fewer", "strategy=fsdp2"))
        assert "going on with 1 processes" in told
        a, b = curve(lab, "fewer"), curve(lab, sharded)
        assert a.keys() == b.keys()
        assert max(abs(a[s] - b[s]) for s in a) <= 2e-6


def test_checkpointed_activations_change_nothing(lab, one, monkeypatch):
    calls, real = [], modeling_utils.checkpoint
    monkeypatch.setattr(
        modeling_utils, "checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    lab.fit("deer_stage2", *STEPS, "name=activations", "trainer.checkpoint_activations=true")
    assert curve(lab, "activations") == curve(lab, one)
    assert distance(weights(lab, "activations"), weights(lab, one)) == 0
    assert len(calls) == 24 * 2  # steps and layers


@pytest.mark.parametrize("tied", [True, False])
def test_a_skeleton_takes_its_weights_back(tied):
    network = tiny.causal_lm(64, tie_word_embeddings=tied).eval()
    skeleton = without_weights(network)
    assert all(p.is_meta for p in skeleton.parameters())
    assert not any(p.is_meta for p in network.parameters())
    names = {n for n, _ in network.named_parameters()}
    saved = {n: p for n, p in network.state_dict().items() if n in names}
    again = with_weights(skeleton, saved, torch.device("cpu"))
    ids = torch.arange(1, 9)[None]
    assert torch.equal(again(ids).logits, network(ids).logits)
    saved.pop("model.norm.weight")
    with pytest.raises(AssertionError, match="lost"):
        with_weights(skeleton, saved, torch.device("cpu"))


class TestDeepSpeed:
    @pytest.mark.parametrize("name", [n for n in names("strategy") if "deepspeed" in n])
    def test_its_recipes_say_what_they_name(self, name):
        strategy = build(
            compose(["recipe=deer_stage2", f"strategy={name}"], "fit").trainer.strategy
        )
        assert isinstance(strategy, DeepSpeed)
        zero = strategy.config["zero_optimization"]
        stage, _, offload = name.removeprefix("deepspeed_").partition("_")
        assert zero["stage"] == int(stage)
        assert ("offload_optimizer" in zero) == bool(offload)
        assert ("offload_param" in zero) == (bool(offload) and stage == "3")

    @pytest.mark.parametrize("given", ["strategy=deepspeed_2", "strategy=fsdp2_offload"])
    def test_without_a_gpu_it_is_refused_with_what_would_work(self, lab, given):
        with pytest.raises(ValueError, match="strategy=ddp and strategy=fsdp2") as error:
            lab.fit("deer_stage2", given, "name=no_gpu")
        assert str(error.value).startswith(given)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("native", [True, False])
def test_precision_follows_the_device(monkeypatch, native):
    monkeypatch.setattr(strategies, "multiplies_bfloat16", lambda: native)
    config = resolve_precision(compose(["recipe=ar_target", "trainer.accelerator=cpu"], "fit"))
    found = config.trainer.precision, config.acceptance.dtype
    assert found == (("bf16-mixed", "bfloat16") if native else ("32-true", "float32"))
    # What is given stays.
    given = ["trainer.precision=64-true", "acceptance.dtype=bfloat16"]
    config = resolve_precision(compose(["recipe=ar_target", *given], "fit"))
    assert (config.trainer.precision, config.acceptance.dtype) == ("64-true", "bfloat16")


def test_an_unknown_strategy_lists_the_known():
    with pytest.raises(ValueError, match="fsdp2"):
        compose(["recipe=deer_stage2", "strategy=fsdp3"], "fit")


def test_names_of_lightnings():
    assert strategy_of("ddp") == "ddp"
    for name in ("fsdp_cpu_offload", "deepspeed_stage_3"):
        with pytest.raises(ValueError, match=rf"{name} .*strategy=fsdp2.*strategy=deepspeed_2"):
            strategy_of(name)

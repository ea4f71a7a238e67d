import json
import re
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import Callback
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.rows.packing import PackedRows
from decoding.engine.params import SamplingParams
from decoding.loading import load
from recipes.compose import compose, defaults, names, scales_of
from recipes.settings import Optimization
from tests.support import tiny
from tests.support.results import as_plain
from tests.support.runs import curve, same, weights
from trainers import fit as fit_module
from trainers.ar import Autoregressive
from trainers.fit import assemble, build_module, check_ids, fit
from trainers.runs.checkpoint_files import Damaged


@pytest.mark.parametrize("recipe", ["ar_target", "diffusion_adapt", "deer_stage1", "deer_stage2"])
def test_exports_load_in_stock_transformers(lab, recipe):
    export = lab.runs / recipe / "export"
    network = AutoModelForCausalLM.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert network.config.vocab_size >= len(tokenizer)
    files = {p.name for p in export.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "generation_config.json"} <= files
    assert not [f for f in files if "optim" in f or f.endswith(".ckpt")]


def test_the_served_drafter_gives_the_text_of_plain_decoding(lab):
    sampler = load(str(lab.runs / "deer_stage2" / "export"), dtype="float32")
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)
    found = as_plain(sampler, ["self return", "def class print list"], params)
    assert found[0].stats.drafter_passes > 0


def test_acceptance_length_and_accuracy_are_logged_at_validation(lab):
    header = (lab.runs / "deer_stage2" / "metrics.csv").read_text().splitlines()[0]
    names = header.split(",")
    assert {"acceptance_length_t0", "acceptance_length_t1", "val_loss", "val_accuracy_1"} <= {
        *names
    }


def test_a_run_records_where_it_came_from(lab):
    folder = lab.runs / "deer_stage2"
    story = json.loads((folder / "provenance.json").read_text())
    assert story["packages"]["torch"] == torch.__version__
    assert "alpha: 1.1\n" in (folder / "config.yaml").read_text()


def test_a_second_run_reuses_what_is_done(lab, capsys):
    before = (lab.runs / "deer_stage2" / "export" / "model.safetensors").stat().st_mtime_ns
    lab.fit("deer_stage2")
    assert "is there already" in capsys.readouterr().out
    assert (lab.runs / "deer_stage2" / "export" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("recipe", ["ar_target", "deer_stage1"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(lab, recipe):
    whole = weights(lab.runs / recipe / "export")
    middle = lab.runs / recipe / "checkpoints" / "step-2.ckpt"
    resumed = lab.fit(recipe, f"name=resumed_{recipe}", f"resume={middle}")
    assert same(weights(resumed), whole)


def test_another_seed_gives_other_weights(lab):
    """Negative control of the bit-for-bit comparison."""
    other = lab.fit("ar_target", "name=other_seed", "seed=1")
    assert not same(weights(other), weights(lab.runs / "ar_target" / "export"))


class Gradients(Callback):
    """Keeps the gradients of the first optimizer step."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.found = {name: p.grad.clone() for name, p in module.named_parameters()}


def gradients(lab, tmp_path, recipe, *overrides):
    arguments = lab.arguments(recipe, "trainer.precision=64-true", "trainer.max_steps=1")
    config = compose([*arguments, *overrides], "fit")
    seed_everything(0)
    module = build_module(config)
    trainer, loaders, _ = assemble(config, module, tmp_path, 0)
    trainer.callbacks.append(kept := Gradients())
    trainer.fit(module, *loaders)
    return kept.found


@pytest.mark.parametrize("recipe", ["ar_target", "deer_stage1", "deer_stage2"])
def test_accumulation_does_not_change_the_gradient(lab, tmp_path, recipe):
    """One forward of 4 rows against 4 forwards of 1, in float64."""
    whole = gradients(lab, tmp_path, recipe)
    parts = gradients(lab, tmp_path, recipe, "trainer.micro_batch_size=1")
    assert max((parts[n] - g).abs().max().item() for n, g in whole.items()) <= 1e-10
    # Negative control: other rows are seen.
    half = gradients(lab, tmp_path, recipe, "trainer.batch_size=2", "trainer.micro_batch_size=2")
    assert max((half[n] - g).abs().max().item() for n, g in whole.items()) > 1e-6


class TestWarmup:
    def rates(self, lab, name):
        return list(curve(lab.runs / "ar_target" / name, "lr").values())

    @pytest.mark.parametrize(
        ("given", "steps", "warmup"),
        [
            (20000, 83333, 20000),  # asarm_code's, as published
            (25, 100, 25),
            (26, 100, 20),
            (100, 8, 1),
            (100, 4, 0),
            (0, 5, 0),
        ],
    )
    def test_one_of_more_than_a_quarter_becomes_a_fifth(self, given, steps, warmup):
        assert Optimization(lr=1.0, warmup_steps=given).warmup(steps) == warmup

    def test_a_short_run_says_so_at_every_scale(self, lab, capsys):
        lab.fit("ar_target", "optimization.warmup_steps=3", "trainer.max_steps=4", "name=warm_lab",
                "trainer.log_every=1")  # fmt: skip
        rates = self.rates(lab, "warm_lab")
        assert rates[0] == max(rates) == pytest.approx(2e-3)
        said = capsys.readouterr().out
        assert "4 steps, 0 of them to warm up (not 3 in so short a run), to" in said

    def test_the_schedule_has_all_of_it(self, lab, capsys):
        lab.fit("ar_target", "optimization.warmup_steps=1", "trainer.max_steps=4", "name=warm",
                "trainer.log_every=1")  # fmt: skip
        assert self.rates(lab, "warm")[:2] == pytest.approx([0.0, 2e-3])
        assert "4 steps, 1 of them to warm up, to" in capsys.readouterr().out

    def test_no_scale_changes_another_than_a_short_runs(self):
        """A fifth at lab scale, whose runs are short, and what the recipe has elsewhere."""
        for recipe in names("recipe"):
            for scale in scales_of(recipe):
                config = defaults("fit", recipe, scale)
                steps = config.get("trainer", {}).get("max_steps")
                if steps is not None:
                    o, given = Optimization(**config.optimization), config.optimization.warmup_steps
                    small = scale in ("lab", "quick")
                    assert o.warmup(steps) == (min(given, steps // 5) if small else given)


class TestMistakes:
    def refused(self, lab, recipe, *overrides):
        with pytest.raises(ValueError) as error:
            lab.fit(recipe, *overrides)
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_missing_input_names_the_command(self, lab, tmp_path):
        message = self.refused(lab, "deer_stage1", f"runs={tmp_path}", "build_inputs=false")
        assert "python -m trainers.fit recipe=diffusion_adapt" in message

    def test_other_settings_in_the_same_folder(self, lab):
        message = self.refused(lab, "deer_stage1", "optimization.lr=0.5")
        assert "optimization.lr" in message
        assert "name=" in message

    def test_resume_from_nowhere(self, lab):
        message = self.refused(lab, "deer_stage1", "name=x1", "resume=/no/such.ckpt")
        assert "/no/such.ckpt" in message

    def test_damaged_checkpoint(self, lab, tmp_path):
        damaged = tmp_path / "last.ckpt"
        whole = (lab.runs / "deer_stage1" / "checkpoints" / "step-4.ckpt").read_bytes()
        damaged.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(Damaged, match=re.escape(str(damaged))):
            lab.fit("deer_stage1", "name=x6", f"resume={damaged}")

    def test_strategy_that_the_machine_cannot_run(self, lab):
        message = self.refused(lab, "deer_stage1", "name=x7", "strategy=deepspeed_2")
        assert "strategy=deepspeed_2" in message
        assert "CUDA" in message

    def test_batch_that_cannot_be_split(self, lab):
        message = self.refused(lab, "deer_stage1", "name=x2", "trainer.micro_batch_size=3")
        assert "batch_size=4" in message

    def test_alpha_below_one(self, lab):
        assert "alpha=0.9" in self.refused(lab, "deer_stage2", "name=x3", "module.alpha=0.9")

    def test_diverging_run_is_stopped(self, lab):
        message = self.refused(
            lab, "deer_stage2", "name=x4", "optimization.lr=500.0", "trainer.max_steps=60",
            "trainer.divergence_wait=2", "optimization.warmup_steps=0",
        )  # fmt: skip
        assert "diverges" in message or "nan" in message
        assert "checkpoint" in message

    def test_target_with_another_tokenizer(self, lab, tmp_path):
        other = fit(
            compose(
                [*lab.arguments("ar_target"), "tokenizer.vocab_size=300", f"runs={tmp_path}"], "fit"
            )
        )
        message = self.refused(lab, "deer_stage1", "name=x5", f"target={other}")
        assert str(other) in message
        assert "tokenizer" in message

    def test_damaged_weights(self, lab, tmp_path):
        import shutil

        copy = tmp_path / "export"
        shutil.copytree(lab.runs / "ar_target" / "export", copy)
        data = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=re.escape(str(copy))):
            load(str(copy))
        (copy / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json"):
            load(str(copy))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("optimization={a: 1}", "unknown key 'optimization.a'"),
        ("+data.train.source=-1", "source='-1' is not a local path"),
    ],
)
def test_a_mistake_before_the_first_step_leaves_no_files(tmp_path, monkeypatch, given, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runs = tmp_path / "runs"
    with pytest.raises(ValueError, match=said):
        fit(compose(["recipe=ar_target", f"runs={runs}", given], "fit"))
    assert not [file for file in runs.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("gpus", "given", "said"),
    [
        (0, [], "scale=lab, on the CPU; to have another give scale=quick|small|paper\n"),
        (
            8,
            [],
            "on 1 of the 8 GPUs here; to have another give scale=quick|small|paper, or trainer.dev",
        ),
        (8, ["trainer.devices=8"], ""),
    ],
)
def test_what_was_not_chosen_is_said(monkeypatch, capsys, gpus, given, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(fit_module, "fit", lambda config: None)
    fit_module.run(["recipe=deer_stage2", *given])
    shown = capsys.readouterr().out
    assert said in shown
    assert bool(shown) == bool(said)


def test_a_type_that_changes_the_tokenizer_is_refused_before_the_training(lab, monkeypatch):
    """Qwen2's class of tokenizers would not be the trained one: seen by a check of the export."""

    def steps(*arguments, **options):
        raise AssertionError("it is trained")

    monkeypatch.setattr(fit_module.pl.Trainer, "fit", steps)
    with pytest.raises(ValueError, match=r"'qwen2'.*network\.model_type=llama"):
        lab.fit("ar_target", "name=qwen", "network.model_type=qwen2")
    assert not (lab.runs / "ar_target" / "qwen").exists()
    with pytest.raises(AssertionError, match="trained"):  # the negative control
        lab.fit("ar_target", "name=llama", "network.model_type=qwen3")


def test_steps_that_train_nothing_are_no_training(lab, monkeypatch):
    """Any method is refused: here no token has a weight, as where no draft block has a target."""
    monkeypatch.setattr(Autoregressive, "weight", lambda self, batch: batch["trained"][:, 1:] * 0.0)
    with pytest.raises(ValueError, match=r"steps so far have trained nothing") as caught:
        lab.fit("ar_target", "name=nothing")
    assert "\n" not in str(caught.value)
    assert not (lab.runs / "ar_target" / "nothing" / "export").exists()


def test_ids_that_the_model_lacks_are_one_line(tmp_path):
    """The embedding would raise an IndexError in the first step."""
    good, bad = (
        PackedRows.build(tmp_path / str(last), [([5, last], [True] * 2)], 2, 0, {})
        for last in (29, 30)
    )
    small, big = tiny.causal_lm(30), tiny.causal_lm(31)
    with pytest.raises(ValueError, match="the token id 30, and the model knows 0 to 29"):
        check_ids(SimpleNamespace(network=small, target=None), good, bad)
    with pytest.raises(ValueError, match="the token id 30"):
        check_ids(SimpleNamespace(network=big, target=small, draft_ids=[1]), bad)
    check_ids(SimpleNamespace(network=big, target=None), good, bad)
    check_ids(SimpleNamespace(network=small, target=None), good, range(3))  # rows without ids
    check_ids(SimpleNamespace(network=small, target=None, draft_ids=[1]), bad)


def test_a_batch_without_what_the_module_reads(lab):
    with pytest.raises(ValueError, match="JointDensity reads 'masked' of a batch, which has"):
        lab.fit("asarm_joint", "data.corruption=null", "name=nothing_masked")


@pytest.mark.parametrize("precision", ["", "bf16-mixd"])
def test_a_precision_is_one_of_lightnings(lab, precision):
    with pytest.raises(ValueError, match=rf"trainer.precision '{precision}'"):
        lab.fit("ar_target", f"trainer.precision={precision}", "name=odd_precision")


def test_a_device_is_no_input(lab):
    """Its content has no end, and inputs are fingerprinted whole."""
    with pytest.raises(ValueError, match="/dev/zero is not a valid SchedulerType"):
        lab.fit("ar_target", "optimization.schedule=/dev/zero", "name=device")

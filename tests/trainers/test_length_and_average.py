"""The length of a run in epochs, and the moving average of its weights (`optimization.ema`)."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from decoding.loading import load
from recipes.compose import compose
from recipes.settings import Trainer
from tests.support.runs import curve, same_run, same_weights
from trainers.base import BaseModule, Optimization
from trainers.export import export_checkpoint
from trainers.runs.checkpoint_files import checkpoint_files, number_of

EMA = "optimization.ema=0.8"
NO_STEPS = "trainer.max_steps=null"


def steps_of(folder):
    return number_of(checkpoint_files(folder / "checkpoints")[-1])


def rows_of(folder):
    return json.loads((folder / "provenance.json").read_text())["data"]["train"]["rows"]


class TestEpochs:
    def test_one_replaces_the_other_on_the_command_line(self):
        config = compose(["recipe=deer_stage1", "trainer.max_epochs=2"], "fit")
        assert (config.trainer.max_steps, config.trainer.max_epochs) == (None, 2.0)
        config = compose(["recipe=deer_stage1", "scale=paper"], "fit")
        assert (config.trainer.max_steps, config.trainer.max_epochs) == (None, 1.0)
        config = compose(["recipe=deer_stage1", "scale=paper", "trainer.max_steps=7"], "fit")
        assert (config.trainer.max_steps, config.trainer.max_epochs) == (7, None)

    @pytest.mark.parametrize(
        "given",
        [["trainer.max_steps=3", "trainer.max_epochs=1"], ["trainer.max_steps=null"]],
    )
    def test_exactly_one_is_needed(self, given):
        with pytest.raises(ValueError, match=r"trainer.max_steps=.*trainer.max_epochs=.*exactly"):
            Trainer(**compose(["recipe=deer_stage1", *given], "fit").trainer)

    @pytest.mark.parametrize("given", ["0", "-1"])
    def test_it_must_be_positive(self, given):
        with pytest.raises(ValueError, match=rf"trainer.max_epochs={given}"):
            compose(["recipe=deer_stage1", f"trainer.max_epochs={given}"], "fit")

    def test_the_steps_and_the_schedule_follow_from_the_rows(self, lab, capsys):
        folder = lab.runs / "ar_target" / "epochs"
        shown = ["trainer.log_every=1", "optimization.warmup_steps=0", "trainer.batch_size=32",
                 "trainer.micro_batch_size=32", "optimization.schedule=linear"]  # fmt: skip
        lab.fit("ar_target", "name=epochs", NO_STEPS, "trainer.max_epochs=1.5", *shown)
        rows = rows_of(folder)
        steps = math.ceil(1.5 * rows / 32)
        assert steps_of(folder) == steps > 3
        assert f"{steps} steps (1.5 epochs of {rows} rows)" in capsys.readouterr().out
        rates = [*curve(folder, "lr").values()]
        assert rates == pytest.approx([2e-3 * (1 - s / steps) for s in range(steps)], rel=1e-4)
        # The run is described as it was asked for, so the same command finds it again.
        stored = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]
        assert (stored["max_steps"], stored["max_epochs"]) == (None, 1.5)
        assert "1.5 epochs" in (folder / "export" / "README.md").read_text()

    def test_a_resumed_run_is_the_uninterrupted_one(self, lab):
        arguments = [NO_STEPS, "trainer.max_epochs=0.1", "trainer.checkpoint_every=1",
                     "trainer.keep_last=9"]  # fmt: skip
        lab.fit("ar_target", "name=ep_whole", *arguments)
        whole = lab.runs / "ar_target" / "ep_whole"
        first = checkpoint_files(whole / "checkpoints")[0]
        lab.fit("ar_target", "name=ep_again", f"resume={first}", *arguments)
        assert steps_of(whole) > number_of(first)
        assert same_weights(whole, lab.runs / "ar_target" / "ep_again")


class TestAverage:
    def test_it_follows_the_weights(self):
        network = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            network.weight.fill_(1.0)
        module = BaseModule(network, None, Optimization(lr=1.0, ema=0.75))
        module._trainer = SimpleNamespace(accumulate_grad_batches=2, global_step=1000)
        for index, weight in enumerate([2.0, 3.0, 4.0, 5.0]):
            with torch.no_grad():
                network.weight.fill_(weight)
            module.on_train_batch_end(None, {}, index)
        # After micro-batches 1 and 3: 0.75 * 1 + 0.25 * 3 = 1.5, then 0.75 * 1.5 + 0.25 * 5.
        assert module.average.weight.flatten().tolist() == [2.375, 2.375]
        with module.averaged():
            assert network.weight.flatten().tolist() == [2.375, 2.375]
        assert network.weight.flatten().tolist() == [5.0, 5.0]
        assert not any(p.requires_grad for p in module.average.parameters())

    @pytest.mark.parametrize("ema", [0.25, 0.9999])
    def test_its_start_is_left_behind(self, ema):
        network = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            network.weight.fill_(100.0)
        module = BaseModule(network, None, Optimization(lr=1.0, ema=ema))
        expected = 100.0
        for step in range(1, 41):
            module._trainer = SimpleNamespace(accumulate_grad_batches=1, global_step=step)
            with torch.no_grad():
                network.weight.fill_(float(step))
            module.on_train_batch_end(None, {}, step - 1)
            decay = min(ema, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * step
            assert module.average.weight.item() == pytest.approx(expected, rel=1e-5)
        assert module.average.weight.item() == pytest.approx(40, abs=10)  # without: 99.8

    def test_sharded_networks_have_none(self):
        module = BaseModule(torch.nn.Linear(2, 1), None, Optimization(lr=1.0, ema=0.9))
        strategy = SimpleNamespace(shard=lambda *_: None)
        with pytest.raises(ValueError, match=r"optimization.ema=0.9 .*strategy=ddp"):
            module.check_strategy(strategy)

    @pytest.mark.parametrize("ema", [0, 1, 1.5, -0.1])
    def test_a_decay_is_inside_0_and_1(self, ema):
        with pytest.raises(ValueError, match=rf"optimization.ema={ema} "):
            compose(["recipe=deer_stage1", f"optimization.ema={ema}"], "fit")

    def test_the_export_and_the_validation_are_of_the_average(self, lab):
        base = ["trainer.validate_every=2", "trainer.keep_last=9", "trainer.log_every=1"]
        for name, more in (("plain", []), ("ema", [EMA]), ("ema_again", [EMA])):
            lab.fit("deer_stage1", f"name=av_{name}", *base, *more)
        plain, ema, again = (lab.runs / "deer_stage1" / f"av_{n}" for n in
                             ("plain", "ema", "ema_again"))  # fmt: skip
        assert same_run(ema, again)
        # Training itself is the same; what is measured and exported is not.
        assert curve(plain) == curve(ema)
        assert curve(plain, "val_loss") != curve(ema, "val_loss")
        assert not same_weights(plain, ema)
        last = checkpoint_files(ema / "checkpoints")[-1]
        state = torch.load(last, weights_only=False)["state_dict"]
        exported = load_file(ema / "export" / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(exported[name], state[f"average.{name}"])
        assert not torch.equal(exported[name], state[f"network.{name}"])
        assert load(str(ema / "export"), dtype="float32").generate(["def"])

    def test_a_resumed_run_goes_on_with_its_average(self, lab):
        arguments = [EMA, "trainer.checkpoint_every=2", "trainer.keep_last=9"]
        lab.fit("ar_target", "name=av_whole", *arguments)
        whole = lab.runs / "ar_target" / "av_whole"
        middle = whole / "checkpoints" / "step-2.ckpt"
        lab.fit("ar_target", "name=av_resumed", f"resume={middle}", *arguments)
        assert same_weights(whole, lab.runs / "ar_target" / "av_resumed")
        other = lab.fit("ar_target", "name=av_other", "optimization.ema=0.1")
        assert not same_weights(whole, other.parent)

    def test_an_export_of_a_checkpoint_is_averaged_too(self, lab):
        run = lab.runs / "deer_stage1" / "av_ema"
        if not run.exists():
            lab.fit("deer_stage1", "name=av_ema", EMA, "trainer.keep_last=9",
                    "trainer.validate_every=2", "trainer.log_every=1")  # fmt: skip
        last = checkpoint_files(run / "checkpoints")[-1]
        folder = export_checkpoint(run, last)
        again, once = (load_file(f / "model.safetensors") for f in (folder, run / "export"))
        assert all(torch.equal(again[k], once[k]) for k in once)

"""What stops a run, what the message says, and what is left on the disk."""

import re
from types import SimpleNamespace

import pytest
import torch

from data.rows.packing import PackedRows
from recipes.compose import compose
from tests.support.refused import refused
from tests.support.spoil import nan, spoil
from trainers.ar import Autoregressive
from trainers.diffusion import MaskedDiffusion
from trainers.runs.guards import LossGuard, less_memory, memory_error

EACH = ("trainer.checkpoint_every=1", "trainer.keep_last=1", "trainer.keep_best=0")


def checkpoints(lab, name):
    """{step: whether all weights of its checkpoint are finite}."""
    files = (lab.runs / "ar_target" / name / "checkpoints").glob("*.ckpt")
    stored = [torch.load(f, weights_only=False) for f in files]
    return {
        s["global_step"]: all(w.isfinite().all() for w in s["state_dict"].values()) for s in stored
    }


def judged(lab, name):
    """What the guard knew at the last step."""
    file = lab.runs / "ar_target" / name / "checkpoints" / "step-4.ckpt"
    return torch.load(file, weights_only=False)["callbacks"]["LossGuard"]


@pytest.mark.parametrize("micro", [4, 2])
def test_a_loss_that_is_not_finite_names_step_samples_and_rows(lab, monkeypatch, micro):
    """The third step goes wrong; its rows are those that the module has seen."""
    name, seen = f"nan_{micro}", []
    spoil(monkeypatch, Autoregressive, 10 // micro, nan)  # rows 8 to 11 make the third step
    whole = Autoregressive.losses
    keep = lambda self, batch: seen.extend(batch["input_ids"]) or whole(self, batch)  # noqa: E731
    monkeypatch.setattr(Autoregressive, "losses", keep)
    message = refused(
        lab.fit, "ar_target", f"name={name}", f"trainer.micro_batch_size={micro}", *EACH
    )
    assert "the loss is nan at step 3, on samples 8 to 11" in message
    rows, folder = re.search(r"\(rows \[([\d, ]+)\] of (\S+)\)", message).groups()
    packed = PackedRows(folder)
    named = [packed[int(i)]["input_ids"] for i in rows.split(",")]
    assert torch.equal(torch.stack(named), torch.stack(seen[8:12]))
    assert not torch.equal(torch.stack(named), torch.stack(seen[4:8]))
    assert checkpoints(lab, name) == {2: True}
    assert re.search(r"the last checkpoint is \S+step-2\.ckpt", message)


def spoil_update(monkeypatch):
    """The second update is not finite, though no loss was."""

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 1:
            for p in self.parameters():
                p.grad.fill_(float("inf"))

    monkeypatch.setattr(Autoregressive, "on_before_optimizer_step", on_before_optimizer_step)


def test_weights_that_are_not_finite_are_never_written(lab, monkeypatch):
    spoil_update(monkeypatch)
    message = refused(lab.fit, "ar_target", "name=no_weights", *EACH)
    assert "the weights are not finite after the update at step 2" in message
    assert checkpoints(lab, "no_weights") == {1: True}


def test_without_the_guard_they_would_be(lab, monkeypatch):
    """Negative control."""
    spoil_update(monkeypatch)
    monkeypatch.delattr(LossGuard, "on_save_checkpoint")
    message = refused(lab.fit, "ar_target", "name=bad_weights", *EACH)
    assert "the loss is nan at step 3" in message
    assert checkpoints(lab, "bad_weights") == {2: False}


def test_a_resumed_run_is_judged_as_the_uninterrupted_one(lab):
    wait = "trainer.divergence_wait=1"
    lab.fit("ar_target", "name=judged", wait)
    before = lab.runs / "ar_target" / "judged" / "checkpoints" / "step-2.ckpt"
    lab.fit("ar_target", "name=judged_again", wait, f"resume={before}")
    assert judged(lab, "judged_again") == judged(lab, "judged")
    assert torch.load(before, weights_only=False)["callbacks"]["LossGuard"] != judged(lab, "judged")
    # A step is judged once, however many forwards it has.
    lab.fit("ar_target", "name=judged_parts", wait, "trainer.micro_batch_size=1")
    for key, value in judged(lab, "judged").items():
        assert abs(judged(lab, "judged_parts")[key] - value) < 1e-5


def judge(monkeypatch, losses):
    """The step at which these losses are stopped; None: not at all."""
    monkeypatch.setattr("trainers.runs.guards.advice", lambda trainer: "")
    guard, trainer = LossGuard(factor=1.5, wait=20), SimpleNamespace(accumulate_grad_batches=1)
    for trainer.global_step, loss in enumerate(losses, 1):
        trainer.callback_metrics = {"loss": loss}
        try:
            guard.on_train_batch_end(trainer, None, None, None, 0)
        except ValueError:
            return trainer.global_step
    return None


def test_a_loss_may_cross_zero(monkeypatch):
    """That of a density: it falls from 5 to -1.3 and wavers there."""
    steps = torch.arange(400.0)
    wavers = 0.5 * torch.randn(400, generator=torch.Generator().manual_seed(0))
    falls = 6.3 * torch.exp(-steps / 40) - 1.3
    assert judge(monkeypatch, (falls + wavers).tolist()) is None
    rises = falls + (steps - 300).clamp_min(0) * 0.1
    assert 300 < judge(monkeypatch, rises.tolist()) < 360


def test_a_positive_loss_may_be_half_again_its_best(monkeypatch):
    steps = torch.arange(400.0)
    falls = 5 * torch.exp(-steps / 40) + 3.5
    assert judge(monkeypatch, (falls + 1.7 * (steps > 300)).tolist()) is None
    assert 300 < judge(monkeypatch, (falls + 1.9 * (steps > 300)).tolist()) < 400


def no_memory(loss):
    return torch.empty(2**60, dtype=torch.uint8)  # the allocator's own error


def test_no_memory_on_the_cpu_says_what_to_lower(lab, monkeypatch):
    spoil(monkeypatch, Autoregressive, 1, no_memory)
    message = refused(lab.fit, "ar_target", "name=memory")
    assert "CPU" in message
    assert "1152921504606846976 bytes" in message
    assert "trainer.micro_batch_size=4" in message
    assert "trainer.batch_size=4" in message
    assert "trainer.checkpoint_activations=true" in message
    assert "data.train.length=48" in message
    assert "anchors" not in message
    assert "fsdp2" not in message  # the processes of one machine share its memory


def no_gpu_memory(loss):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")


def test_no_memory_on_a_gpu_says_what_to_lower(lab, monkeypatch):
    spoil(monkeypatch, MaskedDiffusion, 1, no_gpu_memory)
    one = ("trainer.micro_batch_size=1", "trainer.checkpoint_activations=true")
    message = refused(lab.fit, "deer_stage1", "name=memory", *one)
    assert "GPU" in message
    assert "2.50 GiB" in message
    assert "micro_batch_size" not in message  # 1 is the least there is
    assert "checkpoint_activations" not in message
    for key in ("strategy=fsdp2", "strategy=deepspeed_3", "trainer.devices=1",
                "data.train.length=48", "data.corruption.anchors=4"):  # fmt: skip
        assert key in message
    assert "acceptance.prompts=0" in message


def test_other_errors_stay_what_they_are(lab, monkeypatch):
    """Negative control."""

    def broken(loss):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    spoil(monkeypatch, Autoregressive, 1, broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        lab.fit("ar_target", "name=broken")


def test_a_sharded_run_is_told_to_offload():
    def advice(strategy):
        given = ["recipe=deer_stage1", "scale=paper", f"strategy={strategy}"]
        return less_memory("CUDA out of memory.", compose(given, "fit"))

    assert "strategy=fsdp2_offload" in advice("fsdp2")
    assert "strategy=" not in advice("deepspeed_3_offload")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("module.memory: out of memory"), False),
    ],
)
def test_what_lack_of_memory_is(error, is_one):
    assert (memory_error(error) is not None) == is_one
    outer = ValueError("cannot load a model")
    outer.__cause__ = error
    assert (memory_error(outer) is not None) == is_one

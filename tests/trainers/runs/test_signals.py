"""Signals: one while a run is set up counts, one in a validation ends it at once."""

import os
import signal
from types import SimpleNamespace

import pytest

from tests.support.runs import cut, kept, same_run
from trainers.drafter import DrafterModule
from trainers.runs.callbacks import AcceptanceLength
from trainers.runs.curve import read_curve
from trainers.runs.signals import Signals

RUN = ("deer_stage2", "trainer.max_steps=8", "trainer.log_every=1", "trainer.validate_every=4",
       "trainer.checkpoint_every=3", "trainer.keep_last=9", "optimization.ema=0.5",
       "trainer.micro_batch_size=1")  # fmt: skip


def send() -> None:
    """A signal to this process, which must not go on behind it."""
    os.kill(os.getpid(), signal.SIGTERM)
    pytest.fail("the signal was not heard")


def validated(folder) -> list[int]:
    """The steps with a validation in a run's metrics."""
    return [int(r["step"]) for r in read_curve(folder / "metrics.csv") if r.get("val_loss")]


def in_acceptance(patch, at: int) -> None:
    """Send a signal while the validation of a step decodes."""
    lengths, steps = AcceptanceLength._lengths, iter((4, 8))

    def measure(*given):
        if next(steps) == at:
            send()
        return lengths(*given)

    patch.setattr(AcceptanceLength, "_lengths", measure)


def in_a_batch(patch, at: int) -> None:
    """Send a signal in the first batch of the validation of a step."""
    evaluate, seen = DrafterModule.evaluate, []

    def evaluated(module, batch):
        if module.trainer.global_step == at:
            assert not seen, "another batch is read"
            seen.append(at)
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(module, batch)

    patch.setattr(DrafterModule, "evaluate", evaluated)


@pytest.fixture(scope="module")
def whole(lab):
    """Eight steps and two validations without a signal."""
    return lab.fit(*RUN, "name=undisturbed").parent


def stopped(lab, where, at, *name):
    """A run that gets a signal in the validation of a step."""
    with pytest.MonkeyPatch.context() as patch:
        where(patch, at)
        with pytest.raises(SystemExit) as end:
            lab.fit(*RUN, *name)
    assert end.value.code == 128 + signal.SIGTERM


class TestInValidation:
    @pytest.mark.parametrize("where", [in_acceptance, in_a_batch])
    @pytest.mark.parametrize("at", [4, 8])
    def test_it_stops_and_the_run_goes_on_before_the_validation(self, lab, whole, where, at):
        """Also in the last step, behind which no other one listens."""
        name = f"{where.__name__}_{at}"
        stopped(lab, where, at, f"name={name}")
        folder = whole.with_name(name)
        assert kept(folder)[-1] == at
        assert not (folder / "export").exists()
        assert validated(folder) == [step for step in (4, 8) if step < at]
        lab.fit(*RUN, f"name={name}")
        assert same_run(folder, whole)

    def test_it_may_come_again_in_the_validation_that_is_made_up_for(self, lab, whole):
        for _ in range(2):
            stopped(lab, in_a_batch, 8, "name=signal_twice")
        lab.fit(*RUN, "name=signal_twice")
        assert same_run(whole.with_name("signal_twice"), whole)

    def test_without_the_note_in_the_checkpoint_a_validation_is_missing(
        self, lab, whole, monkeypatch
    ):
        """Negative control."""
        stopped(lab, in_acceptance, 4, "name=signal_forgotten")
        monkeypatch.setattr(Signals, "on_load_checkpoint", lambda *_: None)
        lab.fit(*RUN, "name=signal_forgotten")
        assert validated(whole.with_name("signal_forgotten")) == [8]
        assert validated(whole) == [4, 8]

    def test_a_checkpoint_without_the_note_owes_nothing(self, lab, whole):
        """One of an earlier version."""
        copy = cut(whole, "signal_earlier", 6)
        lab.fit(*RUN, "name=signal_earlier")
        assert same_run(copy, whole)


def test_a_signal_while_the_run_is_set_up_counts():
    """Lightning takes it then, and ends a run of several processes with status 0 for it."""
    connector = SimpleNamespace(received_sigterm=True)
    trainer = SimpleNamespace(_signal_connector=connector)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    callback = Signals()
    try:
        callback.on_train_start(trainer, SimpleNamespace(interrupted=False))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert callback.number == signal.SIGTERM
    assert not connector.received_sigterm

"""A run of so many minutes: its steps follow from seconds measured here, and then stay."""

import pytest
import yaml

from recipes.compose import compose
from tests.support.runs import cut, same_run
from trainers import fit as fit_module
from trainers.runs.length import SKIPPED, TIMED, Seconds, Stopwatch, plan


@pytest.mark.parametrize(
    ("minutes", "found", "every", "expected"),
    [
        # 1500 s less 30 and a checkpoint of 5; two validations; a step has a fiftieth of 5 s too.
        (25, Seconds(3.5, 0.2, 1, 5, 30), 500, (395, 198, 60, 8)),
        (25, Seconds(3.5, 0.2, 1, 5, 30), 100, (385, 97, 60, 8)),  # four, and each costs steps
        (25, Seconds(3.5, 1, 17.5, 5, 30), 500, (334, 167, 43, 5)),  # 200 s would be over a tenth
        (25, Seconds(3.5, 1, 300, 5, 30), 500, (322, 322, 3, 1)),  # and so is a single prompt
        (60, Seconds(0.1, 0.01, 0.05, 0, 0), 500, (35294, 498, 60, 8)),
    ],
)
def test_the_steps_and_validations_fit_into_the_minutes(minutes, found, every, expected):
    run = plan(minutes, found, every, 50, rows=60, prompts=8)
    assert run[:4] == expected
    assert run.validation == pytest.approx(run.rows * found.row + run.prompts * found.prompt)
    checks = -(-run.steps // run.every)
    spent = found.before + found.checkpoint + checks * run.validation
    spent += run.steps * (found.step + found.checkpoint / 50)
    assert 0.99 * 60 * minutes < spent <= 60 * minutes + run.validation
    assert run.every <= every


def test_no_prompts_stay_none():
    assert plan(25, Seconds(1, 100, 0, 0, 0), 500, 50, rows=60, prompts=0).prompts == 0


def test_too_short_a_run_says_what_it_needs():
    found = Seconds(10, 20, 20, 2, 100)
    with pytest.raises(ValueError, match=r"minutes=1 is too short: .* give minutes=([\d.]+)") as e:
        plan(1, found, 500, 50, 60, 8)
    needed = float(str(e.value).partition("give minutes=")[2].split()[0])
    assert plan(needed, found, 500, 50, 60, 8).steps >= SKIPPED + TIMED


@pytest.mark.parametrize("other", ["trainer.max_steps=8", "trainer.max_epochs=2"])
def test_one_length_is_given(other):
    with pytest.raises(ValueError, match=rf"minutes=25.0 with {other}.* is not allowed"):
        compose(["recipe=deer_stage2", "scale=small", "minutes=25", other], "fit")
    config = compose(["recipe=deer_stage2", "scale=small", "minutes=25"], "fit")
    assert (config.trainer.max_steps, config.trainer.max_epochs) == (None, None)
    config = compose(["recipe=deer_stage2", "scale=small", other], "fit")
    assert config.minutes is None


@pytest.mark.parametrize("given", ["0", "-3", "inf", "nan", "soon"])
def test_minutes_are_a_positive_number(given):
    with pytest.raises(ValueError, match="minutes="):
        compose(["recipe=deer_stage2", f"minutes={given}"], "fit")


LENGTH = ("trainer.max_steps=null", "minutes=0.25")
OTHERS = ("trainer.checkpoint_every=2", "trainer.keep_last=9", "trainer.log_every=1",
          "+network.attention_dropout=0.1")  # fmt: skip


@pytest.fixture
def seconds(monkeypatch):
    """A second a step, as far as the plan knows; what was measured."""
    measured, found = Stopwatch.seconds, []

    def fixed(self, *given):
        found.append(measured(self, *given))
        return Seconds(step=1, row=0.25, prompt=0, checkpoint=0, before=5)

    monkeypatch.setattr(Stopwatch, "seconds", fixed)
    return found


@pytest.mark.slow
def test_the_run_is_that_of_its_steps_and_a_resumed_one_keeps_them(
    lab, seconds, monkeypatch, capsys
):
    folder = lab.runs / "ar_target" / "minutes"
    lab.fit("ar_target", "name=minutes", *LENGTH, *OTHERS)
    assert "minutes=0.25: 8 steps of 1 s, 2 validations of 1 s" in capsys.readouterr().out
    (found,) = seconds
    assert 0 < found.step < found.before
    assert 0 < found.row < found.before
    assert 0 < found.prompt < found.before
    assert 0 < found.checkpoint < found.before
    assert not (folder / ".measured").exists()
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    assert stored["minutes"] == 0.25
    assert (stored["trainer"]["max_steps"], stored["trainer"]["validate_every"]) == (8, 4)
    lab.fit("ar_target", "name=steps", "trainer.max_steps=8", *OTHERS)
    assert same_run(folder, lab.runs / "ar_target" / "steps")
    # Killed and started again, and once more when it is finished: nothing is measured.
    monkeypatch.setattr(fit_module, "in_minutes", None)
    again = cut(folder, "minutes_again", 4)
    lab.fit("ar_target", "name=minutes_again", *LENGTH, *OTHERS)
    assert same_run(folder, again)
    lab.fit("ar_target", "name=minutes", *LENGTH, *OTHERS)
    with pytest.raises(ValueError, match=r"other settings \(minutes: 0.25, now 0.5\)"):
        lab.fit("ar_target", "name=minutes", *LENGTH, "minutes=0.5", *OTHERS)
    checkpoint = folder / "checkpoints" / "step-4.ckpt"
    with pytest.raises(ValueError, match=r"of a run of another length: give trainer.max_steps="):
        lab.fit("ar_target", "name=other", *LENGTH, "minutes=1", f"resume={checkpoint}", *OTHERS)
    # The negative control: one that has nothing yet is measured.
    monkeypatch.undo()
    monkeypatch.setattr(Stopwatch, "seconds", lambda *_: Seconds(1, 1, 1, 0, 14))
    with pytest.raises(ValueError, match=r"minutes=0.25 is too short"):
        lab.fit("ar_target", "name=too_short", *LENGTH, *OTHERS)
    assert not (lab.runs / "ar_target" / "too_short").exists()

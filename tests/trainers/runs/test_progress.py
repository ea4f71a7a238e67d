"""The figures of a run while it trains, on a clock that moves a second each time it is read."""

import io
import itertools
import re

import pytest
from rich.console import Console

from tests.support.spoil import nan, spoil
from trainers import fit as fit_module
from trainers.diffusion import MaskedDiffusion
from trainers.runs.progress import Progress


def ticking():
    return itertools.count().__next__


@pytest.fixture
def lines(monkeypatch):
    """Every step of a fit is a line."""
    monkeypatch.setattr(fit_module, "Progress", lambda: Progress(seconds=0, clock=ticking()))


def shown(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


def test_the_time_left_counts_the_last_steps_and_validations():
    progress = Progress()
    progress.steps.extend([1000.0, *[2.0] * 50])  # the first one compiled
    progress.validation = 10.0
    # 3 steps are done of 10: 7 more of 2 s, and the validations after 4, 6, 8 and 10.
    assert progress._left(3, 10, every=2) == 7 * 2 + 4 * 10
    assert progress._left(10, 10, every=2) == 0


@pytest.mark.parametrize("micro", [4, 1])
def test_lines_tell_step_loss_rate_and_time_left(lab, lines, capsys, micro):
    lab.fit(
        "ar_target", f"name=lines_{micro}", f"trainer.micro_batch_size={micro}",
        "trainer.validate_every=2",
    )  # fmt: skip
    found = shown(capsys)
    # A step of 4 rows of 48 tokens takes a second, and so does a validation.
    assert all("  192 tokens/s  loss " in line for line in found)
    steps = [(line.split("  ")[0], "val_loss" in line, line.split("  ")[-1]) for line in found]
    assert steps == [
        ("step 1/4", False, "0:00:03 left"),
        ("step 2/4", False, "0:00:02 left"),
        ("step 2/4", True, "0:00:03 left"),
        ("step 3/4", True, "0:00:02 left"),
        ("step 4/4", True, "0:00:00 left"),
        ("step 4/4", True, "0:00:00 left"),
    ]


def test_time_left_of_a_resumed_run_counts_what_is_left(lab, lines, capsys):
    middle = lab.runs / "ar_target" / "checkpoints" / "step-2.ckpt"
    lab.fit("ar_target", "name=lines_resumed", f"resume={middle}")
    first = shown(capsys)[0]
    assert first.startswith("step 3/4  192 tokens/s")
    assert first.endswith("0:00:01 left")


def test_lines_are_rare_but_for_the_end_and_validations(lab, monkeypatch, capsys):
    monkeypatch.setattr(fit_module, "Progress", lambda: Progress(seconds=100, clock=ticking()))
    lab.fit("deer_stage1", "name=rare", "trainer.max_steps=6", "trainer.validate_every=5")
    found = shown(capsys)
    steps = [line.split("  ")[0] for line in found]
    assert steps == ["step 1/6", "step 3/6", "step 6/6", "step 6/6"]
    assert ["acceptance length t0 " in line for line in found] == [False, True, True, True]


def bar_of(lab, monkeypatch, *overrides, width=80):
    """What a terminal shows of a fit, frame after frame, without colours."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, legacy_windows=False)
    shown = Progress(console, clock=ticking())
    monkeypatch.setattr(fit_module, "Progress", lambda: shown)
    try:
        lab.fit("deer_stage1", *overrides)
    finally:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")
        screen = [line.rstrip() for line in text.splitlines()]
        assert not shown.bar.live.is_started  # the terminal is given back
    return screen


def test_a_terminal_shows_a_bar_and_the_same_figures(lab, monkeypatch):
    screen = bar_of(lab, monkeypatch, "name=bar")
    bars = [line for line in screen if line.startswith("training ")]
    assert re.fullmatch(r"training +━{40} 4/4 0:00:00 left", bars[-1])
    # 4 rows of 48 tokens and 4 blocks of 5.
    figures = r"272 tokens/s  loss [\d.]+  val_loss [\d.]+  acceptance length t0 [\d.]+ t1 [\d.]+"
    assert any(re.fullmatch(figures, line) for line in screen), screen
    assert any(line.startswith("validating ") for line in screen)
    assert not [line for line in screen if "v_num" in line or "poch" in line]
    assert max(map(len, screen)) <= 80


def test_the_bar_of_a_resumed_run_starts_where_it_goes_on(lab, monkeypatch):
    middle = lab.runs / "deer_stage1" / "checkpoints" / "step-2.ckpt"
    screen = bar_of(lab, monkeypatch, "name=bar_resumed", f"resume={middle}")
    bars = [line for line in screen if line.startswith("training ")]
    assert " 2/4" in bars[0]
    assert " 4/4" in bars[-1]


def test_a_run_that_fails_gives_the_terminal_back(lab, monkeypatch):
    spoil(monkeypatch, MaskedDiffusion, 2, nan)
    with pytest.raises(ValueError, match="the loss is nan"):
        bar_of(lab, monkeypatch, "name=bar_fails")

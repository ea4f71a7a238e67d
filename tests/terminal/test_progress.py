"""Long work tells what it does and the time left; short work says nothing. The clock is a fake."""

import sys
import threading

import pytest

from terminal import progress
from terminal.progress import RANKS, Work, track


class Clock:
    """A clock that a test turns; `work` shows its state after each turn, as its thread would."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def turn(self, work, seconds):
        for _ in range(seconds):
            self.now += 1
            work.show()


@pytest.fixture
def clock(monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Work, "_watch", lambda work: None)  # the tests show
    return Clock()


def lines(capsys):
    out, err = capsys.readouterr()
    assert out == ""  # where commands print their results
    return err.splitlines()


class TestWork:
    def test_short_work_prints_nothing(self, clock, capsys):
        with Work("packing", 9, "texts", clock=clock) as work:
            for _ in range(4):
                clock.turn(work, 1)
                work.advance()
        assert lines(capsys) == []

    def test_long_work_says_a_line_every_ten_seconds_and_the_time_left(self, clock, capsys):
        with Work("packing", 9, "texts", clock=clock) as work:
            for _ in range(9):
                clock.turn(work, 4)
                work.advance()
        assert lines(capsys) == [
            "packing: 1 of 9 texts, 0:00:40 left",
            "packing: 3 of 9 texts, 0:00:30 left",
            "packing: 6 of 9 texts, 0:00:12 left",
            "packing: 8 of 9 texts, 0:00:04 left",
            "packing: done in 0:00:36",
        ]

    def test_work_of_one_piece_says_that_it_goes_on(self, clock, capsys):
        with Work("conversion of a.gguf", clock=clock) as work:
            clock.turn(work, 16)
        found = ["conversion of a.gguf: 0:00:05 so far", "conversion of a.gguf: 0:00:15 so far"]
        assert lines(capsys) == [*found, "conversion of a.gguf: done in 0:00:16"]

    @pytest.mark.parametrize(
        ("count", "told"), [(6000, "6,000 texts, 1,200 a second"), (2, "2 texts, 24 a minute")]
    )
    def test_without_a_total_there_is_a_rate(self, clock, capsys, count, told):
        with Work("packing", unit="texts", clock=clock) as work:
            work.advance(count)
            clock.turn(work, 6)
        assert lines(capsys)[0] == f"packing: {told}, 0:00:05 so far"

    def test_bytes_are_gigabytes(self, clock, capsys):
        with Work("fingerprint", 3 * 10**9, "B", clock=clock) as work:
            work.advance(10**9)
            clock.turn(work, 5)
        assert lines(capsys)[0] == "fingerprint: 1.0 of 3.0 GB, 0:00:10 left"

    def test_what_is_polled_counts_within_an_item(self, clock, capsys):
        with Work("answers", 8, poll=lambda: (2.0, "30 tokens/s"), clock=clock) as work:
            clock.turn(work, 5)
            work.done = 4
            clock.turn(work, 10)
        assert lines(capsys)[:2] == [
            "answers: 2 of 8, 30 tokens/s, 0:00:15 left",
            "answers: 6 of 8, 30 tokens/s, 0:00:05 left",
        ]

    def test_the_inner_one_is_shown(self, clock, capsys):
        with Work("outer", clock=clock) as outer:
            with Work("inner", clock=clock) as inner:
                for _ in range(6):
                    clock.turn(outer, 1)
                    inner.show()
            assert lines(capsys) == ["inner: 0:00:05 so far", "inner: done in 0:00:06"]
            clock.turn(outer, 1)
        assert lines(capsys)[0] == "outer: 0:00:07 so far"

    def test_work_that_failed_is_not_done(self, clock, capsys):
        def half():
            with Work("packing", clock=clock) as work:
                clock.turn(work, 6)
                raise ValueError("half")

        with pytest.raises(ValueError, match="half"):
            half()
        assert lines(capsys) == ["packing: 0:00:05 so far"]
        assert progress._open == []

    def test_a_bar_moves_in_a_terminal_and_goes_away(self, clock, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        with Work("packing", 10, clock=clock) as work:
            for _ in range(10):
                clock.turn(work, 2)
                work.advance()
        shown = capsys.readouterr().err.split("\r")
        bars = [text.count("█") for text in shown if "░" in text]
        assert bars == sorted(bars)
        assert len({*bars}) > 5
        assert shown[-1] == "\x1b[Kpacking: done in 0:00:20\n"


class TestThread:
    """A thread shows the state; only the first process starts one."""

    def started(self, monkeypatch):
        began = []
        monkeypatch.setattr(Work, "_watch", lambda work: began.append(work.name))
        with Work("packing"):
            pass
        return began

    def test_one_process(self, monkeypatch):
        for name in RANKS:
            monkeypatch.delenv(name, raising=False)
        assert self.started(monkeypatch) == ["packing"]

    @pytest.mark.parametrize("name", RANKS)
    def test_other_processes_are_silent(self, monkeypatch, name):
        monkeypatch.setenv(name, "0")
        assert self.started(monkeypatch) == ["packing"]
        monkeypatch.setenv(name, "1")
        assert self.started(monkeypatch) == []

    def test_it_shows_and_ends_with_the_work(self, monkeypatch):
        shown = threading.Event()
        monkeypatch.setattr(Work, "show", lambda work: shown.set())
        monkeypatch.setattr(progress, "QUIET", 0.0)
        with Work("packing") as work:
            assert shown.wait(60)
        assert not work._thread.is_alive()


class TestTrack:
    def test_items_are_counted(self, clock, capsys):
        found = []
        for item in track("abc", "letters", clock=clock):
            found.append(item)
            clock.turn(progress._open[-1], 6)
        assert found == ["a", "b", "c"]
        assert lines(capsys) == [
            "letters: 0 of 3, 0:00:05 so far",
            "letters: 2 of 3, 0:00:08 left",
            "letters: done in 0:00:18",
        ]

    def test_a_loop_that_is_left_leaves_nothing(self, clock, capsys):
        for _ in track(iter("abc"), "letters", clock=clock):
            break
        assert progress._open == []
        assert lines(capsys) == []

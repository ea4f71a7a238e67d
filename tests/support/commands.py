"""Commands that tests run in their own process."""

import sys

import pytest

from recipes.command import main


def refusal(run, arguments, monkeypatch, capsys):
    """The one line with which a command refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(run)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line

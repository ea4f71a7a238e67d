"""Commands that tests run in their own process."""

import importlib
import inspect
import pkgutil
import sys

import pytest

import decoding
from recipes.command import main
from recipes.options import Options


def refusal(run, arguments, monkeypatch, capsys):
    """The one line with which a command refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(run)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def option_classes():
    """Every command's class of options: those of `decoding`, and `trainers.export`'s."""
    found = {}
    for module in pkgutil.walk_packages(decoding.__path__, "decoding."):
        if module.name.rpartition(".")[2] != "__main__":
            for _, kind in inspect.getmembers(
                importlib.import_module(module.name), inspect.isclass
            ):
                if issubclass(kind, Options) and hasattr(kind, "EXAMPLE"):
                    found[kind.__name__] = kind
    return [*found.values(), importlib.import_module("trainers.export").Export]

"""`python -m decoding.fetch model=HuggingFaceTB/SmolLM2-135M-Instruct`: a model, got once."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import NEEDED, Options, option
from decoding.loading import parade_config
from models import causal, gguf


@dataclass(frozen=True, kw_only=True)
class Fetch(Options):
    """Get a model, convert it if it is a gguf file, and print its folder in the cache."""

    EXAMPLE: ClassVar[str] = "model=HuggingFaceTB/SmolLM2-135M-Instruct"

    model: str = option(NEEDED, "a Hub id or a gguf file")


def fetch(model: str) -> Path:
    """The folder of a model, downloaded and converted where it is not yet.

    Args:
        model: A Hub id, gguf file or folder.

    Raises:
        ValueError: one line: there is no such model, or it cannot be had.
    """
    path = causal.local_path(model)
    parade_config(path)  # for its errors: there is none, the Hub cannot be reached
    if causal.looks_local(path):
        return Path(path)
    return gguf.download(path)


def run(argv: list[str]) -> None:
    """The command."""
    quiet()
    print(fetch(parse(argv, Fetch, "decoding.fetch").model))


if __name__ == "__main__":
    main(run)

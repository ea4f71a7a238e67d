"""`python -m decoding.fetch model=HuggingFaceTB/SmolLM2-135M-Instruct`: download a model once."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recipes.command import main
from recipes.options import NEEDED, Options, check_first, option, parse


@dataclass(frozen=True, kw_only=True)
class Fetch(Options):
    """Get a model, convert it if it is a gguf file, and print its folder in the cache."""

    EXAMPLE: ClassVar[str] = "model=HuggingFaceTB/SmolLM2-135M-Instruct"

    model: str = option(NEEDED, "a Hub id or a gguf file")


def read_options(argv: list[str]) -> Fetch:
    """Return the command's options."""
    return parse(argv, Fetch, "decoding.fetch")


check_first(__name__, read_options)

from decoding.loading import parade_config
from models import causal, gguf


def fetch(model: str) -> Path:
    """Return the folder of a Hub id, gguf file or folder; download and convert it if needed."""
    path = causal.local_path(model)
    parade_config(path)  # for its errors: there is none, the Hub cannot be reached
    if causal.looks_local(path):
        return Path(path)
    return gguf.download(path)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    print(fetch(read_options(argv).model))


if __name__ == "__main__":
    main(run)

"""`python -m decoding.fetch model=HuggingFaceTB/SmolLM2-135M-Instruct`: download a model once."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from decoding.loading import parade_config
from models import causal, gguf
from recipes.command import main
from recipes.options import NEEDED, Options, option, parse


@dataclass(frozen=True, kw_only=True)
class Fetch(Options):
    """Get a model, convert it if it is a gguf file, and print its folder in the cache."""

    EXAMPLE: ClassVar[str] = "model=HuggingFaceTB/SmolLM2-135M-Instruct"

    model: str = option(NEEDED, "a Hub id or a gguf file")


def fetch(model: str) -> Path:
    """Return the folder of a Hub id, gguf file or folder; download and convert it if needed."""
    path = causal.local_path(model)
    parade_config(path)  # for its errors: there is none, the Hub cannot be reached
    if causal.looks_local(path):
        return Path(path)
    return gguf.download(path)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    print(fetch(parse(argv, Fetch, "decoding.fetch").model))


if __name__ == "__main__":
    main(run)

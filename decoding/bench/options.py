"""Options that benches share."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from data.arguments import Count, Several, Temperature
from decoding.loading import decoding_fingerprint
from recipes.options import MeasureOptions, PromptOptions, SamplerOptions, option

MEASURED = "model.sha256"  # the fingerprint of the export that was measured


@dataclass(frozen=True, kw_only=True)
class PromptBenchOptions(SamplerOptions, PromptOptions):
    """Exports side by side on held-out prompts, with other knobs than their own."""

    also: tuple[str, ...] = option((), "further exports of its tokenizer, for the same table")
    temperatures: Several[Temperature] = option((0.0, 1.0), "of the sampling; 0 is greedy")


@dataclass(frozen=True, kw_only=True)
class ProgramOptions(MeasureOptions):
    """Options for running programs that models wrote, and their limits."""

    execute: Literal["sandbox", "unsafe"] | None = option(
        None, "run what the models wrote: in bubblewrap, or unsafe"
    )
    wall_seconds: Annotated[float, Field(gt=0)] = option(
        10.0, "that one program may take", needs="execute"
    )
    memory: Count = option(1024, "MiB that one program may use", needs="execute")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PromptOptions, ProgramOptions):
    """Options of a command that scores the answers to a benchmark's problems."""


def results_folder(options: MeasureOptions, name: str) -> Path:
    """Return the folder for results: `out=`, or `name` next to a local export, or here."""
    model = Path(options.model)
    return Path(options.out or (model.parent / name if model.exists() else name))


def note_model(options: MeasureOptions, results: Path) -> None:
    """Write into the folder of results which export was measured; nothing for a Hub id."""
    if Path(options.model).is_dir():
        (results / MEASURED).write_text(decoding_fingerprint(Path(options.model)))


def told_apart(paths: Iterable[str]) -> dict[str, str]:
    """Return distinct names of models (folders or Hub ids): a run's; the path if two share it.

    >>> told_apart(["runs/a/export", "runs/b/export", "old/b/export", "org/c"]).values()
    dict_values(['a', 'runs/b/export', 'old/b/export', 'c'])
    """
    names = {path: Path(str(Path(path)).removesuffix("/export")).name for path in paths}
    counts = Counter(names.values())
    return {path: name if counts[name] == 1 else path for path, name in names.items()}

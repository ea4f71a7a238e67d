"""Options that benches share."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from decoding.bench.sandbox import Limits
from decoding.commands.options import MeasureOptions, PromptOptions, option

UNASKED = (
    "this runs programs that a model wrote, on this machine: read in docs/tutorials/pcllm.md what "
    "guards it, and give execute=true"
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(MeasureOptions):
    """Exports side by side, with other knobs than their own."""

    also: tuple[str, ...] = option((), "further exports of its tokenizer, for the same table")
    sampler: tuple[str, ...] = option(
        (), "another method or other knobs than the exports', as [method=jacobi,block_size=32]"
    )
    trust_remote_code: bool = option(False, "run the code that a model of the Hub brings")


@dataclass(frozen=True, kw_only=True)
class PromptBenchOptions(BenchOptions, PromptOptions):
    """Exports side by side on held-out prompts."""

    temperatures: tuple[float, ...] = option((0.0, 1.0), "of the sampling; 0 is greedy", least=0)


@dataclass(frozen=True, kw_only=True)
class ProgramOptions(MeasureOptions):
    """Whether programs that models wrote are run, and what one of them may use."""

    execute: bool = option(False, "true runs what the models wrote on this machine; see the docs")
    cpu_seconds: float = option(10.0, "of the processor that one program may use")
    wall_seconds: float = option(30.0, "that one program may take")
    memory: int = option(1024, "MiB that one program may use")

    @property
    def limits(self) -> Limits:
        """What one program may use."""
        return Limits(
            cpu_seconds=self.cpu_seconds, wall_seconds=self.wall_seconds, memory=self.memory
        )


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PromptOptions, ProgramOptions):
    """Options of a command that scores the answers to a benchmark's problems."""


def results_folder(options: MeasureOptions, name: str) -> Path:
    """Where results go: `out=`, or the folder `name` beside a local export, or here."""
    model = Path(options.model)
    return Path(options.out or (model.parent / name if model.exists() else name))


def told_apart(paths: Iterable[str]) -> dict[str, str]:
    """Short names of models, no two the same.

    Args:
        paths: Exported folders or Hub ids.

    Returns:
        By path, the name of its run, with as many folders above it as tell it from the others.

    >>> told_apart(["runs/a/export", "runs/b/export", "old/b/export", "org/c"]).values()
    dict_values(['a', 'runs/b', 'old/b', 'c'])
    """
    paths = [*dict.fromkeys(paths)]
    parts = {path: _run(Path(path).parts) for path in paths}
    depths = dict.fromkeys(paths, 1)
    while True:
        names = {path: "/".join(parts[path][-depths[path] :]) for path in paths}
        shared = {name for name, count in Counter(names.values()).items() if count > 1}
        longer = [p for p in paths if names[p] in shared and depths[p] < len(parts[p])]
        if not longer:
            # The same folder, spelled in two ways.
            return {path: path if names[path] in shared else names[path] for path in paths}
        for path in longer:
            depths[path] += 1


def _run(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a path, but for the `export` of a run."""
    return parts[:-1] if len(parts) > 1 and parts[-1] == "export" else parts

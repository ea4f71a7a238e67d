"""Options that benches share."""

from dataclasses import dataclass
from pathlib import Path

from decoding.commands.options import MeasureOptions, PromptOptions, option


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


def results_folder(options: MeasureOptions, name: str) -> Path:
    """Where results go: `out=`, or the folder `name` beside a local export, or here."""
    model = Path(options.model)
    return Path(options.out or (model.parent / name if model.exists() else name))

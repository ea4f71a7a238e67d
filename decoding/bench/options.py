"""Options of `python -m decoding.bench`, and those that benches share."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from data.arguments import BlockSize, Count, Several, Temperature, Tokens, Whole
from decoding.engine.params import VERIFY
from recipes.options import (
    PROMPTS,
    MeasureOptions,
    PromptOptions,
    SamplerOptions,
    check_batch_sizes,
    option,
    parse,
)

MEASURED = "model.sha256"  # the fingerprint of the export that was measured
DRAWN = ("traversal", "multipath")  # rules for trees that are drawn from the drafter
FEATURES = ("digits", "inception")  # what images are compared by
# The published rule, with the inner temperature of the authors' program.
RELAXED = {"verify": "relaxed", "lossy": True, "inner_temperature": 42.0}


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


@dataclass(frozen=True, kw_only=True)
class Bench(PromptBenchOptions, ScoreOptions):
    """Compare an export's sampler with plain decoding and with what transformers offers.

    An export in `also` with weights of its own is compared with plain decoding of those.
    """

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export temperatures=[0,1] batch_sizes=[1,4]"

    target: str | None = option(None, "a target instead of the one that the export names")
    assistant: str | None = option(None, "a drafter for transformers' assisted generation")
    generate: bool = option(True, "transformers' own plain decoding too")
    prompt_lookup: Whole = option(
        10, "tokens that transformers copies from the text, and our n-grams; 0: neither"
    )
    batch_sizes: Several[int] = option((1,), "prompts that are decoded together")
    verify: Several[Literal[*VERIFY]] = option(VERIFY, "how drafts are verified, a row each")
    drawn: tuple[Literal[*DRAWN], ...] = option((), "rules for drawn trees, baselines of tree")
    block_size: BlockSize | None = option(None, "tokens drafted a cycle; null: the export's own")
    prompt_lengths: tuple[Tokens, ...] = option(
        (), "of the ends of the same long texts, rows for each: acceptance by context"
    )

    def __post_init__(self):
        super().__post_init__()
        check_batch_sizes(self.batch_sizes, self.prompts or PROMPTS)
        if self.prompt_lengths and self.prompt_length is not None:
            raise ValueError(
                f"prompt_length={self.prompt_length} is not read with prompt_lengths="
                f"{list(self.prompt_lengths)}: leave one of them out"
            )

    @property
    def prompt_set(self) -> dict:
        longest = max(self.prompt_lengths, default=self.prompt_length)
        return super().prompt_set | {"length": longest}


def read_options(argv: list[str]) -> Bench:
    """Return the options of `python -m decoding.bench`."""
    return parse(argv, Bench, "decoding.bench")


def results_folder(options: MeasureOptions, name: str) -> Path:
    """Return the folder for results: `out=`, or `name` next to a local export, or here."""
    model = Path(options.model)
    return Path(options.out or (model.parent / name if model.exists() else name))


def note_model(options: MeasureOptions, results: Path) -> None:
    """Write into the folder of results which export was measured; nothing for a Hub id."""
    from decoding.loading import decoding_fingerprint  # which imports torch

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

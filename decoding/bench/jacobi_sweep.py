"""`python -m decoding.bench.jacobi_sweep model=runs/pcllm_round2/export`: the best Jacobi knobs.

Tokens per forward of `jacobi_mr` for every block size, number of blocks and spawn ratio (pcLLM,
Figure 4b), as a table, `sweep.csv` and `sweep.png`.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import ClassVar

from data.text.prompts import heldout_prompts
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import PromptOptions, option
from decoding.commands.progress import track
from decoding.commands.report import picture, results, write_table
from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.samplers.jacobi_mr import JacobiMRSampler


@dataclass(frozen=True, kw_only=True)
class Sweep(PromptOptions):
    """Decode the same held-out prompts, as one batch, with every combination of the knobs.

    blocks=[1] with pool_size=0 is plain Jacobi decoding.
    """

    EXAMPLE: ClassVar[str] = "model=runs/pcllm_round2/export block_sizes=[8,16] blocks=[1,2]"

    prompts: int = option(32, "how many held-out prompts", least=1)
    temperature: float = option(0.0, "of the sampling; 0 is greedy", least=0)
    block_sizes: tuple[int, ...] = option((4, 8, 16, 32), "tokens of a block, to try", least=1)
    blocks: tuple[int, ...] = option((1, 2, 4), "active blocks at most, to try", least=1)
    spawn_ratios: tuple[float, ...] = option(
        (0.5,), "shares of a block that are accepted when the next one is begun, to try"
    )
    pool_size: int = option(2, "given-up guesses that are kept", least=0)
    out: str = option("sweep", "folder of the results")


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    sweep = parse(argv, Sweep, "decoding.bench.jacobi_sweep")
    plain = load(sweep.model, sampler=["method=plain"], **sweep.placing)
    prompts = heldout_prompts(tokenizer=plain.tokenizer, **sweep.prompt_set)
    ids = [p["prompt_ids"] for p in prompts]
    combinations = list(product(sweep.block_sizes, sweep.blocks, sweep.spawn_ratios))
    with results(Path(sweep.out)) as out:
        lines = [measure(sweep, plain, ids, *knobs) for knobs in track(combinations, "sweep")]
        title = f"{sweep.prompts} held-out prompts as one batch, {sweep.dtype}"
        write_table(lines, out / "sweep.csv", title, "decoding.bench.jacobi_sweep")
        draw(lines, out / "sweep.png")


def measure(
    sweep: Sweep, plain, prompts: list[list[int]], block_size: int, blocks: int, ratio: float
) -> dict:
    """A line of the table, by column: one combination of the knobs."""
    sampler = JacobiMRSampler(
        plain.target, plain.tokenizer, block_size=block_size, blocks=blocks, spawn_ratio=ratio,
        pool_size=sweep.pool_size,
    )  # fmt: skip
    params = SamplingParams(
        max_new_tokens=sweep.max_new_tokens,
        temperature=sweep.temperature,
        ignore_eos=sweep.ignore_eos,
        seed=sweep.seed,
    )
    started = perf_counter()
    emitted = [n for r in sampler.generate(prompts, params) for n in r.stats.emitted]
    seconds = perf_counter() - started
    return {
        "block size": block_size,
        "blocks": blocks,
        "spawn ratio": ratio,
        "tokens per forward": round(sum(emitted) / len(emitted), 3),
        "tokens/s": round(sum(emitted) / seconds, 1),
    }


def draw(lines: list[dict], file: Path) -> None:
    """Draw tokens per forward over the block size, a line for each number of blocks and ratio."""
    with picture(file, figsize=(5.5, 3.8)) as axes:
        axis = axes[0, 0]
        for blocks, ratio in dict.fromkeys((x["blocks"], x["spawn ratio"]) for x in lines):
            here = [x for x in lines if (x["blocks"], x["spawn ratio"]) == (blocks, ratio)]
            axis.plot(
                [x["block size"] for x in here],
                [x["tokens per forward"] for x in here],
                marker="o",
                label=f"K = {blocks}, r = {ratio:g}",
            )
        axis.set_xscale("log", base=2)
        axis.set_xlabel("block size")
        axis.set_ylabel("tokens per forward")
        axis.legend(frameon=False)


if __name__ == "__main__":
    main(run)

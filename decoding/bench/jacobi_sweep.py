"""`python -m decoding.bench.jacobi_sweep model=runs/pcllm_round2/export`: which knobs suit a model.

Tokens per forward of `jacobi_mr` for every block size, number of blocks and spawn ratio (pcLLM,
Figure 4b), as a table, `sweep.csv` and `sweep.png`.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

from data.text.prompts import heldout_prompts
from decoding.commands.cli import main, parse, quiet
from decoding.commands.report import picture, write_table
from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.samplers.jacobi_mr import JacobiMRSampler


@dataclass(frozen=True)
class Sweep:
    """Decode the same held-out prompts, as one batch, with every combination of the knobs.

    model: an export, or any causal LM. source: 'stdlib', a text folder or a JSONL of prompts.
    blocks=[1] with pool_size=0 is plain Jacobi decoding. out: the folder of the results.
    """

    model: str
    source: str = "stdlib"
    prompts: int = 32
    prompt_length: int = 64
    max_new_tokens: int = 128
    temperature: float = 0.0
    block_sizes: tuple[int, ...] = (4, 8, 16, 32)
    blocks: tuple[int, ...] = (1, 2, 4)
    spawn_ratios: tuple[float, ...] = (0.5,)
    pool_size: int = 2
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0
    out: str = "sweep"


def run(argv: list[str]) -> None:
    """The command."""
    from rich.progress import track

    quiet()
    sweep = parse(argv, Sweep, "decoding.bench.jacobi_sweep")
    plain = load(sweep.model, sampler=["method=plain"], dtype=sweep.dtype, device=sweep.device)
    prompts = heldout_prompts(sweep.source, plain.tokenizer, sweep.prompts, sweep.prompt_length)
    ids = [p["prompt_ids"] for p in prompts]
    combinations = list(product(sweep.block_sizes, sweep.blocks, sweep.spawn_ratios))
    lines = [measure(sweep, plain, ids, *knobs) for knobs in track(combinations, "sweep")]
    out = Path(sweep.out)
    title = f"{sweep.prompts} held-out prompts as one batch, {sweep.dtype}"
    write_table(lines, out / "sweep.csv", title, "decoding.bench.jacobi_sweep")
    draw(lines, out / "sweep.png")
    print(f"wrote {out / 'sweep.csv'} and {out / 'sweep.png'}")


def measure(
    sweep: Sweep, plain, prompts: list[list[int]], block_size: int, blocks: int, ratio: float
) -> dict:
    """One line of the table."""
    sampler = JacobiMRSampler(
        plain.target, plain.tokenizer, block_size=block_size, blocks=blocks, spawn_ratio=ratio,
        pool_size=sweep.pool_size,
    )  # fmt: skip
    params = SamplingParams(
        max_new_tokens=sweep.max_new_tokens,
        temperature=sweep.temperature,
        ignore_eos=True,
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
    """Tokens per forward over the block size, a line for each number of blocks and ratio."""
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

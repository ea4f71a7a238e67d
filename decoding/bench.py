"""`python -m decoding.bench model=runs/deer_stage2/export`: samplers side by side, one run.

Every prompt goes through every sampler in turn (interleaved, so that a slow minute of the machine
hits them all), one prompt at a time, after a warm-up. Writes a table, `bench.csv`, `accepted.png`
and the command that made them.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import GenerationConfig

from data.prompts import heldout_prompts
from decoding.cli import main, parse, quiet
from decoding.distribution import warp
from decoding.load import load, load_tokenizer, parade_config, sampling_config
from decoding.params import Result, SamplingParams, Stats
from decoding.randomness import KeyedRandomness
from decoding.report import picture, write_table
from decoding.samplers.base import Sampler
from decoding.samplers.denoise import DenoiseSampler
from decoding.samplers.plain import PlainSampler


@dataclass(frozen=True)
class Bench:
    """Compare an export's sampler with plain decoding and with Hugging Face generate.

    model: an export. also: further exports for the same target (a stage before, say).
    source: 'stdlib', a text folder or a JSONL of prompts. temperatures: e.g. [0,1].
    sampler: another method or other knobs than the exports', e.g. [method=jacobi,block_size=32].
    out: the folder of the results; None: 'bench' beside the export.
    """

    model: str
    also: tuple[str, ...] = ()
    target: str | None = None
    sampler: tuple[str, ...] = ()
    source: str = "stdlib"
    prompts: int = 64
    prompt_length: int = 64
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    block_size: int | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0
    out: str | None = None


class HuggingFace:
    """`transformers.generate` of the target, behind the interface of a sampler."""

    def __init__(self, target):
        self.target = target

    def generate(self, prompts: list[list[int]], params: SamplingParams, *, seeds: list[int]):
        """One prompt; the same settings, transformers' own cache and loop."""
        torch.manual_seed(seeds[0])
        ids = torch.tensor(prompts, device=self.target.device)
        config = GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            top_k=params.top_k,
            eos_token_id=None,
            pad_token_id=0,
        )
        out = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        answer = out[0, ids.shape[1] :].tolist()
        stats = Stats(emitted=[1] * len(answer), target_passes=len(answer))
        return [Result("", answer, "length", stats)]


@dataclass
class Row:
    """One sampler at one temperature, over all prompts."""

    name: str
    sampler: Sampler | HuggingFace
    params: SamplingParams
    law: str  # what it promises against plain decoding: 'same text' or 'same law'
    results: list[Result] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run(argv: list[str]) -> None:
    """The command."""
    quiet()
    bench = parse(argv, Bench, "decoding.bench")
    report(bench, *measure(bench))


def measure(bench: Bench) -> tuple[list[Row], list[list[int]]]:
    """Decode every prompt with every sampler: one `Row` each, and the prompts' tokens."""
    from rich.progress import track

    options = {"target": bench.target, "sampler": bench.sampler}
    options |= {"dtype": bench.dtype, "device": bench.device}
    samplers = {name: load(name, **options) for name in (bench.model, *bench.also)}
    first = samplers[bench.model]
    for name, sampler in samplers.items():
        if isinstance(sampler, DenoiseSampler):
            raise ValueError(
                f"{name} is a masked diffusion LM, which plain decoding cannot be: "
                "python -m decoding.denoise_bench serves it"
            )
        if not sampler.continues:
            raise ValueError(
                f"{name} fills holes and goes on from no prompt, so it has no place in this bench: "
                "python -m decoding.generate model=... prompt='a = <hole:4>' shows what it does"
            )
    tokenizer = load_tokenizer(
        bench.target or parade_config(bench.model).get("target", bench.model)
    )
    prompts = heldout_prompts(bench.source, tokenizer, bench.prompts, bench.prompt_length)
    rows = [row for t in bench.temperatures for row in _rows(bench, samplers, first, t)]
    for row in rows:  # warm-up: allocations, kernels' first calls
        row.sampler.generate([prompts[0]["prompt_ids"]], row.params, seeds=[bench.seed])
    for i, prompt in enumerate(track(prompts, "bench")):
        for row in rows:
            started = perf_counter()
            row.results += row.sampler.generate(
                [prompt["prompt_ids"]], row.params, seeds=[bench.seed + i]
            )
            row.seconds.append(perf_counter() - started)
    return rows, [p["prompt_ids"] for p in prompts]


def _rows(bench: Bench, samplers: dict, first: Sampler, temperature: float) -> list[Row]:
    def params(verify: str) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=bench.max_new_tokens,
            temperature=temperature,
            ignore_eos=True,
            verify=verify,
            block_size=bench.block_size,
        )

    plain = PlainSampler(first.target, first.tokenizer)
    rows = [
        Row("plain", plain, params("coupled"), "same text"),
        Row("transformers generate", HuggingFace(first.target), params("coupled"),
            "same law" if temperature else "same text"),
    ]  # fmt: skip
    for path, sampler in samplers.items():
        name = sampling_config(path, bench.sampler)["method"]
        name = name if path == bench.model else f"{name} ({Path(path).parent.name})"
        # Without temperature every rule is the same.
        for rule in sampler.rules if temperature else sampler.rules[:1]:
            law = "same text" if rule == "coupled" else "same law"
            label = f"{name}, {rule}" if temperature else name
            rows.append(Row(label, sampler, params(rule), law))
    return rows


def summary(row: Row, plain: Row) -> dict:
    """A row of the table. Acceptance length: tokens per target pass, bonus included."""
    stats = [r.stats for r in row.results]
    tokens = sum(len(r.token_ids) for r in row.results)
    emitted = [n for s in stats for n in s.emitted]
    forwards = sum(s.target_s + s.drafter_s for s in stats)
    total = forwards + sum(s.sampler_s for s in stats)
    same = sum(a.token_ids == b.token_ids for a, b in zip(row.results, plain.results))
    speedup = median(b / a for a, b in zip(row.seconds, plain.seconds))
    return {
        "sampler": row.name,
        "temperature": row.params.temperature,
        "tokens/s": round(tokens / sum(row.seconds), 1),
        "speed-up": round(speedup, 2),
        "acceptance length": round(sum(emitted) / len(emitted), 2),
        "target passes": sum(s.target_passes for s in stats),
        "drafter passes": sum(s.drafter_passes for s in stats),
        "outside forwards": f"{100 * (1 - forwards / total):.1f}%" if forwards else "",
        "identical to plain": f"{same}/{len(stats)}" if row.law == "same text" else row.law,
    }


def report(bench: Bench, rows: list[Row], prompts: list[list[int]]) -> None:
    """Print the table; write bench.csv and accepted.png."""
    out = Path(bench.out) if bench.out else _beside(bench.model)
    plain = {row.params.temperature: row for row in rows if row.name == "plain"}
    lines = [summary(row, plain[row.params.temperature]) for row in rows]
    title = f"{bench.prompts} held-out prompts, batch 1, {bench.dtype}"
    write_table(lines, out / "bench.csv", title, "decoding.bench")
    print("acceptance length: tokens emitted per target pass, bonus or correction included;")
    print("speed-up: median over prompts, against plain; same law: differs only by its draws")
    for row in rows:
        if row.law == "same text" and row.name != "plain":
            explain_divergence(row, plain[row.params.temperature], prompts, bench.seed)
    drafted = [r for r in rows if not isinstance(r.sampler, (PlainSampler, HuggingFace))]
    print(f"wrote {out / 'bench.csv'}")
    if drafted:
        draw(drafted, out / "accepted.png")
        print(f"wrote {out / 'accepted.png'}")


def explain_divergence(row: Row, plain: Row, prompts: list[list[int]], seed: int) -> None:
    """Where a row's text first differs from plain decoding, and how near the choice was there.

    In float32 a difference is a bug; in bfloat16 a wide pass and a one-token pass round
    differently, which shows where the two best choices are closer than the rounding.
    """
    for i, (a, b) in enumerate(zip(row.results, plain.results)):
        if a.token_ids == b.token_ids:
            continue
        at = next(j for j, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y)
        gap = margin(plain, prompts[i] + b.token_ids[:at], seed + i)
        print(
            f"{row.name} at T={row.params.temperature:g}: first difference in prompt {i} at token "
            f"{at}; the two best choices are {gap:.2g} apart there ({plain.sampler.target.dtype})"
        )
        return


def margin(plain: Row, ids: list[int], seed: int) -> float:
    """How far the best choice for the next token is ahead of the second, in logits."""
    tokens = torch.tensor([ids], device=plain.sampler.target.device)
    with torch.inference_mode():
        logits = warp(plain.sampler.target(tokens).logits[:, -1:], plain.params)
        if plain.params.temperature > 0:
            noise = KeyedRandomness([seed], tokens.device)
            position = torch.tensor([[len(ids)]], device=tokens.device)
            logits = logits + noise.gumbel(position, logits.shape[-1])
    best, second = logits.flatten().topk(2).values.tolist()
    return best - second


def draw(rows: list[Row], file: Path) -> None:
    """Accepted-length distribution: share of target passes that emitted n tokens."""
    temperatures = sorted({r.params.temperature for r in rows})
    size = (5.5 * len(temperatures), 3.8)
    with picture(file, ncols=len(temperatures), figsize=size) as axes:
        for axis, temperature in zip(axes[0], temperatures):
            here = [r for r in rows if r.params.temperature == temperature]
            for j, row in enumerate(here):
                emitted = [n for r in row.results for n in r.stats.emitted]
                counts, width = Counter(emitted), 0.8 / len(here)
                xs = range(1, max(emitted) + 1)
                axis.bar(
                    [x - 0.4 + width * (j + 0.5) for x in xs],
                    [counts[x] / len(emitted) for x in xs],
                    width,
                    label=f"{row.name}: mean {sum(emitted) / len(emitted):.2f}",
                )
            axis.set_title(f"temperature {temperature:g}")
            axis.set_xlabel("tokens emitted by a target pass")
            axis.set_ylabel("share of target passes")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(frameon=False)


def _beside(model: str) -> Path:
    return Path(model).parent / "bench" if Path(model).exists() else Path("bench")


if __name__ == "__main__":
    main(run)

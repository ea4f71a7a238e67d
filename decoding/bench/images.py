"""`python -m decoding.bench.images model=runs/cspd_draft/export`: acceptance and speed of images.

Measured are the acceptance rate against draft length, pre-filling, guidance and temperature; the
positions in the image where drafts are accepted; images a second at several batch sizes; and, by a
permutation test of their energy distance, whether sample sets differ from sequential ones.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor

from decoding.bench import image_features
from decoding.bench.image_features import KINDS
from decoding.bench.options import results_folder
from decoding.bench.two_sample import frechet_distance, permutation_test
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import MeasureOptions, option
from decoding.commands.report import picture, results, write_table
from decoding.continuous.image_state import ImageParams, ImageResult
from decoding.images import ImageOptions, pixels, sheet
from decoding.loading import load
from decoding.samplers.cspd import CspdSampler
from decoding.samplers.sequential import SequentialSampler


@dataclass(frozen=True, kw_only=True)
class ImageBench(ImageOptions, MeasureOptions):
    """Sweep the knobs of a drafter, time it, and test its sample sets.

    One knob at a time is swept; the others keep the values of gamma, prefill, guidance and
    temperature.
    """

    EXAMPLE: ClassVar[str] = "model=runs/cspd_draft/export gammas=[2,4] samples=0"

    gamma: int = option(4, "tokens drafted a cycle", least=1)
    gammas: tuple[int, ...] = option((1, 2, 4, 8), "to sweep", least=1)
    prefills: tuple[float, ...] = option((0.0, 0.05, 0.15, 0.3), "to sweep", least=0)
    guidances: tuple[float, ...] = option((1.0, 2.0, 3.0), "to sweep", least=0)
    temperatures: tuple[float, ...] = option((0.8, 0.9, 1.0, 1.1), "to sweep")
    images: int = option(128, "of each point of a sweep", least=1)
    samples: int = option(2000, "of each set of the permutation test; 0 leaves it out", least=0)
    permutations: int = option(499, "of the test", least=1)
    batch_sizes: tuple[int, ...] = option((1, 8, 128), "images made at once, to time", least=1)
    batches: int = option(8, "that are timed, of each size", least=1)
    inner_temperature: float = option(
        42.0, "of the relaxed rule: the authors' program has 42, the paper 1"
    )
    features: str | None = option(None, "adds Fréchet distances of these features", choices=KINDS)


WAYS = {
    "sequential": None,
    "exact": {},
    "exact, not aligned": {"align": False},
    "exact, last step": {"coupled": 1},
    "relaxed (lossy)": {"verify": "relaxed", "lossy": True},
}
SWEPT = {"gamma": "gammas", "prefill": "prefills", "guidance": "guidances",
         "temperature": "temperatures"}  # fmt: skip


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    bench = parse(argv, ImageBench, "decoding.bench.images")
    sampler = load(bench.model, **bench.loading)
    if not isinstance(sampler, CspdSampler):
        raise ValueError(f"{bench.model!r} is no drafter of images: python -m decoding.images")
    with results(results_folder(bench, "bench")) as out:
        report(bench, sampler, out)


def report(bench: ImageBench, sampler: CspdSampler, out: Path) -> None:
    """Measure everything, and write tables and pictures."""
    command = "decoding.bench.images"
    lines, grid = sweep(bench, sampler)
    write_table(lines, out / "acceptance.csv", f"{bench.images} images a point", command)
    draw_sweep(lines, out / "acceptance.png")
    draw_grid(grid, out / "accepted.png")
    title = f"{bench.samples} samples a set, {bench.dtype}"
    write_table(ways(bench, sampler), out / "ways.csv", title, command)
    side_by_side(bench, sampler, out / "samples.png")
    print(
        "acceptance rate: accepted drafts of those that were judged; tokens a pass: the bonus or "
        "correction token included; p: permutation test against sequential samples"
    )


def sweep(bench: ImageBench, sampler: CspdSampler) -> tuple[list[dict], Tensor]:
    """Acceptance over the values of each knob.

    Args:
        bench: The command's options.
        sampler: Of the export.

    Returns:
        A line for each value of each knob, and the share of accepted drafts at each position of the
        image [S/p, S/p].
    """
    lines, base = [], params_of(bench)
    for knob, values in SWEPT.items():
        for value in getattr(bench, values):
            results = drawn(bench, sampler, replace(base, **{knob: value}), bench.images)
            gamma = value if knob == "gamma" else bench.gamma
            alone = prefilled(bench, sampler, value if knob == "prefill" else None)
            lines.append({"knob": knob, "value": value, **accepted(results, gamma, alone)})
    results = drawn(bench, sampler, base, bench.images)
    side = sampler.target.config.size // sampler.target.config.patch
    share = torch.stack([r.accepted for r in results]).float().mean(0)
    return lines, share.view(side, side).cpu()


def accepted(results: list[ImageResult], gamma: int, prefilled: int) -> dict:
    """Acceptance rate, and tokens per target pass.

    A draft counts as judged if it was accepted or replaced by a correction; drafts after a
    correction were not judged. A pass that emits gamma + 1 tokens ends in a bonus, any other in a
    correction.

    Args:
        results: The images.
        gamma: Tokens drafted per cycle.
        prefilled: Tokens of each image that the target made alone.
    """
    kept = sum(int(r.accepted.sum()) for r in results)
    passes = [n for r in results for n in r.stats.emitted]
    bonuses = sum(n == gamma + 1 for n in passes)
    judged = sum(passes) - prefilled * len(results) - bonuses
    return {
        "acceptance rate": round(kept / max(1, judged), 4),
        "tokens a pass": round(sum(passes) / len(passes), 3),
    }


def ways(bench: ImageBench, sampler: CspdSampler) -> list[dict]:
    """A line for each way to decode: acceptance, speed, and distance to sequential samples."""
    plain, lines = SequentialSampler(sampler.target), []
    base = params_of(bench)
    reference = drawn(bench, plain, base, bench.samples, first=1) if bench.samples else None
    features = None
    if reference and bench.features is not None:
        shown = pictures(bench, sampler, reference[:1])
        features, _ = image_features.load(bench.features, *shown.shape[1:3])
    for name, options in WAYS.items():
        way = plain if options is None else sampler
        params = replace(base, **options or {})
        if "verify" in (options or {}):
            params = replace(params, inner_temperature=bench.inner_temperature)
        results = drawn(bench, way, params, bench.samples or bench.images, first=2)
        line = {"way": name}
        judged = accepted(results, bench.gamma, prefilled(bench, sampler))
        line |= {**judged, "acceptance rate": ""} if options is None else judged
        for size in bench.batch_sizes:
            line |= speed(bench, way, params, size)
        if reference is not None:
            sets = flat(results), flat(reference)
            distance, p = permutation_test(*sets, bench.permutations, bench.seed)
            line |= {"energy distance": f"{distance:.2e}", "p": round(p, 4)}
        if features is not None:
            with torch.no_grad():
                pair = [features(pictures(bench, sampler, s)) for s in (results, reference)]
            line["Fréchet"] = f"{frechet_distance(*pair):.3g}"
        lines.append(line)
    return lines


def speed(bench: ImageBench, sampler: SequentialSampler, params: ImageParams, size: int) -> dict:
    """Images a second with `size` at once, and what a cycle of them takes.

    Over several batches: the number of passes is random. A cycle is a pass of the target, those of
    the drafter before it, and the rest: the denoising chains of both and the rule.
    """
    sampler.generate(classes(sampler, size), params)  # warms up
    labels = classes(sampler, bench.batches * size)
    started = perf_counter()
    results = sampler.generate(labels, replace(params, seed=bench.seed), at_once=size)
    rate = len(labels) / (perf_counter() - started)
    stats = [result.stats for result in results]
    passes = sum(s.target_passes for s in stats)
    parts = ("target_s", "drafter_s", "sampler_s")
    cycle = (1e3 * sum(getattr(s, part) for s in stats) / passes for part in parts)
    return {
        f"images/s, batch {size}": round(rate, 2),
        f"ms: target, drafter, rest, batch {size}": ", ".join(f"{ms:.1f}" for ms in cycle),
    }


def drawn(
    bench: ImageBench, sampler: SequentialSampler, params: ImageParams, count: int, first: int = 0
) -> list[ImageResult]:
    """`count` images, the classes in turn; sets with another `first` share no seed."""
    params = replace(params, seed=bench.seed + first * 1_000_003)
    return sampler.generate(classes(sampler, count), params, at_once=max(bench.batch_sizes))


def side_by_side(bench: ImageBench, sampler: CspdSampler, file: Path, count: int = 10) -> None:
    """Draw images of the target alone, speculative ones, and the positions of accepted drafts."""
    config, rows, base = sampler.target.config, {}, params_of(bench)
    for name, way in (
        ("target alone", SequentialSampler(sampler.target)),
        ("speculative", sampler),
    ):
        results = drawn(bench, way, base, count)
        rows[name] = pixels(results, config, bench.vae, bench.scale)
    side = config.size // config.patch
    kept = torch.stack([r.accepted for r in results]).float().cpu()
    rows["its accepted drafts (white)"] = kept.view(count, side, side, 1)
    sheet(file, rows)


def draw_sweep(lines: list[dict], file: Path) -> None:
    """Draw the acceptance rate against each knob."""
    with picture(
        file, nrows=1, ncols=len(SWEPT), figsize=(3 * len(SWEPT), 2.8), sharey=True
    ) as axes:
        for axis, knob in zip(axes[0], SWEPT):
            here = [line for line in lines if line["knob"] == knob]
            values = [line["value"] for line in here]
            axis.plot(values, [line["acceptance rate"] for line in here], marker="o")
            axis.set_xlabel(knob)
        axes[0, 0].set_ylabel("acceptance rate")


def draw_grid(grid: Tensor, file: Path) -> None:
    """Draw the share of accepted drafts at each position of the image."""
    with picture(file, figsize=(4, 3.2)) as axes:
        shown = axes[0, 0].imshow(grid.numpy(), vmin=0, vmax=1, cmap="Greens")
        axes[0, 0].locator_params(integer=True)
        axes[0, 0].set(xlabel="column of the patch", ylabel="row")
        axes[0, 0].figure.colorbar(shown, label="share of accepted drafts")


def params_of(bench: ImageBench) -> ImageParams:
    """The sampling parameters that a sweep keeps for all knobs but one."""
    names = (*SWEPT, "guidance_schedule")
    return ImageParams(**{name: getattr(bench, name) for name in names})


def prefilled(bench: ImageBench, sampler: CspdSampler, prefill: float | None = None) -> int:
    """The number of tokens of an image that the target makes alone."""
    given = (share for share in (prefill, bench.prefill, sampler.prefill) if share is not None)
    share = next(given)
    return round(share * sampler.target.config.tokens)


def classes(sampler: SequentialSampler, count: int) -> list[int]:
    """`count` classes in turn."""
    return [i % sampler.target.config.classes for i in range(count)]


def pictures(bench: ImageBench, sampler: SequentialSampler, results: list[ImageResult]) -> Tensor:
    """Pixels [count, C, S, S] in [0, 1]."""
    return pixels(results, sampler.target.config, bench.vae, bench.scale).permute(0, 3, 1, 2)


def flat(results: list[ImageResult]) -> Tensor:
    """The images' patches as vectors [count, N * D]; every set has the same classes."""
    return torch.stack([r.patches for r in results]).flatten(1).cpu()


if __name__ == "__main__":
    main(run)

"""`python -m decoding.bench.images model=runs/cspd_draft/export`: acceptance and speed."""

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import ClassVar, Literal

from data.arguments import Count, Several, Small, Temperature, Weight, Whole
from decoding.bench.options import FEATURES, RELAXED, results_folder
from decoding.continuous.options import ImageOptions
from decoding.report import draws, picture, results, write_table
from recipes.command import main
from recipes.options import MeasureOptions, check_first, option, parse
from terminal.progress import track


@dataclass(frozen=True, kw_only=True)
class ImageBench(ImageOptions, MeasureOptions):
    """Sweep the knobs of a drafter, time it, and test if its samples differ from sequential ones.

    One knob at a time is swept; the others keep the values of gamma, prefill, guidance and
    temperature.
    """

    EXAMPLE: ClassVar[str] = "model=runs/cspd_draft/export gammas=[2,4] samples=0"

    gamma: Small = option(4, "tokens drafted a cycle")
    gammas: Several[Small] = option((1, 2, 4, 8), "to sweep")
    prefills: Several[Weight] = option((0.0, 0.05, 0.15, 0.3), "to sweep")
    guidances: Several[Weight] = option((1.0, 2.0, 3.0), "to sweep")
    temperatures: Several[Temperature] = option((0.8, 0.9, 1.0, 1.1), "to sweep")
    images: Count = option(128, "of each point of a sweep")
    samples: Whole = option(2000, "of each set of the permutation test; 0 leaves it out")
    batch_sizes: Several[Count] = option((1, 8, 128), "images made at once, to time")
    batches: Count = option(8, "that are timed, of each size")
    features: Literal[*FEATURES] | None = option(None, "adds Fréchet distances of these features")


def read_options(argv: list[str]) -> ImageBench:
    """Return the command's options."""
    return parse(argv, ImageBench, "decoding.bench.images")


check_first(__name__, read_options)

import torch
from torch import Tensor

from decoding.bench.image_metrics import frechet_distance, permutation_test
from decoding.bench.image_metrics import load as load_features
from decoding.bench.rows import cycle
from decoding.continuous.image_state import ImageParams, ImageResult
from decoding.images import pixels
from decoding.loading import load
from decoding.samplers.cspd import CspdSampler
from decoding.samplers.sequential import SequentialSampler

PERMUTATIONS = 499
WAYS = {
    "sequential": None,
    "exact": {},
    "exact, not aligned": {"align": False},
    "exact, last step": {"coupled": 1},
    "relaxed (lossy)": RELAXED,
}
SWEPT = ("gamma", "prefill", "guidance", "temperature")  # `gammas` are values of `gamma`


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    bench = read_options(argv)
    sampler = load(bench.model, **bench.loading)
    if not isinstance(sampler, CspdSampler):
        raise ValueError(f"{bench.model!r} is no drafter of images: python -m decoding.images")
    draws()  # said before the work
    with results(results_folder(bench, "bench")) as out:
        report(bench, sampler, out)


def report(bench: ImageBench, sampler: CspdSampler, out: Path) -> None:
    """Measure everything, and write the tables and a picture."""
    command = "decoding.bench.images"
    lines, grid = sweep(bench, sampler)
    write_table(lines, out / "acceptance.csv", f"{bench.images} images a point", command)
    if draws():
        draw_grid(grid, out / "accepted.png")
    title = f"{bench.samples} samples a set, {bench.dtype}"
    write_table(ways(bench, sampler), out / "ways.csv", title, command)
    print("acceptance rate: accepted drafts of those that were judged")
    print("tokens a pass: the bonus or correction token included")
    print("p: permutation test against sequential samples")


def sweep(bench: ImageBench, sampler: CspdSampler) -> tuple[list[dict], Tensor]:
    """Return the acceptance for each value of each knob, and by image position [S/p, S/p]."""
    lines, base = [], params_of(bench)
    for knob in SWEPT:
        for value in getattr(bench, f"{knob}s"):
            params = replace(base, **{knob: value})
            results = drawn(bench, sampler, params, bench.images)
            judged = accepted(results, params.gamma or sampler.gamma, prefilled(params, sampler))
            lines.append({"knob": knob, "value": value, **judged})
    results = drawn(bench, sampler, base, bench.images)
    side = sampler.target.config.size // sampler.target.config.patch
    share = torch.stack([r.accepted for r in results]).float().mean(0)
    return lines, share.view(side, side).cpu()


def accepted(results: list[ImageResult], gamma: int, prefilled: int) -> dict:
    """Return the acceptance rate, and tokens per target pass.

    A draft is judged if it was accepted or replaced by a correction; drafts after a correction are
    not. A pass that emits gamma + 1 tokens ends in a bonus, any other in a correction. The target
    alone made the first `prefilled` tokens of each image.
    """
    kept = sum(int(r.accepted.sum()) for r in results)
    passes = [n for r in results for n in r.stats.emitted]
    bonuses = sum(n == gamma + 1 for n in passes)
    judged = sum(passes) - prefilled * len(results) - bonuses
    return {
        "acceptance rate": round(kept / max(1, judged), 4),
        "tokens a pass": round(sum(passes) / len(passes), 3),
    }


@torch.no_grad()
def ways(bench: ImageBench, sampler: CspdSampler) -> list[dict]:
    """Return a line for each way to decode: acceptance, speed, distance to sequential samples."""
    plain, lines, base = SequentialSampler(sampler.target), [], params_of(bench)
    reference = drawn(bench, plain, base, bench.samples, first=1) if bench.samples else []
    if reference and bench.features:
        shown = pictures(bench, sampler, reference)
        features, _ = load_features(bench.features, *shown.shape[1:3])
        expected = features(shown)
        distance = frechet_distance(expected.shape[1])
        distance.update(expected, real=True)
    for name, options in track(WAYS.items(), "image bench", unit="ways"):
        way = plain if options is None else sampler
        params = replace(base, **options or {})
        results = drawn(bench, way, params, bench.samples or bench.images, first=2)
        judged = accepted(results, bench.gamma, prefilled(base, sampler))
        line = {"way": name, **judged}
        if options is None:
            line["acceptance rate"] = ""
        for size in bench.batch_sizes:
            line |= speed(bench, way, params, size)
        if reference:
            a, b = (torch.stack([r.patches for r in of]).cpu() for of in (results, reference))
            energy, p = permutation_test(a, b, PERMUTATIONS, bench.seed)
            line |= {"energy distance": f"{energy:.2e}", "p": round(p, 4)}
        if reference and bench.features:
            distance.reset()
            distance.update(features(pictures(bench, sampler, results)), real=False)
            line["Fréchet"] = f"{distance.compute().item():.3g}"
        lines.append(line)
    return lines


def speed(bench: ImageBench, sampler: SequentialSampler, params: ImageParams, size: int) -> dict:
    """Return images/s with `size` images at once, and milliseconds of a cycle (`rows.cycle`).

    Several batches are timed because the number of passes is random.
    """
    sampler.generate(classes(sampler, size), params)  # warms up
    labels = classes(sampler, bench.batches * size)
    started = perf_counter()
    results = sampler.generate(labels, replace(params, seed=bench.seed), at_once=size)
    rate = len(labels) / (perf_counter() - started)
    spent = cycle([result.stats for result in results])
    parts = ", ".join(f"{ms:.1f}" for ms in spent.values())
    return {
        f"images/s, batch {size}": round(rate, 2),
        f"ms: {', '.join(spent)}, batch {size}": parts,
    }


def drawn(
    bench: ImageBench, sampler: SequentialSampler, params: ImageParams, count: int, first: int = 0
) -> list[ImageResult]:
    """Draw `count` images, the classes in turn; sets with another `first` share no seed."""
    params = replace(params, seed=bench.seed + first * 1_000_003)
    return sampler.generate(classes(sampler, count), params, at_once=max(bench.batch_sizes))


def draw_grid(grid: Tensor, file: Path) -> None:
    """Draw the share of accepted drafts at each position of the image."""
    with picture(file, figsize=(4, 3.2)) as axes:
        shown = axes[0, 0].imshow(grid.numpy(), vmin=0, vmax=1, cmap="Greens")
        axes[0, 0].locator_params(integer=True)
        axes[0, 0].set(xlabel="column of the patch", ylabel="row")
        axes[0, 0].figure.colorbar(shown, label="share of accepted drafts")


def params_of(bench: ImageOptions) -> ImageParams:
    """Return the sampling parameters of a bench; a sweep keeps all but one."""
    names = (*SWEPT, "guidance_schedule")
    return ImageParams(**{name: getattr(bench, name) for name in names})


def prefilled(params: ImageParams, sampler: CspdSampler) -> int:
    """Return the number of tokens of an image that the target makes alone."""
    share = sampler.prefill if params.prefill is None else params.prefill
    return round(share * sampler.target.config.tokens)


def classes(sampler: SequentialSampler, count: int) -> list[int]:
    """Return `count` classes in turn."""
    return [i % sampler.target.config.classes for i in range(count)]


def pictures(bench: ImageOptions, sampler: SequentialSampler, results: list[ImageResult]) -> Tensor:
    """Return pixels [count, C, S, S] in [0, 1]."""
    return pixels(results, sampler.target.config, bench.vae, bench.scale).permute(0, 3, 1, 2)


if __name__ == "__main__":
    main(run)

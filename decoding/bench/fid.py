"""`python -m decoding.bench.fid model=... real=imagenet/val`: FID and IS of a model's images.

Fréchet inception distance: Heusel et al., arXiv 1706.08500. Inception Score: Salimans et al., arXiv
1606.03498.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from data.arguments import Count, Several, Small
from decoding.bench.options import FEATURES, RELAXED, results_folder
from decoding.continuous.options import ImageOptions
from decoding.report import results, write_table
from recipes.command import main
from recipes.options import NEEDED, MeasureOptions, check_first, option, parse
from terminal.progress import track

TwoOrMore = Annotated[int, Field(ge=2, le=10**8)]
RULES: dict[str, dict] = {"sequential": {}, "exact": {"verify": "exact"}, "relaxed": RELAXED}


@dataclass(frozen=True, kw_only=True)
class Fid(ImageOptions, MeasureOptions):
    """Compare images of the target alone, and of the drafter's rules, with real ones."""

    EXAMPLE: ClassVar[str] = "model=runs/cspd_draft/export real=digits features=digits samples=2000"

    real: str = option(NEEDED, "'digits', or a folder with a folder of images for each class")
    ways: Several[Literal[*tuple(RULES)]] = option(tuple(RULES), "to sample; relaxed is lossy")
    samples: TwoOrMore = option(50_000, "of each way; only equal numbers compare")
    batch_size: Count = option(64, "images that are made at once")
    features: Literal[*FEATURES] = option("inception", "what images are compared by")
    weights: str | None = option(None, "Inception's file; null downloads it")
    gamma: Small | None = option(None, "tokens drafted a cycle; null: the export's own")


def read_options(argv: list[str]) -> Fid:
    """Return the command's options."""
    return parse(argv, Fid, "decoding.bench.fid")


check_first(__name__, read_options)

import torch
from torch import Tensor
from torchmetrics.image.inception import InceptionScore

from data.images import pictures as real_pictures
from decoding.bench.image_metrics import Given, frechet_distance
from decoding.bench.image_metrics import load as load_features
from decoding.bench.images import classes, params_of, pictures
from decoding.loading import load
from decoding.samplers.cspd import CspdSampler
from decoding.samplers.sequential import SequentialSampler


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    request = read_options(argv)
    sampler = load(request.model, **request.loading)
    if not isinstance(sampler, SequentialSampler):
        raise ValueError(f"{request.model!r} makes text, no images: FID compares images")
    drafts = [way for way in request.ways if way != "sequential"]
    if drafts and not isinstance(sampler, CspdSampler):
        raise ValueError(f"{request.model!r} is no drafter: ways=[sequential], not {drafts[0]!r}")
    with results(results_folder(request, "fid")) as out:
        lines = measure(request, sampler)
        title = f"{request.samples} images a way, {request.features}, {request.dtype}"
        write_table(lines, out / "fid.csv", title, "decoding.bench.fid")
        print(f"FID: to the images of {request.real}; IS: mean and deviation over ten parts")


@torch.no_grad()
def measure(request: Fid, sampler: SequentialSampler) -> list[dict]:
    """Return FID and Inception Score of each of `request.ways`, as lines of the table."""
    channels, side = next(drawn(request, sampler, request.ways[0])).shape[1:3]
    given = request.features, channels, side, request.weights, request.device
    features, logits = load_features(*given)
    size = features(torch.zeros(1, channels, side, side, device=request.device)).shape[1]
    distance = frechet_distance(size)
    for images in track(real(request, channels, side), "real images", unit="batches"):
        distance.update(features(images.to(request.device)).cpu(), real=True)
    lines = []
    for way in request.ways:
        distance.reset()
        score = InceptionScore(Given(size))
        for images in drawn(request, sampler, way):
            found = features(images.to(request.device))
            distance.update(found.cpu(), real=False)
            score.update(logits(found).cpu())
        mean, deviation = score.compute()
        line = {"way": f"{way} (lossy)" if way == "relaxed" else way}
        line |= {"FID": f"{distance.compute().item():.4g}", "IS": f"{mean:.3f} ± {deviation:.3f}"}
        lines.append(line)
    return lines


def drawn(request: Fid, sampler: SequentialSampler, way: str) -> Iterator[Tensor]:
    """Yield batches of the model's images, pixels [B, C, S, S] in [0, 1]; ways share no seed."""
    source = SequentialSampler(sampler.target) if way == "sequential" else sampler
    params = replace(params_of(request), **RULES[way])
    labels = classes(sampler, request.samples)
    first = request.seed + [*RULES].index(way) * request.samples
    starts = range(0, request.samples, request.batch_size)
    for start in track(starts, f"images, {way}", unit="batches"):
        batch = labels[start : start + request.batch_size]
        results = source.generate(batch, replace(params, seed=first + start))
        yield pictures(request, sampler, results)


def real(request: Fid, channels: int, side: int) -> Iterator[Tensor]:
    """Yield batches of the real images, pixels [B, C, S, S] in [0, 1]."""
    images = iter(real_pictures(request.real, side))
    while batch := [*islice(images, request.batch_size)]:
        if odd := [image for image in batch if len(image) != channels]:
            raise ValueError(
                f"real={request.real!r} has images of {len(odd[0])} channels, the model's have "
                f"{channels}: give vae=... if it makes latents, or other images"
            )
        yield (torch.stack(batch) + 1) / 2


if __name__ == "__main__":
    main(run)

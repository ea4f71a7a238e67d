"""`python -m decoding.images model=runs/cspd_draft/export classes=[0,1,2]`: images, as a PNG."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from data.arguments import Count, Seed, Several, Whole
from decoding.continuous.options import IMAGE_VERIFY, ImageOptions
from decoding.report import picture
from recipes.command import main
from recipes.options import NEEDED, check_first, option, parse
from terminal.progress import Work


@dataclass(frozen=True, kw_only=True)
class Images(ImageOptions):
    """Draw images of the given classes, and write them side by side."""

    EXAMPLE: ClassVar[str] = "model=runs/cspd_draft/export classes=[0,1,2] count=4"

    classes: Several[Whole] = option(NEEDED, "numbers of the classes")
    count: Count = option(1, "images of each class")
    batch_size: Count = option(64, "images that are made at once")
    verify: Literal[*IMAGE_VERIFY] = option("exact", "relaxed: the published rule, which is lossy")
    lossy: bool = option(False, "allow what is not lossless")
    seed: Seed | None = option(None, "of all that is drawn; null draws one")
    out: str = option("images.png", "the picture's file")

    def check_inputs(self) -> None:
        super().check_inputs()
        if find_spec("matplotlib") is None:
            raise ValueError(f"out={self.out} is drawn by matplotlib: pip install matplotlib")


def read_options(argv: list[str]) -> Images:
    """Return the command's options."""
    return parse(argv, Images, "decoding.images")


check_first(__name__, read_options)

import torch
from torch import Tensor

from data.images import autoencoder, unpatchify
from decoding.continuous.image_state import ImageParams, ImageResult
from decoding.loading import load
from decoding.samplers.sequential import SequentialSampler
from models.patches import ImageConfig

PARAMS = (
    "temperature", "guidance", "guidance_schedule", "prefill", "verify", "lossy", "seed"
)  # fmt: skip


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    request = read_options(argv)
    sampler = load(request.model, **request.loading)
    if not isinstance(sampler, SequentialSampler):
        raise ValueError(f"{request.model!r} makes text: use python -m decoding.generate")
    labels = [c for c in request.classes for _ in range(request.count)]
    params = ImageParams(**{name: getattr(request, name) for name in PARAMS})
    with Work(f"{len(labels)} images"):
        results = sampler.generate(labels, params, at_once=request.batch_size)
    pictures = pixels(results, sampler.target.config, request.vae, request.scale)
    rows = zip(request.classes, pictures.split(request.count))
    sheet(Path(request.out), {f"class {label}": images for label, images in rows})
    passes = sum(len(r.stats.emitted) for r in results)
    tokens = sum(sum(r.stats.emitted) for r in results)
    print(f"{len(results)} images, {tokens / passes:.2f} tokens a target pass: {request.out}")


def pixels(
    results: list[ImageResult], config: ImageConfig, vae: str | None = None, scale: float = 1.0
) -> Tensor:
    """Return the pixels [B, S, S, C] of B decoded images in [0, 1], on the CPU.

    `config` is that of the model. `vae` is the folder, Hub id or file of the autoencoder, if the
    model makes latents, which were multiplied by `scale` for training.
    """
    patches = torch.stack([r.patches for r in results]).float().cpu()
    images = unpatchify(patches, config.size, config.patch)
    if vae is not None:
        with torch.no_grad():
            images = autoencoder(vae).decode(images / scale).sample
    return ((images + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1)


def sheet(file: Path, rows: dict[str, Tensor]) -> None:
    """Write a PNG with a line of pictures, pixels [B, S, S, C] in [0, 1], for each title.

    Unless C = 3, only channel 0 is shown.
    """
    width = max(map(len, rows.values()))
    size = {"figsize": (0.7 * width + 1, 0.8 * len(rows))}
    with picture(file, nrows=len(rows), ncols=width, **size) as axes:
        for axis in axes.flat:
            axis.axis("off")
        for line, (title, images) in zip(axes, rows.items()):
            line[0].set_title(title, loc="left", fontsize=7)
            for axis, image in zip(line, images):
                shown = image if image.shape[-1] == 3 else image[..., 0]
                axis.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=1)


if __name__ == "__main__":
    main(run)

"""`python -m decoding.images model=runs/cspd_draft/export classes=[0,1,2]`: images, as a PNG."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from data.images import autoencoder, unpatchify
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import DTYPES, NEEDED, ModelOptions, option
from decoding.commands.report import picture
from decoding.continuous.image_state import GUIDANCE, IMAGE_VERIFY, ImageParams, ImageResult
from decoding.loading import load
from decoding.samplers.sequential import SequentialSampler
from models.patches import ImageConfig


@dataclass(frozen=True, kw_only=True)
class ImageOptions(ModelOptions):
    """The model of images, how it samples, and how its latents become pixels."""

    model: str = option(
        NEEDED, "an export of a drafter (its target is loaded too) or of a target; a file of MAR's"
    )
    target: str | None = option(None, "a target instead of the one that the export names")
    sampler: tuple[str, ...] = option((), "other knobs than the export's, as [gamma=8]")
    temperature: float = option(1.0, "times the noise of every step")
    guidance: float = option(1.0, "scale of classifier-free guidance; 1 is off", least=0)
    guidance_schedule: str = option(
        "constant", "linear: from 1 at the first token to the scale", choices=GUIDANCE
    )
    prefill: float | None = option(
        None, "share of the tokens that the target makes alone, at the start; null: the export's"
    )
    vae: str | None = option(None, "of the latents that the models were trained on")
    scale: float = option(1.0, "of those latents; MAR's 0.2325")
    dtype: str = option("float32", "of the weights in memory", choices=DTYPES)

    @property
    def loading(self) -> dict:
        """Arguments of `decoding.load`, without the model."""
        return {"target": self.target, "sampler": self.sampler, **self.placing}


@dataclass(frozen=True, kw_only=True)
class Images(ImageOptions):
    """Draw images of the given classes, and write them side by side."""

    EXAMPLE: ClassVar[str] = "model=runs/cspd_draft/export classes=[0,1,2] count=4"

    classes: tuple[int, ...] = option(NEEDED, "numbers of the classes", least=0)
    count: int = option(1, "images of each class", least=1)
    batch_size: int = option(64, "images that are made at once", least=1)
    verify: str = option(
        "exact", "relaxed: the published rule, which is lossy", choices=IMAGE_VERIFY
    )
    lossy: bool = option(False, "allow what is not lossless")
    seed: int | None = option(None, "of all that is drawn; null draws one")
    out: str = option("images.png", "the picture's file")


PARAMS = (
    "temperature", "guidance", "guidance_schedule", "prefill", "verify", "lossy", "seed"
)  # fmt: skip


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    request = parse(argv, Images, "decoding.images")
    sampler = load(request.model, **request.loading)
    if not isinstance(sampler, SequentialSampler):
        raise ValueError(f"{request.model!r} makes text: use python -m decoding.generate")
    labels = [c for c in request.classes for _ in range(request.count)]
    params = ImageParams(**{name: getattr(request, name) for name in PARAMS})
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
    """Pixels of decoded images.

    Args:
        results: B images as patches.
        config: Of the model that made them: the image's size and the patches' side.
        vae: Folder, Hub id or file of the autoencoder, where the model makes latents.
        scale: Factor that the latents were multiplied with for training.

    Returns:
        Pixels [B, S, S, C] in [0, 1], on the CPU.
    """
    patches = torch.stack([r.patches for r in results]).float().cpu()
    images = unpatchify(patches, config.size, config.patch)
    if vae is not None:
        with torch.no_grad():
            images = autoencoder(vae).decode(images / scale).sample
    return ((images + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1)


def sheet(file: Path, rows: dict[str, Tensor]) -> None:
    """Write a PNG with one line of pictures for each title.

    Args:
        file: The PNG.
        rows: Pixels [B, S, S, C] in [0, 1] by title. Unless C = 3, only channel 0 is shown.
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

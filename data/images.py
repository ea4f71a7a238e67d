"""Image data: images as sequences of patches (continuous tokens), and their training noise."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn.functional import fold, unfold
from torch.utils.data import Dataset, Subset

from data.arguments import BlockSize, Share, Small, Split, Weight
from data.corpora.fingerprints import files_fingerprint, model_fingerprint
from data.corpora.stdlib import check_split
from data.files import atomic_write, files_below, is_hidden, package, read_array
from data.vae import FILES, from_file
from terminal.progress import track

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


def patchify(images: Tensor, patch: int) -> Tensor:
    """Return the patches [B, N, C * patch^2] of images [B, C, S, S], in raster order.

    >>> patchify(torch.arange(4.0).view(1, 1, 2, 2), 1).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    return unfold(images, patch, stride=patch).transpose(1, 2)


def unpatchify(patches: Tensor, size: int, patch: int) -> Tensor:
    """Return images [B, C, size, size] made of patches; the inverse of `patchify`."""
    return fold(patches.transpose(1, 2), size, patch, stride=patch)


class ImageRows(Dataset):
    """A data set of images [M, C, S, S], from -1 (black) to 1 (white), or latents, as patches.

    `labels` is [M], `patch` the side of a patch in pixels; `mirrored` has the images flipped from
    left to right (or their latents), or is None.
    """

    def __init__(self, images, labels, patch: int, mirrored=None):
        # Of all that they were made from; images that come with a package have none.
        self.fingerprint: str | None = None
        self.images, self.labels, self.patch, self.mirrored = images, labels, patch, mirrored

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Return image i: patches [N, D] in raster order, label [], and `mirrored` if available."""
        row = {"patches": self._patches(self.images[i]), "label": self.labels[i].long()}
        if self.mirrored is not None:
            row["mirrored"] = self._patches(self.mirrored[i])
        return row

    def _patches(self, image) -> Tensor:
        copied = torch.asarray(image, copy=True)  # files are read-only
        return patchify(copied.float()[None], self.patch)[0]


def rows(
    source: str,
    patch: BlockSize,
    folder: str,
    split: Split = "train",
    size: Annotated[int, Field(ge=1, le=8192)] | None = None,
    vae: str | None = None,
    scale: Weight = 1.0,
    flips: bool = False,
) -> Subset:
    """Return the images of a source, as patches.

    Args:
        source: 'digits' (scikit-learn's, 8 x 8), or a folder with one folder of images per class.
        patch: Side of a patch, in pixels (of the latents, if there is a VAE).
        folder: Cache of the resized images or latents.
        split: 'train', or 'heldout' for every tenth image.
        size: Side, in pixels, to which a folder's images are cropped and resized.
        vae: Folder or Hub id of a diffusers AutoencoderKL, or MAR's file. The rows are then latents
            (means of the encoder's distribution).
        scale: Factor of the images or latents.
        flips: Also store each image mirrored (latents: of the mirrored pixels), of which
            `TokenNoise` takes one at random, as MAR does.
    """
    check_split(split)
    cached: Path | None = None
    if source == "digits":
        images, labels = digits()
        mirrored = images.flip(-1)
    else:
        if size is None:
            raise ValueError(f"source={source!r} needs size=..., the side of the images in pixels")
        root = Path(source).expanduser()
        cached = _cached(root, Path(folder), size, vae, scale, flips)
        images = read_array(cached / "images.npy")
        mirrored = read_array(cached / "mirrored.npy") if flips else None
        labels = torch.from_numpy(read_array(cached / "labels.npy", mmap=False))
    held_out = (torch.arange(len(labels)) % 10 == 0) == (split == "heldout")
    index = held_out.nonzero().flatten().tolist()
    found = ImageRows(images, labels, patch, mirrored if flips else None)
    found.fingerprint = cached.name if cached else None
    return Subset(found, index)


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits: images [M, 1, 8, 8] in [-1, 1], labels [M]."""
    data = package("sklearn.datasets", "source='digits'", "'parade[lab]'").load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    return images, torch.from_numpy(data.target)


def _cached(
    source: Path, folder: Path, size: int, vae: str | None, scale: float, flips: bool
) -> Path:
    """Return the cache of a folder's images or latents: images, labels and mirrored as .npy."""
    files = image_files(source)
    content = files_fingerprint((f.relative_to(source).as_posix(), f) for f, _ in files)
    made_from = {"files": content, "size": size, "flips": flips}
    made_from |= {"vae": vae and model_fingerprint(vae), "scale": scale}
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    cache = folder / f"images-{name}"
    if not (cache / "manifest.json").is_file():  # written last: the cache is complete
        cache.mkdir(parents=True, exist_ok=True)
        skipped: list[str] = []
        made: dict[str, list] = {"images": [], "labels": [], "mirrored": []}
        read = _pixels(source, files, size, skipped)
        for pixels, label in track(read, "images of the cache", len(files), "images"):
            made["images"].append(_stored(pixels, vae, scale))
            made["labels"].append(label)
            if flips:
                made["mirrored"].append(_stored(pixels.flip(-1), vae, scale))
        for column, found in made.items():
            np.save(cache / f"{column}.npy", np.array(found))
        with atomic_write(cache / "manifest.json") as temporary:
            temporary.write_text(json.dumps({"images": len(made["labels"]), "skipped": skipped}))
    return cache


def _stored(pixels: Tensor, vae: str | None, scale: float):
    """Return pixels, or their mean latents [C, S / 8, S / 8], in the cache's format."""
    if vae is not None:
        with torch.no_grad():
            pixels = autoencoder(vae).encode(pixels[None]).latent_dist.mean[0]
    return (pixels * (1 if vae is None else scale)).half().numpy()


def image_files(source: Path) -> list[tuple[Path, int]]:
    """Return a folder's image files, each with its class (folders sorted by name, from 0)."""
    if not source.is_dir():
        raise ValueError(f"{str(source)!r} is no folder of images. Allowed: 'digits', or a folder")
    classes = sorted(p for p in source.iterdir() if p.is_dir() and not is_hidden(p.name))
    files = [
        (file, label)
        for label, path in enumerate(classes)
        for file in files_below(path)[0]
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise ValueError(
            f"{str(source)!r} holds no images: it needs a folder of "
            f"{', '.join(SUFFIXES)} files for each class"
        )
    return files


def pictures(source: str, size: int) -> Iterator[Tensor]:
    """Yield the pixels [C, size, size], in [-1, 1], of every image of a source (see `rows`)."""
    if source == "digits":
        yield from digits()[0]
        return
    root = Path(source).expanduser()
    yield from (pixels for pixels, _ in _pixels(root, image_files(root), size, []))


def _pixels(
    source: Path, files: list[tuple[Path, int]], size: int, skipped: list[str]
) -> Iterator[tuple[Tensor, int]]:
    """Yield center crops [3, size, size] in [-1, 1], and labels; list unreadable files."""
    Image, ImageOps = (
        package(f"PIL.{name}", "a folder of images", "'parade[images]'")
        for name in ("Image", "ImageOps")
    )
    for file, label in files:
        try:
            with Image.open(file) as image:
                square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS)
        except (OSError, ValueError, SyntaxError):  # what Pillow raises for damaged files
            skipped.append(str(file))
            continue
        yield torch.from_numpy(np.array(square)).permute(2, 0, 1) / 127.5 - 1, label
    if skipped:
        shown = ", ".join(skipped[:8]) + (", ..." if len(skipped) > 8 else "")
        print(f"{source}: {len(skipped)} of {len(files)} images cannot be read: {shown}")
    if len(skipped) == len(files):
        raise ValueError(f"{str(source)!r}: none of its {len(files)} images can be read")


_loaded: dict = {}


def autoencoder(vae: str):
    """Return a diffusers AutoencoderKL from a folder, the Hub or MAR's file, loaded only once."""
    kind = package("diffusers", f"vae={vae!r}", "'parade[images]'").AutoencoderKL
    if vae not in _loaded:
        model = from_file(vae, kind) if vae.endswith(FILES) else kind.from_pretrained(vae)
        _loaded[vae] = model.eval()
    return _loaded[vae]


class TokenNoise:
    """The training sample of an image: generation order, noise and label dropout.

    Args:
        order: 'raster', or 'random' (a permutation for each image).
        no_class: Fraction of images whose label is dropped (-1), for classifier-free guidance.
        repeats: R, noised states per token in one forward (MAR's batch multiplier).
        jitter: Width of uniform noise added to the data: discrete grey levels have no density.
    """

    def __init__(
        self,
        order: Literal["raster", "random"] = "raster",
        no_class: Share = 0.1,
        repeats: Small = 1,
        jitter: Share = 0.0,
    ):
        self.order, self.no_class, self.repeats, self.jitter = order, no_class, repeats, jitter

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int
    ) -> dict[str, Tensor]:
        """Return a training sample, made from a row of `ImageRows`.

        Returns:
            Patches: [N, D], sorted by the order; label: []; order: positions [N]; time: [R, N], in
            [0, 1); noise: standard normal, [R, N, D].
        """
        N, D = row["patches"].shape
        order = torch.arange(N)
        if self.order == "random":
            order = torch.randperm(N, generator=generator)
        patches = row["patches"]
        if "mirrored" in row and torch.rand((), generator=generator) < 0.5:
            patches = row["mirrored"]
        uniform = torch.rand(N, D, generator=generator) - 0.5
        dropped = torch.rand((), generator=generator) < self.no_class
        return {
            "patches": patches[order] + self.jitter * uniform,
            "label": torch.where(dropped, -1, row["label"]),
            "order": order,
            "time": torch.rand(self.repeats, N, generator=generator),
            "noise": torch.randn(self.repeats, N, D, generator=generator),
        }

"""Image data: images as sequences of patches (continuous tokens), and their training noise."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn.functional import fold, unfold
from torch.utils.data import Dataset

from data.corpora.stdlib import check_split
from data.files import atomic_write, read_array
from data.vae import FILES, from_file

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


def patchify(images: Tensor, patch: int) -> Tensor:
    """The patches of images, in raster order.

    Args:
        images: [B, C, S, S].
        patch: side of a patch, in pixels.

    Returns:
        [B, N, C * patch^2].

    >>> patchify(torch.arange(4.0).view(1, 1, 2, 2), 1).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    return unfold(images, patch, stride=patch).transpose(1, 2)


def unpatchify(patches: Tensor, size: int, patch: int) -> Tensor:
    """Images made of patches in raster order; the inverse of `patchify`.

    Args:
        patches: [B, N, C * patch^2].
        size: side of the images, in pixels.
        patch: side of a patch, in pixels.

    Returns:
        [B, C, size, size].
    """
    return fold(patches.transpose(1, 2), size, patch, stride=patch)


class ImageRows(Dataset):
    """A data set of images as patches.

    Args:
        images: [M, C, S, S], from -1 (black) to 1 (white), or latents.
        labels: [M].
        patch: side of a patch, in pixels.
        mirrored: The images [M, C, S, S] flipped from left to right, or the latents of those; None:
            there are none.
    """

    def __init__(self, images, labels, patch: int, mirrored=None):
        self.images, self.labels, self.patch, self.mirrored = images, labels, patch, mirrored

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Image i: patches [N, D] in raster order, label [], and `mirrored`, if there is that."""
        image = self.images[i].float()
        row = {"patches": patchify(image[None], self.patch)[0], "label": self.labels[i].long()}
        if self.mirrored is not None:
            row["mirrored"] = patchify(self.mirrored[i].float()[None], self.patch)[0]
        return row


def rows(
    source: str,
    patch: int,
    folder: str,
    split: str = "train",
    size: int | None = None,
    vae: str | None = None,
    scale: float = 1.0,
    flips: bool = False,
) -> ImageRows:
    """The images of a source, as patches.

    Args:
        source: 'digits' (scikit-learn's, 8 x 8), or a folder with one folder of images per class.
        patch: side of a patch, in pixels (of the latents, if there is a VAE).
        folder: cache of the resized images or latents.
        split: 'train', or 'heldout' for every tenth image.
        size: side, in pixels, to which a folder's images are cropped and resized.
        vae: folder or Hub id of a diffusers AutoencoderKL, or MAR's file. The rows are then its
            latents (the mean of the encoder's distribution).
        scale: factor of the images or latents.
        flips: whether each image is there mirrored too; `TokenNoise` takes one of the two at
            random, as MAR does. Latents are made of the mirrored pixels.

    Raises:
        ValueError: for an unknown split, a folder without a size or without readable images, or a
            missing library.
    """
    check_split(split)
    if source == "digits":
        images, labels = digits()
        mirrored = images.flip(-1)
    else:
        if size is None:
            raise ValueError(f"source={source!r} needs size=..., the side of the images in pixels")
        root, cache = Path(source).expanduser(), Path(folder)
        images, mirrored, labels = _cached(root, cache, size, vae, scale, flips)
    held_out = (torch.arange(len(labels)) % 10 == 0) == (split == "heldout")
    index = held_out.nonzero().flatten()
    flipped = _Chosen(mirrored, index) if flips else None
    return ImageRows(_Chosen(images, index), labels[index], patch, flipped)


class _Chosen:
    """The images images[index[i]] as tensors, read on access."""

    def __init__(self, images, index: Tensor):
        self.images, self.index = images, index

    def __getitem__(self, i: int):
        return torch.asarray(self.images[int(self.index[i])], copy=True)  # files are read-only


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits: images [M, 1, 8, 8] in [-1, 1], and labels [M].

    Raises:
        ValueError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError(
            "source='digits' needs scikit-learn. Run: pip install 'parade[lab]'"
        ) from None
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    return images, torch.from_numpy(data.target)


def _cached(source: Path, folder: Path, size: int, vae: str | None, scale: float, flips: bool):
    """Images or latents [M, C, S, S] of a folder, these mirrored (or None), and labels [M].

    They are computed once, then read from disk.
    """
    import numpy as np

    files = image_files(source)
    made_from = {"files": [[f.relative_to(source).as_posix(), f.stat().st_size] for f, _ in files]}
    made_from |= {"source": str(source), "size": size, "vae": vae, "scale": scale}
    if flips:
        made_from["flips"] = True
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    cache = folder / f"images-{name}"
    if not (cache / "manifest.json").is_file():  # written last: the cache is complete
        cache.mkdir(parents=True, exist_ok=True)
        images, mirrored, labels, skipped = [], [], [], []
        for pixels, label in _pixels(files, size, skipped):
            images.append(_stored(pixels, vae, scale))
            if flips:
                mirrored.append(_stored(pixels.flip(-1), vae, scale))
            labels.append(label)
        _name_unreadable(source, skipped, len(files))
        np.save(cache / "images.npy", np.stack(images))
        if flips:
            np.save(cache / "mirrored.npy", np.stack(mirrored))
        np.save(cache / "labels.npy", np.array(labels))
        manifest = {"images": len(images), "skipped": skipped, "vae": vae, "scale": scale}
        with atomic_write(cache / "manifest.json") as temporary:
            temporary.write_text(json.dumps(manifest, indent=2))
    images = read_array(cache / "images.npy")
    mirrored = read_array(cache / "mirrored.npy") if flips else None
    return images, mirrored, torch.from_numpy(read_array(cache / "labels.npy", mmap=False))


def _stored(pixels: Tensor, vae: str | None, scale: float):
    """Pixels, or their latents, as the cache has them."""
    return (pixels if vae is None else _encoder(vae)(pixels) * scale).half().numpy()


def image_files(source: Path) -> list[tuple[Path, int]]:
    """The image files of a folder, each with its class (folders sorted by name, from 0).

    Raises:
        ValueError: for a path that is no folder, or has no image files.
    """
    if not source.is_dir():
        raise ValueError(f"{str(source)!r} is no folder of images. Allowed: 'digits', or a folder")
    classes = sorted(p for p in source.iterdir() if p.is_dir())
    files = [
        (file, label)
        for label, path in enumerate(classes)
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise ValueError(
            f"{str(source)!r} holds no images: it needs a folder of "
            f"{', '.join(SUFFIXES)} files for each class"
        )
    return files


def pictures(source: str, size: int) -> Iterator[Tensor]:
    """The pixels [C, size, size], in [-1, 1], of every image of a source (see `rows`).

    One line at the end names the unreadable files.
    """
    if source == "digits":
        yield from digits()[0]
        return
    root, skipped = Path(source).expanduser(), []
    files = image_files(root)
    for pixels, _ in _pixels(files, size, skipped):
        yield pixels
    _name_unreadable(root, skipped, len(files))


def _name_unreadable(source: Path, skipped: list[str], files: int) -> None:
    """Print the files that cannot be read; raise ValueError if that is all of them."""
    if skipped:
        shown = ", ".join(skipped[:8]) + (", ..." if len(skipped) > 8 else "")
        print(f"{source}: {len(skipped)} of {files} images cannot be read: {shown}")
    if len(skipped) == files:
        raise ValueError(f"{str(source)!r}: none of its {files} images can be read")


def _pixels(
    files: list[tuple[Path, int]], size: int, skipped: list[str]
) -> Iterator[tuple[Tensor, int]]:
    """Center crops [3, size, size] in [-1, 1], and labels; unreadable files go to `skipped`."""
    try:
        import numpy as np
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError(
            "a folder of images needs Pillow. Run: pip install 'parade[images]'"
        ) from None
    for file, label in files:
        try:
            with Image.open(file) as image:
                square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS)
        except (OSError, ValueError, SyntaxError):  # what Pillow raises for damaged files
            skipped.append(str(file))
            continue
        yield torch.from_numpy(np.array(square)).permute(2, 0, 1) / 127.5 - 1, label


_loaded: dict = {}


def _encoder(vae: str):
    """The encoder of an AutoencoderKL: pixels [3, S, S] to mean latents [C, S / 8, S / 8]."""
    model = autoencoder(vae)

    def encode(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return model.encode(pixels[None]).latent_dist.mean[0]

    return encode


def autoencoder(vae: str):
    """A diffusers AutoencoderKL from a folder, the Hub or MAR's file, loaded once per process.

    Raises:
        ValueError: if diffusers is not installed, or a file (`data.vae`) cannot be read.
    """
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise ValueError(
            f"vae={vae!r} needs diffusers. Run: pip install 'parade[images]'"
        ) from None
    if vae not in _loaded:
        file = vae.endswith(FILES)
        model = from_file(vae, AutoencoderKL) if file else AutoencoderKL.from_pretrained(vae)
        _loaded[vae] = model.eval()
    return _loaded[vae]


class TokenNoise:
    """The training sample of an image: generation order, noise and label dropout.

    Args:
        order: 'raster', or 'random' (a permutation for each image).
        no_class: fraction of images whose label is dropped (-1), for classifier-free guidance.
        repeats: R, noised states per token in one forward (MAR's batch multiplier).
        jitter: width of uniform noise added to the data: discrete grey levels have no density.

    Raises:
        ValueError: for a fraction outside [0, 1], or fewer than 1 repeat.
    """

    def __init__(
        self, order: str = "raster", no_class: float = 0.1, repeats: int = 1, jitter: float = 0.0
    ):
        if not 0 <= no_class <= 1:
            raise ValueError(f"no_class={no_class} is not allowed: it must be in [0, 1]")
        if repeats < 1:
            raise ValueError(f"repeats={repeats} is not allowed: it must be at least 1")
        self.order, self.no_class, self.repeats, self.jitter = order, no_class, repeats, jitter

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int
    ) -> dict[str, Tensor]:
        """One training sample, made from a row of `ImageRows`.

        Returns:
            patches: [N, D], sorted by the order; label: []; order: positions [N]; time: [R, N], in
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

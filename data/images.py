"""Images as patches: rows of continuous tokens, and the noise that training lays over them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn.functional import fold, unfold
from torch.utils.data import Dataset

from data.corpora.stdlib import check_split
from data.files import atomic_write

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


def patchify(images: Tensor, patch: int) -> Tensor:
    """Images [B, C, S, S] -> patches [B, N, C * patch^2] in raster order.

    >>> patchify(torch.arange(4.0).view(1, 1, 2, 2), 1).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    return unfold(images, patch, stride=patch).transpose(1, 2)


def unpatchify(patches: Tensor, size: int, patch: int) -> Tensor:
    """The inverse of `patchify`: [B, N, C * patch^2] -> [B, C, size, size]."""
    return fold(patches.transpose(1, 2), size, patch, stride=patch)


class ImageRows(Dataset):
    """images [M, C, S, S] (-1 is black, 1 white; or latents) and labels [M]."""

    def __init__(self, images, labels, patch: int):
        self.images, self.labels, self.patch = images, labels, patch

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """patches [N, D] in raster order, label []."""
        image = self.images[i].float()
        return {"patches": patchify(image[None], self.patch)[0], "label": self.labels[i].long()}


def rows(
    source: str,
    patch: int,
    folder: str,
    split: str = "train",
    size: int | None = None,
    vae: str | None = None,
    scale: float = 1.0,
) -> ImageRows:
    """The images of a source, as patches.

    source: 'digits' (scikit-learn's, 8 x 8), or a folder with a folder of images for each class.
    split: 'train' or 'heldout', every tenth image. size: pixels that a folder's images are cut and
    scaled to. vae: a folder or Hub id for diffusers' AutoencoderKL; the images are then its latents
    (means, times `scale`), kept under `folder` by fingerprint.
    """
    check_split(split)
    if source == "digits":
        images, labels = digits()
    else:
        if size is None:
            raise ValueError(f"source={source!r} needs size=..., the pixels of a side")
        images, labels = _kept(Path(source).expanduser(), Path(folder), size, vae, scale)
    held_out = (torch.arange(len(labels)) % 10 == 0) == (split == "heldout")
    index = held_out.nonzero().flatten()
    return ImageRows(_Chosen(images, index), labels[index], patch)


class _Chosen:
    """images[index[i]] as tensors, read when asked for."""

    def __init__(self, images, index: Tensor):
        self.images, self.index = images, index

    def __getitem__(self, i: int):
        return torch.asarray(self.images[int(self.index[i])], copy=True)  # files are read-only


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits: [M, 1, 8, 8] in steps of 1/8 from -1 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError(
            "source='digits' needs scikit-learn. Run: pip install 'parade[lab]'"
        ) from None
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    return images, torch.from_numpy(data.target)


def _kept(source: Path, folder: Path, size: int, vae: str | None, scale: float):
    """Images or latents [M, C, S, S] of a folder, made once and then read from disk."""
    import numpy as np

    files = image_files(source)
    made_from = {"files": [[f.relative_to(source).as_posix(), f.stat().st_size] for f, _ in files]}
    made_from |= {"source": str(source), "size": size, "vae": vae, "scale": scale}
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    place = folder / f"images-{name}"
    if not (place / "manifest.json").is_file():  # written last: what is there is whole
        place.mkdir(parents=True, exist_ok=True)
        images, labels, skipped = [], [], []
        for pixels, label in _pixels(files, size, skipped):
            images.append((pixels if vae is None else _encoder(vae)(pixels) * scale).half().numpy())
            labels.append(label)
        _name_unreadable(source, skipped, len(files))
        np.save(place / "images.npy", np.stack(images))
        np.save(place / "labels.npy", np.array(labels))
        manifest = {"images": len(images), "skipped": skipped, "vae": vae, "scale": scale}
        with atomic_write(place / "manifest.json") as temporary:
            temporary.write_text(json.dumps(manifest, indent=2))
    images = np.load(place / "images.npy", mmap_mode="r")
    return images, torch.from_numpy(np.load(place / "labels.npy"))


def image_files(source: Path) -> list[tuple[Path, int]]:
    """Every image of a folder with the number of its class, the classes by name."""
    if not source.is_dir():
        raise ValueError(f"{str(source)!r} is no folder of images. Allowed: 'digits', or a folder")
    classes = sorted(p for p in source.iterdir() if p.is_dir())
    files = [
        (file, label)
        for label, place in enumerate(classes)
        for file in sorted(place.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise ValueError(
            f"{str(source)!r} holds no images: it needs a folder of "
            f"{', '.join(SUFFIXES)} files for each class"
        )
    return files


def pictures(source: str, size: int) -> Iterator[Tensor]:
    """Every image of a source (see `rows`) as pixels [C, size, size] in [-1, 1].

    Unreadable files of a folder are counted and named at the end.
    """
    if source == "digits":
        yield from digits()[0]
        return
    place, skipped = Path(source).expanduser(), []
    files = image_files(place)
    for pixels, _ in _pixels(files, size, skipped):
        yield pixels
    _name_unreadable(place, skipped, len(files))


def _name_unreadable(source: Path, skipped: list[str], files: int) -> None:
    """One line about the files that cannot be read; an error if all are such."""
    if skipped:
        shown = ", ".join(skipped[:8]) + (", ..." if len(skipped) > 8 else "")
        print(f"{source}: {len(skipped)} of {files} images cannot be read: {shown}")
    if len(skipped) == files:
        raise ValueError(f"{str(source)!r}: none of its {files} images can be read")


def _pixels(
    files: list[tuple[Path, int]], size: int, skipped: list[str]
) -> Iterator[tuple[Tensor, int]]:
    """The middle square of each image [3, size, size] in [-1, 1]; names of unreadable ones."""
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
    """Pixels [3, S, S] -> mean latents [C, S / 8, S / 8] of an AutoencoderKL."""
    model = autoencoder(vae)

    def encode(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return model.encode(pixels[None]).latent_dist.mean[0]

    return encode


def autoencoder(vae: str):
    """diffusers' AutoencoderKL from a folder or the Hub, loaded once."""
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise ValueError(
            f"vae={vae!r} needs diffusers. Run: pip install 'parade[images]'"
        ) from None
    if vae not in _loaded:
        _loaded[vae] = AutoencoderKL.from_pretrained(vae).eval()
    return _loaded[vae]


class TokenNoise:
    """What training adds to an image's tokens: an order, noise, and now and then no class.

    order: 'raster', or 'random' for each image its own. no_class: share of images whose label is
    -1, for guidance. repeats: R noised states of each token in one forward (MAR's batch
    multiplier). jitter: width of uniform noise on the data; grey levels have no density.
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
        """patches [N, D] in the order [N], label [], time [R, N] in [0, 1), noise [R, N, D]."""
        N, D = row["patches"].shape
        order = torch.arange(N)
        if self.order == "random":
            order = torch.randperm(N, generator=generator)
        shake = torch.rand(N, D, generator=generator) - 0.5
        dropped = torch.rand((), generator=generator) < self.no_class
        return {
            "patches": row["patches"][order] + self.jitter * shake,
            "label": torch.where(dropped, -1, row["label"]),
            "order": order,
            "time": torch.rand(self.repeats, N, generator=generator),
            "noise": torch.randn(self.repeats, N, D, generator=generator),
        }

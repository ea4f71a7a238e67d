"""Images as patches: digits, a folder with damaged files, latents kept on disk, the noise."""

import sys
from types import SimpleNamespace

import pytest
import torch

from data.images import TokenNoise, digits, image_files, patchify, rows, unpatchify
from tests.support.images import Vae, image_folder


def test_patches_and_back():
    pictures = torch.arange(2 * 3 * 16.0).view(2, 3, 4, 4)
    patches = patchify(pictures, 2)
    assert patches.shape == (2, 4, 12)
    assert patches[0, 1, :4].tolist() == [2, 3, 6, 7]
    assert torch.equal(unpatchify(patches, 4, 2), pictures)


def test_digits_are_split_and_cut():
    train, held_out = (rows("digits", 2, "unused", split) for split in ("train", "heldout"))
    assert (len(train), len(held_out)) == (1617, 180)
    row = held_out[1]
    images, labels = digits()
    assert row["label"] == labels[10]
    assert torch.equal(unpatchify(row["patches"][None], 8, 2)[0], images[10])
    assert (images.min(), images.max()) == (-1, 1)


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path)


def test_a_folder_names_and_counts_what_it_skips(folder, tmp_path, capsys):
    made = rows(str(folder), 2, str(tmp_path / "kept"), size=4)
    said = capsys.readouterr().out
    assert "1 of 22" in said
    assert "03.png" in said
    held_out = rows(str(folder), 2, str(tmp_path / "kept"), "heldout", size=4)
    assert capsys.readouterr().out == ""  # from the cache
    assert len(made) + len(held_out) == 21
    assert held_out[0]["label"] == 0  # ant
    assert made[20 - len(held_out)]["label"] == 1
    image = unpatchify(made[0]["patches"][None], 4, 2)[0]
    assert image[2].mean().item() == pytest.approx(1, abs=1e-3)


def test_latents_are_made_once(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoencoderKL=Vae))
    monkeypatch.setattr(Vae, "asked", 0)
    options = {"size": 4, "vae": "tiny", "scale": 0.5}
    first = rows(str(folder), 1, str(tmp_path / "kept"), **options)
    again = rows(str(folder), 1, str(tmp_path / "kept"), **options)
    assert Vae.asked == 21
    assert first[0]["patches"].shape == (4, 3)
    assert torch.equal(first[3]["patches"], again[3]["patches"])
    assert first[0]["patches"][:, 2].mean().item() == pytest.approx(0.5, abs=1e-3)


def refused(*arguments, **options):
    with pytest.raises(ValueError) as error:
        rows(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_mistakes_are_one_line(folder, tmp_path, monkeypatch):
    kept = str(tmp_path / "kept")
    assert "size=" in refused(str(folder), 2, kept)
    assert str(tmp_path / "none") in refused(str(tmp_path / "none"), 2, kept, size=4)
    (tmp_path / "empty").mkdir()
    assert ".jpeg, .jpg, .png" in refused(str(tmp_path / "empty"), 2, kept, size=4)
    assert "split" in refused("digits", 2, kept, "test")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert "parade[images]" in refused(str(folder), 2, kept, size=4, vae="elsewhere")


def test_hidden_folders_are_no_classes(folder):
    before = image_files(folder)
    for name in (".ipynb_checkpoints/1.png", ".cache/1.png", "__MACOSX/1.png"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"")
    before[0][0].with_name("._0.png").write_bytes(b"")
    assert image_files(folder) == before
    before[0][0].with_name("0.png").write_bytes(b"")
    assert len(image_files(folder)) == len(before) + 1


def test_noise_depends_on_its_generator_alone():
    row = {"patches": torch.arange(8.0).view(4, 2), "label": torch.tensor(3)}
    noise = TokenNoise(order="random", repeats=3, jitter=0.5)
    one, same = (noise(row, torch.Generator().manual_seed(5), 0) for _ in "ab")
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert one["order"].sort().values.tolist() == [0, 1, 2, 3]
    gap = one["patches"] - row["patches"][one["order"]]
    assert gap.abs().max() <= 0.25
    assert gap.any()
    assert (one["time"].shape, one["noise"].shape) == ((3, 4), (3, 4, 2))
    generator = torch.Generator().manual_seed(0)
    dropped = [TokenNoise(no_class=0.5)(row, generator, n)["label"].item() for n in range(200)]
    assert set(dropped) == {3, -1}
    assert 70 < dropped.count(-1) < 130


def test_mirrored_images_are_taken_half_of_the_time():
    made = rows("digits", 2, "unused", flips=True)
    row = made[3]
    picture, mirrored = (unpatchify(row[k][None], 8, 2)[0] for k in ("patches", "mirrored"))
    assert torch.equal(mirrored, picture.flip(-1))
    assert not torch.equal(mirrored, picture)
    noise, generator = TokenNoise(), torch.Generator().manual_seed(0)
    drawn = [noise(row, generator, n)["patches"] for n in range(200)]
    taken = sum(torch.equal(patches, row["mirrored"]) for patches in drawn)
    assert 70 < taken < 130
    assert taken + sum(torch.equal(patches, row["patches"]) for patches in drawn) == 200
    assert "mirrored" not in rows("digits", 2, "unused")[3]


def test_without_flips_the_noise_is_what_it_was():
    """A row without its mirror image draws nothing for it."""
    plain = rows("digits", 2, "unused")[0]
    samples = [
        TokenNoise("random", repeats=2)(row, torch.Generator().manual_seed(1), 0)
        for row in (plain, {**plain})
    ]
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(samples[0]["order"], torch.randperm(16, generator=generator))
    assert torch.equal(samples[0]["noise"], samples[1]["noise"])


def test_latents_of_mirrored_pixels(folder, tmp_path, monkeypatch):
    """The encoder sees the mirrored pixels: its latents are no mirror image of the others."""
    shift = SimpleNamespace(encode=lambda x: SimpleNamespace(
        latent_dist=SimpleNamespace(mean=x[..., ::2, ::2] + torch.arange(2.0))
    ))  # fmt: skip
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoencoderKL=Vae))
    monkeypatch.setattr("data.images._loaded", {"v": shift})
    options = {"size": 4, "vae": "v", "flips": True}
    first = rows(str(folder), 1, str(tmp_path / "kept"), **options)
    monkeypatch.setattr("data.images._loaded", {"v": None})  # it is read from the cache
    again = rows(str(folder), 1, str(tmp_path / "kept"), **options)
    for made in (first, again):
        row = made[1]
        latents, mirrored = (unpatchify(row[k][None], 2, 1)[0] for k in ("patches", "mirrored"))
        assert not torch.equal(latents.flip(-1), mirrored)
    assert torch.equal(first[1]["mirrored"], again[1]["mirrored"])

"""MAR: its states and head by an independent computation, its public checkpoints, and mistakes."""

import pickle

import pytest
import torch
from safetensors.torch import save_file

from models import mar
from models.mar import MarConfig, MarTransformer, from_checkpoint, load
from tests.support.mar import Program, checkpoint, model, published


def given(network, B=3, n=5):
    generator = torch.Generator().manual_seed(0)
    N, D = network.config.tokens, network.config.dim
    images = torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    order = torch.stack([torch.randperm(N, generator=generator) for _ in range(B)])
    known, wanted = order[:, :n], order[:, n:]
    patches = images.gather(1, known[..., None].expand(-1, -1, D))
    return images, {"patches": patches, "known": known, "wanted": wanted, "label": torch.arange(B)}


def difference(network, tensors, n):
    """The largest difference of states and of the head from the program's."""
    images, inputs = given(network, n=n)
    program = Program(tensors, heads=2)
    z, found = network(**inputs), []
    for b in range(3):
        known = torch.zeros(network.config.tokens).bool()
        known[inputs["known"][b]] = True
        label = None if b == network.config.classes else b
        found.append(program.states(images[b], known, label)[inputs["wanted"][b]] - z[b])
    x = torch.randn(3, network.config.dim, dtype=torch.float64)
    theirs = torch.cat(program.net(x, 7.0, z[:, 0]), 1)
    return max(
        torch.stack(found).abs().max().item(),
        (torch.cat(network.head(x, torch.full((3,), 7.0), z[:, 0]), 1) - theirs).abs().max().item(),
    )


@pytest.mark.parametrize("n", [0, 1, 5, 8])
def test_states_and_head_are_the_programs(n):
    network = model(size=3, channels=2, classes=2, head={"depth": 2})
    tensors = published(network)
    assert difference(network, tensors, n) < 1e-12
    for key in tensors:  # negative control: each tensor matters
        other = tensors | {key: tensors[key].roll(1, -1) + 0.1}
        unused = n == 0 and key in ("z_proj.weight", "z_proj.bias")
        assert (difference(network, other, n) > 1e-6) != unused, key


def test_a_token_sees_all_known_tokens_and_their_order_does_not_matter():
    network = model(size=3)
    _, inputs = given(network)
    z = network(**inputs)
    for j in range(5):
        patches = inputs["patches"].clone()
        patches[:, j] += 1
        assert ((network(**{**inputs, "patches": patches}) - z).abs().amax((0, 2)) > 1e-6).all()
    turned = {k: inputs[k].flip(1) for k in ("patches", "known")}
    torch.testing.assert_close(network(**{**inputs, **turned}), z, rtol=0, atol=1e-12)


def test_padding_means_nothing():
    network = model(size=3)
    _, inputs = given(network)
    z = network(**{**inputs, "patches": inputs["patches"][:, :3], "known": inputs["known"][:, :3]})
    padding = torch.arange(5).expand(3, -1) >= 3
    padded = network(**inputs, padding=padding)
    torch.testing.assert_close(padded, z, rtol=0, atol=1e-12)
    assert (network(**inputs) - z).abs().max() > 1e-3


SIZES = {  # hidden, layers, width and depth of the head, weights as the public program counts them
    "B": (768, 12, 1024, 6, 207_924_768),
    "L": (1024, 16, 1280, 8, 478_326_304),
    "H": (1280, 20, 1536, 12, 942_403_104),
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_follow_from_a_checkpoints_shapes(size):
    hidden, layers, width, depth, weights = SIZES[size]
    half = {"hidden": hidden, "layers": layers, "heads": mar.PUBLIC_HEADS[hidden]}
    head = {"width": width, "depth": depth}
    with torch.device("meta"):
        network = MarTransformer(MarConfig(encoder=half, decoder=half, head=head))
    assert sum(p.numel() for p in network.parameters()) == weights
    config = mar._config(network.state_dict(), None, 1)
    for key in ("size", "channels", "classes", "buffer", "encoder", "decoder", "head"):
        assert getattr(config, key) == getattr(network.config, key)
    assert (config.tokens, config.dim, config.buffer, config.classes) == (256, 16, 64, 1000)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_checkpoint_gives_the_averaged_weights(tmp_path):
    network = model(size=3, head={"depth": 2})
    file = checkpoint(network, tmp_path / "checkpoint-last.pth")
    ours = from_checkpoint(file, "auto", heads=2)
    assert same(ours, network)
    assert ours.head.schedule == network.head.schedule
    assert (ours.head.steps, ours.head.schedule.noisy_last) == (100, False)  # the program's
    raw = from_checkpoint(file, "auto", heads=2, average=False)
    assert torch.equal(raw.fake_latent, 2 * network.fake_latent)
    assert from_checkpoint(file, "float32", heads=2).dtype == torch.float32


def test_other_files_hold_one_set_of_weights(tmp_path):
    network = model()
    tensors = published(network)
    save_file(tensors, tmp_path / "mar-tiny.safetensors")
    torch.save(tensors, tmp_path / "flat.pth")
    torch.save({"model": tensors, "model_ema": None}, tmp_path / "raw.pth")
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("mar-tiny.safetensors", "flat.pth", "raw.pth", "old.pth"):
        assert same(from_checkpoint(str(tmp_path / name), "auto", heads=2), network)


def test_a_checkpoint_becomes_a_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(mar.PUBLIC_HEADS, 16, 2)
    network = load(checkpoint(model(head={"depth": 2}), tmp_path / "x.pth"), "float32")
    network.save_pretrained(tmp_path / "folder")
    again = load(str(tmp_path / "folder"))
    assert same(again, network)
    assert again.config.parade == {"method": "mar"}
    assert torch.equal(again(**again.dummy_inputs), network(**network.dummy_inputs))


def test_a_new_network_has_finite_weights():
    half = {"hidden": 8, "layers": 1, "heads": 2}
    config = MarConfig(size=2, encoder=half, decoder=half, head={"width": 8, "depth": 1})
    network = MarTransformer(config)
    assert network(**network.dummy_inputs).isfinite().all()
    assert 0.01 < network.mask_token.std() < 0.04
    assert not network.head.out.weight.any()


class Harmful:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


def refused(path, **options):
    with pytest.raises(ValueError) as error:
        load(str(path), **options)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nothing_in_a_file_is_executed(tmp_path):
    file, trace = tmp_path / "harmful.pth", tmp_path / "trace"
    torch.save({"model": Harmful(str(trace))}, file)
    refused(file)
    assert not trace.exists()
    file.write_bytes(pickle.dumps(Harmful(str(trace))))
    refused(file)
    assert not trace.exists()


@pytest.fixture
def tensors(monkeypatch):
    monkeypatch.setitem(mar.PUBLIC_HEADS, 16, 2)
    return published(model())


BROKEN = [
    (lambda t: t.pop("class_emb.weight"), "class_emb.weight"),
    (lambda t: t.pop("encoder_blocks.0.attn.qkv.bias"), "encoder_blocks.0.attn.qkv.bias"),
    (lambda t: t.update(other=torch.zeros(1)), "other"),
    (lambda t: t.update({"z_proj.bias": torch.zeros(3)}), "z_proj.bias"),
    (lambda t: t["mask_token"].fill_(torch.nan), "mask_token"),
]


@pytest.mark.parametrize(("change", "named"), BROKEN)
def test_a_damaged_checkpoint_is_one_line(change, named, tensors, tmp_path):
    torch.save(tensors, tmp_path / "x.pth")
    load(str(tmp_path / "x.pth"))  # as it is, it can be loaded
    change(tensors)
    torch.save(tensors, tmp_path / "x.pth")
    assert named in refused(tmp_path / "x.pth")


def test_other_mistakes_are_one_line(tmp_path):
    refused(tmp_path / "none.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    refused(tmp_path / "empty.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    refused(tmp_path / "list.pth")
    save_file(published(model()), tmp_path / "tiny.safetensors")
    message = refused(tmp_path / "tiny.safetensors")
    assert "hidden size 16" in message
    assert "heads=" in message
    for wrong, key in (({"patch": 3}, "patch=3"), ({"decoder": {"heads": 7}}, "heads=7")):
        with pytest.raises(ValueError, match=key):
            MarConfig(**wrong)

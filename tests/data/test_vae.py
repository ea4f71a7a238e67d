"""MAR's autoencoder file: names of tensors, equality where diffusers is there, mistakes."""

import re
from types import SimpleNamespace

import pytest
import torch

from data.images import autoencoder
from data.vae import from_file, renamed

NAMES = {
    "encoder.conv_in.weight": "encoder.conv_in.weight",
    "encoder.down.0.block.1.conv2.bias": "encoder.down_blocks.0.resnets.1.conv2.bias",
    "encoder.down.1.block.0.nin_shortcut.bias": (
        "encoder.down_blocks.1.resnets.0.conv_shortcut.bias"
    ),
    "encoder.down.0.downsample.conv.bias": "encoder.down_blocks.0.downsamplers.0.conv.bias",
    "encoder.down.1.attn.1.norm.bias": "encoder.down_blocks.1.attentions.1.group_norm.bias",
    "encoder.down.1.attn.1.k.weight": "encoder.down_blocks.1.attentions.1.to_k.weight",
    "encoder.mid.attn_1.proj_out.weight": "encoder.mid_block.attentions.0.to_out.0.weight",
    "decoder.mid.block_2.norm1.bias": "decoder.mid_block.resnets.1.norm1.bias",
    "decoder.up.1.block.2.norm2.weight": "decoder.up_blocks.0.resnets.2.norm2.weight",
    "decoder.up.1.upsample.conv.weight": "decoder.up_blocks.0.upsamplers.0.conv.weight",
    "decoder.norm_out.weight": "decoder.conv_norm_out.weight",
    "post_quant_conv.weight": "post_quant_conv.weight",
}


def test_names_of_tensors():
    found = renamed({key: torch.zeros(2, 2, 1, 1) for key in NAMES}, levels=2)
    assert {*found} == {*NAMES.values()}
    for key, value in found.items():
        linear = key.endswith(("to_k.weight", "to_out.0.weight"))
        assert value.shape == ((2, 2) if linear else (2, 2, 1, 1))


def test_a_damaged_file_is_one_line(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"no checkpoint")
    torch.save({"model": {"other": torch.zeros(1)}}, tmp_path / "y.ckpt")
    for name in ("x.ckpt", "y.ckpt", "none.ckpt"):
        with pytest.raises(ValueError, match=re.escape(name)) as error:
            from_file(str(tmp_path / name), SimpleNamespace)
        assert "\n" not in str(error.value)


def test_a_file_gives_diffusers_model(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    types = {"down_block_types": ["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
             "up_block_types": ["UpDecoderBlock2D"] * 2}  # fmt: skip
    network = diffusers.AutoencoderKL(
        block_out_channels=[32, 64], layers_per_block=2, latent_channels=4, **types
    ).eval()
    theirs, tensors = network.state_dict(), {}
    for key, value in theirs.items():
        tensors[_published(key)] = value[..., None, None] if _linear(key) else value
    torch.save({"model": tensors}, tmp_path / "kl16.ckpt")
    again = autoencoder(str(tmp_path / "kl16.ckpt"))
    latents = torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        assert torch.equal(again.decode(latents).sample, network.decode(latents).sample)
    assert all(torch.equal(again.state_dict()[key], theirs[key]) for key in theirs)


def _linear(key):
    return re.search(r"to_(q|k|v|out\.0)\.weight$", key)


def _published(key):
    """A name of diffusers' as the file has it, of an autoencoder with two levels."""
    part = key.split(".")[0]
    key = re.sub(r"up_blocks\.(\d)", lambda m: f"up.{1 - int(m[1])}", key)
    for theirs, ours in [
        ("down_blocks", "down"), ("downsamplers.0", "downsample"), ("upsamplers.0", "upsample"),
        ("mid_block.attentions.0", "mid.attn_1"), ("mid_block.resnets.0", "mid.block_1"),
        ("mid_block.resnets.1", "mid.block_2"), ("resnets", "block"), ("attentions", "attn"),
        ("group_norm", "norm"), ("to_out.0", "proj_out"), ("to_", ""),
        ("conv_shortcut", "nin_shortcut"), ("conv_norm_out", "norm_out"),
    ]:  # fmt: skip
        key = key.replace(theirs, ours)
    assert key.startswith(part)
    return key

"""MAR's image autoencoder (KL-16), loaded from its file into diffusers' AutoencoderKL.

Source: github.com/LTH14/mar; the layout is that of latent diffusion (arXiv 2112.10752). MAR scales
latents by 0.2325.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

FILES = (".ckpt", ".pt", ".pth", ".safetensors")
# Names of tensors: in the file, and in diffusers. Upwards, the file counts levels from the finest.
RENAMED = (
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"\.mid\.block_(\d)\.", lambda m: f".mid_block.resnets.{int(m[1]) - 1}."),
    (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
    (r"\.(down|up)\.(\d+)\.block\.", r".\1_blocks.\2.resnets."),
    (r"\.down\.(\d+)\.attn\.", r".down_blocks.\1.attentions."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.up\.(\d+)\.upsample\.", r".up_blocks.\1.upsamplers.0."),
    (r"(\.attentions\.\d+)\.norm\.", r"\1.group_norm."),
    (r"(\.attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
    (r"(\.attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
)


def from_file(path: str, autoencoder: type):
    """Return an AutoencoderKL (diffusers' class, given) from a file of `FILES`."""
    try:
        tensors = _tensors(path)
        network = autoencoder(**_config(tensors))
        levels = len(network.config.block_out_channels)
        network.load_state_dict(renamed(tensors, levels))
        return network
    except Exception as error:
        reason = "there is no such file" if not Path(path).is_file() else str(error)
        reason = " ".join(reason.split())[:300] or type(error).__name__
        raise ValueError(f"cannot load an autoencoder from {path!r}: {reason}") from error


def renamed(tensors: dict[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return a file's tensors, of an autoencoder with `levels` levels, by diffusers' names.

    >>> [*renamed({"decoder.up.4.block.0.norm1.bias": torch.zeros(1)}, 5)]
    ['decoder.up_blocks.0.resnets.0.norm1.bias']
    """
    found = {}
    for key, value in tensors.items():
        for pattern, name in RENAMED:
            key = re.sub(pattern, name, key)
        key = re.sub(
            r"\.up_blocks\.(\d+)\.", lambda m: f".up_blocks.{levels - 1 - int(m[1])}.", key
        )
        # Attention was a convolution of 1 x 1.
        linear = re.search(r"\.(to_[qkv]|to_out\.0)\.weight$", key)
        found[key] = value[:, :, 0, 0] if linear else value
    return found


def _tensors(path: str) -> dict[str, Tensor]:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    file = torch.load(path, map_location="cpu", weights_only=True)
    return file.get("model", file)


def _config(tensors: dict[str, Tensor]) -> dict:
    """Return AutoencoderKL's arguments, read from the shapes."""
    levels = {int(m[1]) for key in tensors if (m := re.match(r"encoder\.down\.(\d+)\.block", key))}
    channels = [len(tensors[f"encoder.down.{i}.block.0.conv2.bias"]) for i in sorted(levels)]
    attends = [f"encoder.down.{i}.attn.0.q.weight" in tensors for i in sorted(levels)]
    return {
        "block_out_channels": channels,
        "down_block_types": [("Attn" if a else "") + "DownEncoderBlock2D" for a in attends],
        "up_block_types": ["UpDecoderBlock2D"] * len(levels),
        "layers_per_block": 2,
        "latent_channels": tensors["post_quant_conv.weight"].shape[0],
    }

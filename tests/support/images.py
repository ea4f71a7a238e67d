"""Tiny random patch transformers, and the plain chain computed without any sampler code."""

from types import SimpleNamespace

import torch
from PIL import Image

from decoding.continuous.image_state import guidance_scale
from models.patches import PatchConfig, PatchTransformer

HEADS = {
    "mixture": {"kind": "mixture", "components": 2, "least_std": 0.2},
    "diffusion": {"kind": "diffusion", "width": 8, "depth": 1, "noise_steps": 50, "steps": 3,
                  "variance": "large", "least_signal": 0.5},
    "learned": {"kind": "diffusion", "width": 8, "depth": 1, "noise_steps": 50, "steps": 3,
                "variance": "learned", "least_signal": 0.5},
}  # fmt: skip


def model(name="mixture", seed=0, layers=2, scale=0.3, **config):
    """A random patch transformer in float64 whose tokens depend on one another."""
    torch.manual_seed(seed)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers,
            "num_attention_heads": 2}  # fmt: skip
    keys = {"size": 2, "patch": 1, "classes": 3, "head": HEADS[name]} | config
    network = PatchTransformer(PatchConfig(backbone=size, **keys))
    with torch.no_grad():
        for key, p in network.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 2 * scale if "embed" in key or "here" in key else scale)
    return network.double().eval()


def pair(name="mixture", strength=0.15, **config):
    """A target, and a drafter whose weights are the target's with noise."""
    target, drafter = (model(name, **config) for _ in "ab")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in drafter.parameters():
            p += strength * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return target, drafter


def plain(network, labels, order, params, randomness):
    """Tokens [B, N, D] in their order by full forwards: no cache."""
    B, N = order.shape
    patches = torch.zeros(B, N, network.config.dim, dtype=network.dtype)
    none = torch.full_like(labels, network.config.classes)
    for n in range(N):
        z = network(patches, labels, order)[:, n : n + 1]
        guidance = None
        if params.guidance != 1:
            scale = guidance_scale(torch.full((B, 1), n), N, params)
            guidance = (network(patches, none, order)[:, n : n + 1], scale)
        x = randomness.normal((B, 1, network.config.dim))
        for i in range(network.head.steps):
            density = network.head.kernel(i, x, z, guidance)
            x = density.cooled(params.temperature).sample(randomness)
        patches[:, n] = x[:, 0]
    return patches


def image_folder(root):
    """Two classes of eleven images each, one of them damaged."""
    for name in ("cat", "ant"):
        (root / name).mkdir()
        for i in range(11):
            Image.new("RGB", (9, 7), (20 * i, 0, 255)).save(root / name / f"{i:02d}.png")
    (root / "ant" / "03.png").write_bytes(b"\x89PNG, or not")
    (root / "ant" / "notes.txt").write_text("no image")
    return root


class Vae:
    """Stands in for diffusers' AutoencoderKL: a latent is an average of pixels."""

    asked = 0

    @classmethod
    def from_pretrained(cls, path):
        return cls()

    def eval(self):
        return self

    def encode(self, pixels):
        Vae.asked += 1
        mean = torch.nn.functional.avg_pool2d(pixels, 2)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean))

"""Tiny random MARs, files in the layout of MAR's program, and that program computed again.

The computation here takes nothing from `models.mar`: it reads the tensors by their published names,
one image at a time, without padding.
"""

import argparse
import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, silu

from decoding.engine.randomness import ContinuousRandomness
from decoding.samplers.mar import MarSampler
from models.mar import MarConfig, MarTransformer

# A chain whose densities of drafter and target overlap, for tests of speculation.
EASY = {"noise_steps": 50, "steps": 3, "least_signal": 0.5, "noisy_last": True}


def model(seed=0, scale=0.3, **config):
    """A random MAR in float64 whose tokens depend on one another."""
    torch.manual_seed(seed)
    half = {"hidden": 16, "layers": 2, "heads": 2}
    keys = {"size": 2, "channels": 1, "classes": 3, "buffer": 2, "encoder": half, "decoder": half}
    keys["head"] = {"width": 8, "depth": 1} | config.pop("head", {})
    network = MarTransformer(MarConfig(**keys | config))
    with torch.no_grad():
        for p in network.parameters():
            p.add_(scale * torch.randn(p.shape))
    return network.double().eval()


def pair(strength=0.05, **config):
    """A target with an easy chain, and a drafter whose weights are the target's with noise."""
    config = {"head": EASY} | config
    target, drafter = (model(**config) for _ in "ab")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in drafter.parameters():
            p += strength * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return target, drafter


def shifted(shift=0.4):
    """A target, and a drafter whose estimate of the noise is shifted: it is accepted often."""
    pair = [model(seed=2, head=EASY) for _ in "ab"]
    with torch.no_grad():
        for network in pair:
            head = network.head
            head.out.weight[1:] *= 0.1  # standard deviations of much the same size
            head.out.bias[1:] = 0.5
            network.z_proj.weight *= 2  # tokens that depend on one another
            head.condition.weight *= 2
        pair[1].head.out.bias[0] += shift
    return pair


def names(depth):
    """{our name: published name} of the head's modules."""
    head = {"token": "input_proj", "condition": "cond_embed", "time.0": "time_embed.mlp.0",
            "time.2": "time_embed.mlp.2", "out": "final_layer.linear",
            "last.linear": "final_layer.adaLN_modulation.1"}  # fmt: skip
    for i in range(depth):
        block = {"norm": "in_ln", "modulation.linear": "adaLN_modulation.1", "mlp.0": "mlp.0",
                 "mlp.2": "mlp.2"}  # fmt: skip
        head |= {f"blocks.{i}.{a}": f"res_blocks.{i}.{b}" for a, b in block.items()}
    return {f"head.{a}": f"diffloss.net.{b}" for a, b in head.items()}


def published(network):
    """A network's tensors by the names of MAR's program."""
    table, tensors = names(network.config.head["depth"]), {}
    for key, value in network.state_dict().items():
        module, _, kind = key.rpartition(".")
        tensors[f"{table[module]}.{kind}" if module in table else key] = value.detach().clone()
    return tensors


def checkpoint(network, file):
    """Write a checkpoint as MAR's program does, whose weights are twice the averaged ones."""
    average = published(network)
    torch.save(
        {"model": {k: 2 * v for k, v in average.items()}, "model_ema": average, "optimizer": {},
         "epoch": 399, "scaler": {}, "args": argparse.Namespace(model="mar_tiny", lr=1e-4)},
        file,
    )  # fmt: skip
    return str(file)


class Program:
    """MAR's program: tensors by their published names, and what its options say."""

    def __init__(self, tensors, heads, steps=100):
        self.t, self.heads, self.steps = tensors, heads, steps
        self.tokens = tensors["diffusion_pos_embed_learned"].shape[1]
        self.buffer = tensors["encoder_pos_embed_learned"].shape[1] - self.tokens

    def linear(self, name, x):
        return linear(x, self.t[f"{name}.weight"], self.t[f"{name}.bias"])

    def norm(self, name, x):
        return layer_norm(
            x, x.shape[-1:], self.t[f"{name}.weight"], self.t[f"{name}.bias"], eps=1e-6
        )

    def blocks(self, half, x):
        """All layers of a half, on the rows x [n, H] of one image."""
        layers = {k.split(".")[1] for k in self.t if k.startswith(f"{half}_blocks.")}
        for i in range(len(layers)):
            name = f"{half}_blocks.{i}"
            h = self.linear(f"{name}.attn.qkv", self.norm(f"{name}.norm1", x))
            size = x.shape[1] // self.heads
            outputs = []
            for head in range(self.heads):
                q, k, v = (h[:, x.shape[1] * j + size * head :][:, :size] for j in range(3))
                outputs.append((q @ k.T / size**0.5).softmax(-1) @ v)
            x = x + self.linear(f"{name}.attn.proj", torch.cat(outputs, 1))
            h = gelu(self.linear(f"{name}.mlp.fc1", self.norm(f"{name}.norm2", x)))
            x = x + self.linear(f"{name}.mlp.fc2", h)
        return self.norm(f"{half}_norm", x)

    def states(self, image, known, label):
        """z [N, H] of all positions of an image [N, D] of which some, bool [N], are known."""
        start = self.t["fake_latent"][0] if label is None else self.t["class_emb.weight"][label]
        x = torch.cat([start.repeat(self.buffer, 1), self.linear("z_proj", image)])
        x = self.norm("z_proj_ln", x + self.t["encoder_pos_embed_learned"][0])
        kept = torch.cat([torch.ones(self.buffer).bool(), known])
        x = self.linear("decoder_embed", self.blocks("encoder", x[kept]))
        full = self.t["mask_token"][0].repeat(self.buffer + self.tokens, 1)
        full[kept] = x
        x = self.blocks("decoder", full + self.t["decoder_pos_embed_learned"][0])
        return x[self.buffer :] + self.t["diffusion_pos_embed_learned"][0]

    def net(self, x, time, z):
        """The head's estimate of the noise, and its raw variance: [n, D] each."""
        angles = time * torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        waves = torch.cat([angles.cos(), angles.sin()]).to(x.dtype)
        name = "diffloss.net"
        time = self.linear(f"{name}.time_embed.mlp.0", waves)
        y = silu(
            self.linear(f"{name}.time_embed.mlp.2", silu(time))
            + self.linear(f"{name}.cond_embed", z)
        )
        h = self.linear(f"{name}.input_proj", x)
        for i in range(len([k for k in self.t if k.endswith(".in_ln.bias")])):
            block = f"{name}.res_blocks.{i}"
            shift, scale, gate = self.linear(f"{block}.adaLN_modulation.1", y).chunk(3, -1)
            inner = self.norm(f"{block}.in_ln", h) * (1 + scale) + shift
            h = h + gate * self.linear(f"{block}.mlp.2", silu(self.linear(f"{block}.mlp.0", inner)))
        shift, scale = self.linear(f"{name}.final_layer.adaLN_modulation.1", y).chunk(2, -1)
        h = nn.functional.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift
        return self.linear(f"{name}.final_layer.linear", h).chunk(2, -1)

    def denoised(self, z, free, scale, temperature):
        """Tokens [n, D] by the whole chain; free: z without a class, or None."""
        n, D = len(z), self.t["z_proj.weight"].shape[1]
        x = torch.randn(n, D).to(z)
        f = [math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(1001)]
        signal = np.cumprod([1 - min(1 - b / a, 0.999) for a, b in pairwise(f)])
        times, at = [], 0.0
        for _ in range(self.steps):
            times.append(round(at))
            at += 999 / (self.steps - 1)
        abar = signal[times]
        before = np.append(1.0, abar[:-1])
        alpha = abar / before
        beta = 1 - alpha
        small = beta * (1 - before) / (1 - abar)
        small[0] = small[1]
        for i in reversed(range(self.steps)):
            eps, raw = self.net(x, times[i], z)
            if free is not None:
                without, _ = self.net(x, times[i], free)
                eps = without + scale * (eps - without)
            clean = x / abar[i] ** 0.5 - (1 / abar[i] - 1) ** 0.5 * eps
            mean = beta[i] * before[i] ** 0.5 / (1 - abar[i]) * clean
            mean = mean + (1 - before[i]) * alpha[i] ** 0.5 / (1 - abar[i]) * x
            share = (raw + 1) / 2
            log = share * math.log(beta[i]) + (1 - share) * math.log(small[i])
            noise = torch.randn(n if free is None else 2 * n, D)[:n].to(z)
            x = mean + (i > 0) * (log / 2).exp() * noise * temperature
        return x

    def sample(self, labels, iterations, guidance, schedule, temperature, seed):
        """Images [B, N, D] in raster order, with the global generators of torch and NumPy."""
        torch.manual_seed(seed)
        np.random.seed(seed)
        B, N = len(labels), self.tokens
        orders = []
        for _ in range(B):
            orders.append(np.arange(N))
            np.random.shuffle(orders[-1])
        images = self.t["z_proj.weight"].new_zeros(B, N, self.t["z_proj.weight"].shape[1])
        masked = torch.ones(B, N).bool()
        for step in range(iterations):
            left = np.floor(N * np.cos(math.pi / 2 * (step + 1) / iterations))
            left = int(max(1, min(masked[0].sum().item() - 1, left)))
            after = torch.zeros(B, N).bool()
            for b in range(B):
                after[b, torch.tensor(orders[b][:left])] = True
            now = masked if step == iterations - 1 else masked ^ after
            scale = guidance
            if schedule == "linear":
                scale = 1 + (guidance - 1) * (N - left) / N
            z = [self.states(images[b], ~masked[b], labels[b])[now[b]] for b in range(B)]
            free = None
            if guidance != 1:
                free = [self.states(images[b], ~masked[b], None)[now[b]] for b in range(B)]
                free = torch.cat(free)
            images[now] = self.denoised(torch.cat(z), free, scale, temperature)
            masked = after
        return images


class PublishedRandomness(ContinuousRandomness):
    """The random numbers of MAR's program, for images that are generated as one batch.

    The program draws orders from NumPy's global generator, and each pass's x_T from the CPU's
    generator of torch and the noise of its `steps` from the device's; where it is `guided` it draws
    noise for the rows without a class too, and ignores it. All have one seed.
    """

    def __init__(self, seed: int, device: torch.device, steps: int, guided: bool):
        self.shuffles = np.random.RandomState(seed)
        self.starts = self.noise = torch.Generator().manual_seed(seed)
        if device.type != "cpu":
            self.noise = torch.Generator(device).manual_seed(seed)
        self.steps, self.guided, self.draws = steps, guided, 0

    def orders(self, count: int, tokens: int) -> Tensor:
        """Return orders of generation [count, tokens]: the program masks in the reverse order."""
        rows = np.tile(np.arange(tokens), (count, 1))
        for row in rows:
            self.shuffles.shuffle(row)
        return torch.from_numpy(rows).to(self.noise.device).flip(-1)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        count, start = math.prod(shape[:-1]), self.draws % (self.steps + 1) == 0
        self.draws += 1
        source = self.starts if start else self.noise
        drawn = count * (2 if self.guided and not start else 1)
        numbers = torch.randn(drawn, shape[-1], generator=source, device=source.device)
        return numbers[:count].view(shape).to(self.noise.device, torch.float64)


class AsPublished(MarSampler):
    """MAR's sampler with the random numbers of its program."""

    def order(self, count, randomness):
        order = randomness.orders(count, self.target.config.tokens)
        return torch.cat([part.sort(-1).values for part in order.split(self.counts, -1)], -1)

    def sample(self, labels, params):
        steps, guided = self.target.head.steps, params.guidance != 1
        numbers = PublishedRandomness(params.seed, self.target.device, steps, guided)
        return self.generate(labels, params, randomness=numbers)

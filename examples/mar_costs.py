"""Time speculation at the true sizes of MAR-B and MAR-L, and say when it would pay.

The weights are random, so nothing is said about which drafts are accepted: a cycle takes the same
time whatever they are. It is timed at an image of which half is known.

python examples/mar_costs.py
"""

import time
from collections import deque
from dataclasses import replace

import torch

from decoding.continuous.image_state import ImageBatch, ImageParams
from decoding.samplers.cspd import CspdSampler
from decoding.samplers.sequential import SequentialSampler
from models.mar import PUBLIC_HEADS, MarConfig, MarTransformer

SIZES = {"B": (768, 12, 1024, 6), "L": (1024, 16, 1280, 8)}  # width and layers of body and head
GAMMAS = (1, 2, 4)


def model(size: str) -> MarTransformer:
    """Return a random MAR whose last denoising step has noise."""
    hidden, layers, width, depth = SIZES[size]
    half = {"hidden": hidden, "layers": layers, "heads": PUBLIC_HEADS[hidden]}
    head = {"width": width, "depth": depth, "noisy_last": True}
    return MarTransformer(MarConfig(encoder=half, decoder=half, head=head))


def cycle_seconds(sampler: SequentialSampler, params: ImageParams, times: int = 2) -> list[float]:
    """Return the fastest seconds of a cycle, and those of it in the networks' passes."""
    with torch.inference_mode():
        batch = sampler.new_batch(deque([(0, (207, 1))]), 1, params)
        batch.lengths.fill_(sampler.target.config.tokens // 2)
        sampler.begin(batch, params)
        sampler.cycle(batch, params)  # warms up
        found = []
        for _ in range(times):
            started, before = time.perf_counter(), spent(batch)
            sampler.cycle(batch, params)
            found.append([time.perf_counter() - started, spent(batch) - before])
    return min(found)


def spent(batch: ImageBatch) -> float:
    """Return the seconds of a batch's networks so far."""
    return sum(network.seconds for network in batch.networks.values())


def break_even(cost: float, gamma: int) -> float | None:
    """Return the share a of accepted drafts at which 1 + a + ... + a^gamma tokens pay for a cycle.

    `cost` is in sequential tokens; None: not even gamma accepted drafts pay.
    """
    if cost >= gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        pays = sum(middle**i for i in range(gamma + 1)) >= cost
        low, high = (low, middle) if pays else (middle, high)
    return high


def main() -> None:
    """Print a line for each number of drafts of MAR-B for MAR-L."""
    torch.manual_seed(0)
    target, drafter = model("L").eval(), model("B").eval()
    params = ImageParams(seed=0, prefill=0.0)
    for name, network in ("B", drafter), ("L", target):
        whole, passes = cycle_seconds(SequentialSampler(network), params)
        print(f"MAR-{name}, a token alone: {1000 * whole:.0f} ms, {1000 * passes:.0f} in the pass")
    for gamma in GAMMAS:
        sampler = CspdSampler(target, drafter, gamma=gamma)
        seconds, passes = cycle_seconds(sampler, replace(params, gamma=gamma))
        share = break_even(seconds / whole, gamma)
        said = "at no share of accepted drafts" if share is None else f"above {share:.2f} accepted"
        print(
            f"gamma {gamma}: a cycle takes {1000 * seconds:.0f} ms, {1000 * passes:.0f} in passes, "
            f"as {seconds / whole:.2f} tokens alone: faster {said}"
        )


if __name__ == "__main__":
    main()

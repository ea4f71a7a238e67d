"""Milliseconds of a forward by its number of tokens, for each way to multiply 16-bit weights.

`python -m tests.pass_widths model=HuggingFaceTB/SmolLM2-135M-Instruct`: the ways take turns, and
the shortest of `repeats` counts. *modules called*: without `models.fused_layers`. *other products*:
without those of `models.bfloat16_loops`: oneDNN's, or float32's of converted weights. torch's own
products of bfloat16 are emulated on a CPU without.
"""

from dataclasses import dataclass
from time import perf_counter
from unittest.mock import patch

import torch
from transformers import DynamicCache, PreTrainedModel

from decoding.loading import for_inference
from models import causal, fused_layers, packed
from recipes.command import main
from recipes.options import parse


@dataclass(frozen=True)
class PassWidths:
    """Time passes of `widths` tokens of a `model` with so many `threads`."""

    model: str
    widths: tuple[int, ...] = (1, 4, 8, 16, 32, 200)
    repeats: int = 5
    threads: int = 1


def read_options(argv: list[str]) -> PassWidths:
    """The command's options."""
    return parse(argv, PassWidths, "tests.pass_widths")


def run(argv: list[str]) -> None:
    """The command."""
    p = read_options(argv)
    torch.set_num_threads(p.threads)
    ways = {"float32": loaded(p.model, "float32"), "as loaded": loaded(p.model, "auto")}
    with patch.object(fused_layers, "fuse"):
        ways["modules called"] = loaded(p.model, "auto")
    with patch.object(packed, "bfloat16_loops", lambda: None):
        ways["other products"] = loaded(p.model, "auto")
    with patch.object(packed, "products", lambda network: {}):
        ways["torch's own"] = loaded(p.model, "auto")
    print("tokens", *(f"{name} ({packed.precision(n)})" for name, n in ways.items()), sep=" | ")
    for width in p.widths:
        tokens = torch.arange(1, width + 1)[None]
        seconds = dict.fromkeys(ways, float("inf"))
        for _ in range(p.repeats):
            for name, network in ways.items():
                seconds[name] = min(seconds[name], timed(network, tokens))
        print(width, *(f"{1e3 * s:.0f}" for s in seconds.values()), sep=" | ", flush=True)


def loaded(model: str, dtype: str) -> PreTrainedModel:
    """A network, ready to decode."""
    network = causal.load(model, dtype=dtype)
    for_inference(network)
    return network


@torch.inference_mode()
def timed(network: PreTrainedModel, tokens: torch.Tensor) -> float:
    """The seconds of a forward."""
    started = perf_counter()
    network(tokens, past_key_values=DynamicCache(), use_cache=True)
    return perf_counter() - started


if __name__ == "__main__":
    main(run)

"""How much faster pcLLM's packed training step is than the 2N separate passes that it stands for.

`python -m tests.packed_step [blocks=16]`: forward and backward of one step of the lab's network,
with random weights and tokens, in float32. Status 1 if the two ways give different losses.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from data.rows.trajectories import Answer, interleave
from recipes.command import main
from recipes.compose import compose
from recipes.options import parse
from trainers.base import Optimization
from trainers.losses.diffusion import token_nll
from trainers.losses.pcllm import progressive_consistency
from trainers.pcllm import ProgressiveConsistency

W = 1.0


@dataclass(frozen=True)
class PackedStep:
    """Time a step on `rows` answers of `blocks` (N) blocks of `block_size` (n) tokens.

    repeats: measurements of each way, in turn, after a first one that does not count.
    """

    blocks: int = 16
    block_size: int = 16
    prompt: int = 64
    rows: int = 2
    repeats: int = 2
    seed: int = 0


def run(argv: list[str]) -> None:
    """The command."""
    m = parse(argv or ["blocks=16"], PackedStep, "tests.packed_step")
    torch.manual_seed(m.seed)
    network = lab_network()
    prompt, clean, noisy = tokens(m, network.config.vocab_size)
    samples = [
        interleave(Answer(p, m.prompt, c, c.numel(), []), x, 0)
        for p, c, x in zip(prompt, clean, noisy)
    ]
    batch = {k: torch.stack([s[k] for s in samples]) for k in samples[0]}
    module = ProgressiveConsistency(
        network, None, Optimization(lr=1e-3), mask="nc", window=m.blocks, w=W, sampling={}
    )
    ways: dict[str, Callable[[], float]] = {
        "one packed pass": lambda: packed(module, batch),
        f"{2 * m.blocks} separate passes": lambda: separate(
            network, prompt, clean, noisy, batch["noised"]
        ),
    }
    losses, seconds = {}, {name: [] for name in ways}
    for repeat in range(m.repeats + 1):
        for name, step in ways.items():
            network.zero_grad()
            started = perf_counter()
            losses[name] = step()
            if repeat:
                seconds[name].append(perf_counter() - started)
    for name in ways:
        print(f"{name}: {median(seconds[name]):.2f} s a step, loss {losses[name]:.5f}")
    one, many = (median(seconds[name]) for name in ways)
    print(
        f"{many / one:.1f} times faster: {m.rows} rows, prompts of {m.prompt}, N = {m.blocks}, "
        f"n = {m.block_size}, {torch.get_num_threads()} threads"
    )
    first, second = losses.values()
    sys.exit(abs(first - second) > 1e-4 * first)


def lab_network() -> PreTrainedModel:
    """The network that the lab trains, with random weights."""
    config = compose(["recipe=ar_target"], "fit")
    settings = {k: v for k, v in config.network.items() if k != "_target_"}
    made = AutoConfig.for_model(vocab_size=config.tokenizer.vocab_size, **settings)
    return AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")


def tokens(m: PackedStep, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts [B, P], clean blocks [B, N, n] and noisy ones, of which every second is wrong."""
    prompt = torch.randint(1, vocabulary, (m.rows, m.prompt))
    clean, other = torch.randint(1, vocabulary, (2, m.rows, m.blocks, m.block_size))
    return prompt, clean, torch.where(torch.rand(clean.shape) < 0.5, other, clean)


def packed(module: ProgressiveConsistency, batch: dict[str, Tensor]) -> float:
    """The step as it is trained."""
    loss, weight = module.losses(batch)
    total = (loss * weight).sum() / weight.sum()
    total.backward()
    return total.item()


def separate(
    network: PreTrainedModel, prompt: Tensor, clean: Tensor, noisy: Tensor, noised: Tensor
) -> float:
    """Eq. 8-9 by two forwards a block, each of an ordinary causal batch, and a backward."""
    n, total = clean.shape[2], 0.0
    for i in range(clean.shape[1]):
        q, p = (
            network(
                input_ids=torch.cat([prompt, blocks[:, : i + 1].flatten(1)], 1),
                use_cache=False,
                logits_to_keep=n + 1,
            ).logits[:, :-1]
            for blocks in (noisy, clean)
        )
        present = torch.ones_like(clean[:, i])
        L_AR = token_nll(p, clean[:, i])
        loss, _ = progressive_consistency(q, p, L_AR, noised[:, i], present, W)
        loss = loss.sum() / clean.numel()
        loss.backward()
        total += loss.item()
    return total


if __name__ == "__main__":
    main(run)

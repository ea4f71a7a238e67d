"""Jacobi decoding: a causal LM verifies its own guesses of a block and makes the next ones.

Source: Song et al., arXiv 2002.03629; pcLLM, section 2.1 and 4.3 (running window). With keyed
noise the fixed point is the sequential sample at any temperature: every choice is
argmax(log p + g) with the noise g of its own position, and a guess is accepted if it equals the
choice at its position and all guesses before it are accepted.

Guesses are stored in `batch.tokens`, after the committed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine import verify
from decoding.engine.batch import Batch, State
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.engine.verify import choose

KNOBS = {"block_size": int, "running": bool}

# First guesses drawn for a request; after so many positions they repeat.
STARTS = 64


@dataclass
class JacobiState(State):
    """The state of a batch.

    Attributes:
        prompt: Tokens of each prompt, [B].
    """

    prompt: Tensor


class JacobiSampler(Sampler):
    """Jacobi decoding of one block at a time, without a drafter.

    Args:
        target: A causal LM, best one trained for it (`trainers.pcllm`).
        tokenizer: The target's own.
        block_size: n, tokens guessed in a pass; a request may name another.
        running: The block is always the next n positions. Otherwise a block is decoded to its fixed
            point before the next one is begun.

    Raises:
        ValueError: block_size is below 1, or the target cannot be decoded with.
    """

    rules = ("coupled",)  # without a drafter there is no q for the others

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: int = 16,
        running: bool = True,
    ):
        super().__init__(target, tokenizer)
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not allowed: it must be at least 1")
        self.block_size, self.running = block_size, running

    def margin(self, params: SamplingParams) -> int:
        # A pass may look ahead by a block, and one token of the target's own.
        return (params.block_size or self.block_size) + 2

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        """Prefill the target, and guess tokens of the prompt at every position after it."""
        self.prefill(batch, "target", self.cached_target(batch))
        batch.state = JacobiState(prompt=batch.lengths)
        batch.tokens = start_guesses(batch)

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One Jacobi iteration (Eq. 3): emit the accepted guesses and the choice after them."""
        width = self.width(batch, params)
        guess = guesses(batch, int(width.max()))
        logits = self.target_pass(batch, guess, params).logits
        choice = choose(logits, self.noise(batch, logits.shape[1], params))
        accepted, _ = verify.coupled(guess, choice)
        # Where another row's block ends later, this row still uses its own width only.
        emitted = accepted.minimum(width) + 1
        return with_old_guesses(batch, choice, width.maximum(emitted)), emitted

    def width(self, batch: Batch, params: SamplingParams) -> Tensor:
        """How many tokens the next pass guesses, [B]."""
        n = params.block_size or self.block_size
        if self.running:
            return torch.full_like(batch.lengths, n)
        return n - (batch.lengths - batch.state.prompt) % n


def guesses(batch: Batch, count: int, first: int = 0) -> Tensor:
    """The guesses at consecutive positions after the committed tokens.

    Args:
        batch: The unfinished requests.
        count: How many guesses.
        first: Positions that are skipped.

    Returns:
        Tokens [B, count].
    """
    positions = batch.lengths[:, None] + first + torch.arange(count, device=batch.tokens.device)
    return batch.tokens.gather(1, positions)


def with_old_guesses(batch: Batch, choice: Tensor, count: Tensor) -> Tensor:
    """The first count [B] of choice [B, m], and the old guesses after them: [B, m]."""
    old = guesses(batch, choice.shape[1])
    new = torch.arange(choice.shape[1], device=old.device) < count[:, None]
    return torch.where(new, choice, old)


def start_guesses(batch: Batch) -> Tensor:
    """`batch.tokens` with random tokens of each prompt as the guesses after it: [B, capacity]."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    prompt = positions[: int(batch.lengths.max())] < batch.lengths[:, None]
    even = prompt.float()[:, None].expand(-1, STARTS, -1)
    drawn = batch.tokens.gather(1, batch.randomness.categorical(even))
    ahead = positions - batch.lengths[:, None]
    return torch.where(ahead < 0, batch.tokens, drawn.gather(1, ahead % STARTS))


def from_export(target, tokenizer, drafter, config: dict) -> JacobiSampler:
    """Make the sampler of an exported model; config is its `parade` entry."""
    return JacobiSampler(target, tokenizer, **{k: config[k] for k in KNOBS if k in config})

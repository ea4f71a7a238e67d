"""Jacobi decoding: a causal LM verifies its own guesses of a block and makes the next ones.

Source: Song et al., arXiv 2002.03629; pcLLM, section 2.1 and 4.3 (running window). With keyed noise
the fixed point is the sequential sample at any temperature: every choice is argmax(log p + g) with
its position's noise g, and a guess is accepted if it and all guesses before it equal the choices at
their positions. Guesses are in `batch.tokens`, after the committed tokens.
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
from decoding.method import Count, Method

# First guesses drawn for a request; after so many positions they repeat.
STARTS = 64


@dataclass
class JacobiState(State):
    """The state of a batch."""

    prompt: Tensor  # tokens of each prompt, [B]


class JacobiSampler(Sampler):
    """Jacobi decoding of one block at a time, without a drafter.

    Args:
        target, tokenizer: A causal LM, best one trained for it (`trainers.pcllm`), and its own.
        block_size: n, tokens guessed in a pass; a request may name another.
        running: The block is always the next n positions; False decodes a block to its fixed point
            before the next one begins.
    """

    rules = ("coupled",)  # without a drafter there is no q for the others
    chains = True

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: Count = 16,
        running: bool = True,
    ):
        super().__init__(target, tokenizer)
        self.block_size, self.running = block_size, running

    def margin(self, params: SamplingParams) -> int:
        # A pass may look ahead by a block, and one token of the target's own.
        return (params.block_size or self.block_size) + 2

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        self.prefill(batch, "target", self.cached_target(batch))
        batch.state = JacobiState(prompt=batch.lengths)
        batch.tokens = start_guesses(batch)

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Iterate once (Eq. 3): emit the accepted guesses and the choice after them."""
        width = self.width(batch, params)
        guess = guesses(batch, int(width.max()))
        logits = self.target_pass(batch, guess, params).logits
        choice = choose(logits, self.noise(batch, logits.shape[1], params))
        accepted, _ = verify.coupled(guess, choice)
        # Where another row's block ends later, this row still uses its own width only.
        emitted = accepted.minimum(width) + 1
        return with_old_guesses(batch, choice, width.maximum(emitted)), emitted

    def width(self, batch: Batch, params: SamplingParams) -> Tensor:
        """Return how many tokens the next pass guesses, [B]."""
        n = params.block_size or self.block_size
        if self.running:
            return torch.full_like(batch.lengths, n)
        return n - (batch.lengths - batch.state.prompt) % n


def guesses(batch: Batch, count: int, first: int = 0) -> Tensor:
    """Return `count` guesses [B, count] after the committed tokens and `first` further ones."""
    positions = batch.lengths[:, None] + first + torch.arange(count, device=batch.tokens.device)
    return batch.tokens.gather(1, positions)


def with_old_guesses(batch: Batch, choice: Tensor, count: Tensor) -> Tensor:
    """Join the first count [B] of choice [B, m] and the old guesses after them: [B, m]."""
    old = guesses(batch, choice.shape[1])
    new = torch.arange(choice.shape[1], device=old.device) < count[:, None]
    return torch.where(new, choice, old)


def start_guesses(batch: Batch) -> Tensor:
    """Return `batch.tokens` with random tokens of each prompt as the guesses after it."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    prompt = positions[: int(batch.lengths.max())] < batch.lengths[:, None]
    even = prompt.float()[:, None].expand(-1, STARTS, -1)
    drawn = batch.tokens.gather(1, batch.randomness.categorical(even))
    ahead = positions - batch.lengths[:, None]
    return torch.where(ahead < 0, batch.tokens, drawn.gather(1, ahead % STARTS))


METHOD = Method(JacobiSampler)

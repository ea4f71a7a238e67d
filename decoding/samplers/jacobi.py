"""Jacobi decoding: a causal LM verifies its own guesses of a block and makes the next ones.

Source: Song et al., arXiv 2002.03629; pcLLM, section 2.1 and 4.3 (running window). With keyed
noise the fixed point is the sequential sample at any temperature: every choice is
argmax(log p + g) with the noise g of its own position, and a guess is accepted if it equals the
choice at its position and all guesses before it are accepted.

Guesses are stored in `rows.tokens`, after the committed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine import verify
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Rows, Sampler, State
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

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """Prefill the target, and guess tokens of the prompt at every position after it."""
        self.prefill(rows, "target", self.cached_target(rows))
        rows.state = JacobiState(prompt=rows.lengths)
        rows.tokens = start_guesses(rows)

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One Jacobi iteration (Eq. 3): emit the accepted guesses and the choice after them."""
        width = self.width(rows, params)
        guess = guesses(rows, int(width.max()))
        logits = self.target_pass(rows, guess, params).logits
        choice = choose(logits, self.noise(rows, logits.shape[1], params))
        accepted, _ = verify.coupled(guess, choice)
        # Where another row's block ends later, this row still uses its own width only.
        emitted = accepted.minimum(width) + 1
        return with_old_guesses(rows, choice, width.maximum(emitted)), emitted

    def width(self, rows: Rows, params: SamplingParams) -> Tensor:
        """How many tokens the next pass guesses, [B]."""
        n = params.block_size or self.block_size
        if self.running:
            return torch.full_like(rows.lengths, n)
        return n - (rows.lengths - rows.state.prompt) % n


def guesses(rows: Rows, count: int, first: int = 0) -> Tensor:
    """The guesses at consecutive positions after the committed tokens.

    Args:
        rows: The batch.
        count: How many guesses.
        first: Positions that are skipped.

    Returns:
        Tokens [B, count].
    """
    positions = rows.lengths[:, None] + first + torch.arange(count, device=rows.tokens.device)
    return rows.tokens.gather(1, positions)


def with_old_guesses(rows: Rows, choice: Tensor, count: Tensor) -> Tensor:
    """The first count [B] of choice [B, m], and the old guesses after them: [B, m]."""
    old = guesses(rows, choice.shape[1])
    new = torch.arange(choice.shape[1], device=old.device) < count[:, None]
    return torch.where(new, choice, old)


def start_guesses(rows: Rows) -> Tensor:
    """`rows.tokens` with random tokens of each prompt as the guesses after it: [B, capacity]."""
    positions = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    prompt = positions[: int(rows.lengths.max())] < rows.lengths[:, None]
    even = prompt.float()[:, None].expand(-1, STARTS, -1)
    drawn = rows.tokens.gather(1, rows.randomness.categorical(even))
    ahead = positions - rows.lengths[:, None]
    return torch.where(ahead < 0, rows.tokens, drawn.gather(1, ahead % STARTS))


def from_export(target, tokenizer, drafter, config: dict) -> JacobiSampler:
    """Make the sampler of an exported model; config is its `parade` entry."""
    return JacobiSampler(target, tokenizer, **{k: config[k] for k in KNOBS if k in config})

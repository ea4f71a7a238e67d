"""Jacobi decoding: a causal LM verifies its own guesses of a block and makes the next ones.

Source: Song et al., arXiv 2002.03629; pcLLM, section 2.1 and 4.3 (running window). With keyed
noise the fixed point is the sequential sample at any temperature: every choice is
argmax(log p + g) with the noise g of its own position, and a choice stands when all before it do.

Guesses need no store of their own: they stand in `rows.tokens` behind the committed ones.
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

# Random tokens drawn for a row; a longer answer starts from the same ones again.
STARTS = 64


@dataclass
class JacobiState(State):
    """prompt: [B], tokens of each prompt."""

    prompt: Tensor


class JacobiSampler(Sampler):
    """block_size: n, tokens of a block. running: the block moves on with every committed token.

    Without `running` a block is decoded to its fixed point before the next one is begun.
    """

    rules = ("coupled",)  # without a drafter there is no law to compare with

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
        """A pass may look ahead by a block, and one token of the target's own."""
        return (params.block_size or self.block_size) + 2

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """Prefill the target; every place behind the prompt starts as a token of the prompt."""
        self.prefill(rows, "target", self.cached_target(rows))
        rows.state = JacobiState(prompt=rows.lengths)
        rows.tokens = start_guesses(rows)

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One Jacobi iteration (Eq. 3); the leading guesses that stand are emitted."""
        width = self.width(rows, params)
        guess = guesses(rows, int(width.max()))
        logits = self.target_pass(rows, guess, params).logits
        choice = choose(logits, self.noise(rows, logits.shape[1], params))
        accepted, _ = verify.coupled(guess, choice)
        # A row whose block ends earlier than another's looks no further than alone.
        emitted = accepted.minimum(width) + 1
        return behind(rows, choice, width.maximum(emitted)), emitted

    def width(self, rows: Rows, params: SamplingParams) -> Tensor:
        """How many tokens are guessed: [B]."""
        n = params.block_size or self.block_size
        if self.running:
            return torch.full_like(rows.lengths, n)
        return n - (rows.lengths - rows.state.prompt) % n


def guesses(rows: Rows, count: int, first: int = 0) -> Tensor:
    """What stands at `count` places from the first one behind the committed tokens on."""
    places = rows.lengths[:, None] + first + torch.arange(count, device=rows.tokens.device)
    return rows.tokens.gather(1, places)


def behind(rows: Rows, choice: Tensor, count: Tensor) -> Tensor:
    """The first count [B] of choice [B, m], then the old guesses: what a pass leaves behind."""
    old = guesses(rows, choice.shape[1])
    new = torch.arange(choice.shape[1], device=old.device) < count[:, None]
    return torch.where(new, choice, old)


def start_guesses(rows: Rows) -> Tensor:
    """`rows.tokens` with random tokens of its own prompt behind each prompt: [B, capacity]."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    prompt = places[: int(rows.lengths.max())] < rows.lengths[:, None]
    even = prompt.float()[:, None].expand(-1, STARTS, -1)
    drawn = rows.tokens.gather(1, rows.randomness.categorical(even))
    ahead = places - rows.lengths[:, None]
    return torch.where(ahead < 0, rows.tokens, drawn.gather(1, ahead % STARTS))


def from_export(target, tokenizer, drafter, config: dict) -> JacobiSampler:
    """The sampler of an exported model; config: its `parade` entry."""
    return JacobiSampler(target, tokenizer, **{k: config[k] for k in KNOBS if k in config})

"""Infilling: prompts with holes anywhere, filled in the order of an any-subset model.

In that order (prompt first, then the holes from left to right) filling is appending, so the one
decode loop of `decoding.engine.sampler` serves it: a row's tokens stand in the order, not in place.
"""

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corruption.orders import binary_lattice
from decoding.engine.params import Chunk, SamplingParams
from decoding.engine.randomness import Randomness
from decoding.engine.sampler import Rows, Sampler, State
from models.twostream import is_xlnet

HOLE = re.compile(r"<hole:(\d+)>")


@dataclass(frozen=True)
class Template:
    """Token ids with holes: None where a token is to be filled in."""

    ids: list[int | None]

    @property
    def order(self) -> list[int]:
        """sigma: the prompt's positions, then the holes', each from left to right."""
        return binary_lattice(torch.tensor([t is not None for t in self.ids])).tolist()

    @property
    def prompt(self) -> list[int]:
        """The given tokens, from left to right."""
        return [t for t in self.ids if t is not None]

    @property
    def holes(self) -> int:
        """How many tokens are to be filled in."""
        return self.ids.count(None)

    def filled(self, answer: list[int]) -> list[int]:
        """The text's tokens, its holes filled from left to right, up to the first that is open.

        All of them are final: nothing that comes later stands before them.
        """
        new = iter(answer)
        ids = (next(new, None) if t is None else t for t in self.ids)
        return list(takewhile(lambda t: t is not None, ids))


@dataclass
class InfillState(State):
    """What a batch of templates keeps, beside its tokens in the order of generation.

    order: [B, capacity], the position of each token in the order; entries after a sequence's own
    stand for positions that do not exist. size: [B], N tokens. given: [B], m tokens of prompt.
    cached: [B], tokens of the order that the network's cache holds.
    """

    order: Tensor
    size: Tensor
    given: Tensor
    cached: Tensor


class Infiller(Sampler):
    """A sampler whose prompts have holes: `'a = <hole:3> + 1'`, or token ids with None.

    A result's token_ids are the tokens that were filled in, from left to right; its text is the
    whole text. The holes say how many tokens come: max_new_tokens and end tokens do not count.

    mask_id: the network's mask token, never given and never drawn.
    """

    continues = False
    bench = "decoding.bench.infill"

    def __init__(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, mask_id: int
    ):
        super().__init__(target, tokenizer)
        self.mask_id = mask_id

    def check(self, target: PreTrainedModel) -> None:
        """See `Sampler`; XLNet follows its own masks."""
        if not is_xlnet(target):
            super().check(target)
        elif target.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"transformers' XLNet cannot run in {target.dtype}, as it makes its positional "
                "encoding in float32: load it with dtype=float32"
            )

    def _encode(self, prompt: str | list[int | None], params: SamplingParams) -> Template:
        if params.stop:
            raise ValueError("stop= is not allowed here: a hole's length says where it ends")
        template = Template(self._tokens(prompt) if isinstance(prompt, str) else list(prompt))
        given = template.prompt
        if not template.holes:
            raise ValueError("the prompt has no hole: write <hole:12> where 12 tokens are to come")
        if self.mask_id in given:
            raise ValueError(
                f"the prompt contains the mask token ({self.mask_id}): write <hole:1> in its place"
            )
        bad = [t for t in given if not 0 <= t < self.vocabulary]
        if bad:
            raise ValueError(
                f"prompt token {bad[0]} is outside the model's vocabulary of {self.vocabulary}"
            )
        context = getattr(self.target.config, "max_position_embeddings", None)
        if context is not None and 0 < context < len(template.ids):  # XLNet says -1: no limit
            raise ValueError(
                f"the prompt has {len(given)} tokens and its holes {template.holes}, together more "
                f"than the model's context of {context}: shorten one of them"
            )
        return template

    def _tokens(self, text: str) -> list[int | None]:
        """Token ids of a text, None in its holes; each piece between holes is cut by itself."""
        ids: list[int | None] = []
        for i, piece in enumerate(HOLE.split(text)):
            if i % 2 == 0:
                ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            elif int(piece) == 0:
                raise ValueError("<hole:0> is not allowed: a hole has at least 1 token")
            else:
                ids += [None] * int(piece)
        return ids

    def _rows(
        self, prompts: list[Template], params: SamplingParams, randomness: Randomness
    ) -> Rows:
        """The prompts' given tokens, and their orders as `InfillState`."""
        sizes = [len(t.ids) for t in prompts]
        capacity, device = max(sizes) + self.margin(params), self.target.device
        rows = Rows([t.prompt for t in prompts], capacity, randomness, device)
        order = torch.arange(capacity).repeat(len(prompts), 1)
        for b, template in enumerate(prompts):
            order[b, : sizes[b]] = torch.tensor(template.order)
        rows.state = InfillState(
            order=order.to(device),
            size=torch.tensor(sizes, device=device),
            given=rows.lengths,
            cached=torch.zeros_like(rows.lengths),
        )
        return rows

    def _commit(
        self, row: int, answer: Any, new: list[int], params: SamplingParams, text: bool
    ) -> Chunk | None:
        """See `Sampler`: a chunk is the text up to the first place that is still open."""
        new = new[: answer.prompt.holes - len(answer.token_ids)]
        answer.token_ids += new
        answer.stats.emitted.append(len(new))
        reason = "length" if len(answer.token_ids) == answer.prompt.holes else None
        if reason is None and not text:
            return None
        shown = self._decode(answer.prompt.filled(answer.token_ids))
        return self._chunk(row, answer, shown, reason, params)

"""Infilling: prompts with holes anywhere, filled in the order of an any-subset model.

In that order (the prompt, then the holes from left to right) filling is appending, so the ordinary
decode loop does it: tokens are kept in the order of generation, not in that of the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corruption.orders import binary_lattice
from decoding.engine.answer import Answer
from decoding.engine.batch import Batch, State
from decoding.engine.params import LONGEST_ANSWER, Chunk, SamplingParams
from decoding.engine.randomness import Randomness
from decoding.engine.sampler import Sampler
from decoding.engine.vocabulary import check_known
from models.twostream import is_xlnet

HOLE = re.compile(r"<hole:(\d+)>")


@dataclass(frozen=True)
class Template:
    """A prompt with holes: token ids in the order of the text, None where one is to be filled in.

    >>> Template([None, 7, None, 8]).filled([5, 6])
    [5, 7, 6, 8]
    """

    ids: list[int | None]

    def __len__(self) -> int:
        """Return the number of given tokens."""
        return len(self.ids) - self.holes

    @property
    def order(self) -> list[int]:
        """Return the order sigma: the prompt's positions, then the holes', from left to right."""
        return binary_lattice(torch.tensor([t is not None for t in self.ids])).tolist()

    @property
    def prompt(self) -> list[int]:
        """Return the given tokens, from left to right."""
        return [t for t in self.ids if t is not None]

    @property
    def before(self) -> list[int]:
        """Return the tokens before the first hole."""
        return self.filled([])

    @property
    def holes(self) -> int:
        """Return the number of tokens to fill in."""
        return self.ids.count(None)

    def filled(self, answer: list[int]) -> list[int]:
        """Return the text's tokens up to the first hole that a partial answer leaves open."""
        new = iter(answer)
        ids = (next(new, -1) if t is None else t for t in self.ids)
        return list(takewhile(lambda t: t >= 0, ids))


@dataclass
class InfillState(State):
    """The state of a batch of templates, with tokens in the order of generation."""

    # The text position of each index of the order, int64 [B, capacity]. Entries after a sequence's
    # own N are positions that do not exist.
    order: Tensor
    size: Tensor  # N, tokens of each text, [B]
    given: Tensor  # m, tokens of each prompt, [B]
    cached: Tensor  # tokens at the start of each order whose content is in the cache, [B]


class Infiller(Sampler):
    """A sampler whose prompts have holes: `'a = <hole:3> + 1'`, or token ids with None.

    A result's token_ids are the tokens that were filled in, from left to right; its text is the
    whole text. The holes fix the number of tokens: max_new_tokens and end tokens have no effect.

    Args:
        target, tokenizer: An any-subset model (`models.twostream`) and its own.
        mask_id: The network's mask token; no prompt may contain it, and it is never drawn.
    """

    starts_alone = True  # its pass brings the prompt, and has no drafts to verify yet
    continues = False
    predicts_next = False
    bench = "decoding.bench.infill"

    def __init__(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, mask_id: int
    ):
        super().__init__(target, tokenizer)
        check_known(self.vocabulary, mask_id=mask_id)
        self.mask_id = mask_id

    def check(self, target: PreTrainedModel) -> None:
        if not is_xlnet(target):  # `CachedXLNet` attends by any mask
            super().check(target)
        elif target.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"transformers' XLNet cannot run in {target.dtype}, as it makes its positional "
                "encoding in float32: load it with dtype=float32"
            )

    def encode(self, prompt: str | Sequence[int | None], params: SamplingParams) -> Template:
        if params.stop:
            raise ValueError("stop= is not allowed here: a hole's length says where it ends")
        template = Template(self._tokens(prompt) if isinstance(prompt, str) else list(prompt))
        given = template.prompt
        if not template.holes:
            raise ValueError(
                "the prompt has no hole: write <hole:12> where 12 tokens are to be filled in"
            )
        if self.mask_id in given:
            raise ValueError(
                f"the prompt contains the mask token ({self.mask_id}): write <hole:1> instead"
            )
        bad = [t for t in given if not 0 <= t < self.vocabulary]
        if bad:
            raise ValueError(
                f"prompt token {bad[0]} is outside the model's vocabulary of {self.vocabulary}"
            )
        if self.context is not None and self.context < len(template.ids):
            raise ValueError(
                f"the prompt has {len(given)} tokens and its holes {template.holes}, together more "
                f"than the model's context of {self.context}: shorten one of them"
            )
        return template

    def between(self, before: str | list[int], after: str, holes: int) -> list[int | None]:
        """Make a prompt with one hole between two texts."""
        given = self._piece(before) if isinstance(before, str) else before
        return [*given, *[None] * holes, *self._piece(after)]

    def _piece(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokens(self, text: str) -> list[int | None]:
        """Return a text's token ids, None in its holes; pieces are tokenized one by one."""
        ids: list[int | None] = []
        for i, piece in enumerate(HOLE.split(text)):
            if i % 2 == 0:
                ids += self._piece(piece)
            elif len(piece) > 7 or not 0 < int(piece) <= LONGEST_ANSWER - len(ids):
                raise ValueError(
                    f"<hole:{piece[:20]}> is not allowed: a hole has at least 1 token, and a text "
                    f"at most {LONGEST_ANSWER}"
                )
            else:
                ids += [None] * int(piece)
        return ids

    def capacity(self, prompts: list[Template], params: SamplingParams) -> int:
        return max(len(t.ids) for t in prompts) + self.margin(params)

    def new_batch(
        self,
        prompts: list[Template],
        params: SamplingParams,
        randomness: Randomness,
        capacity: int,
    ) -> Batch:
        """Make a batch that holds the given tokens alone, with the orders in its `InfillState`."""
        sizes, device = [len(t.ids) for t in prompts], self.device
        batch = Batch([t.prompt for t in prompts], capacity, randomness, device)
        order = torch.arange(capacity).repeat(len(prompts), 1)
        for b, template in enumerate(prompts):
            order[b, : sizes[b]] = torch.tensor(template.order)
        batch.state = InfillState(
            order=order.to(device),
            size=torch.tensor(sizes, device=device),
            given=batch.lengths,
            cached=torch.zeros_like(batch.lengths),
        )
        return batch

    def commit(self, answer: Answer, new: list[int], text: bool) -> Chunk | None:
        """Add a cycle's tokens to an answer; its chunk is new text before the first open hole."""
        new = new[: answer.prompt.holes - len(answer.token_ids)]
        answer.token_ids += new
        answer.stats.emitted.append(len(new))
        reason = "length" if len(answer.token_ids) == answer.prompt.holes else None
        if reason is None and not text:
            return None
        filled = answer.prompt.filled(answer.token_ids)
        answer.text.extend(filled[len(answer.text) :])
        return answer.chunk(answer.text.text, reason)

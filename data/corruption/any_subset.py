"""Masking for any-subset models: which tokens of a row are hidden, and their generation order."""

from typing import Literal

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from data.arguments import Count, Share, Whole
from data.corruption.orders import any_permutation, binary_lattice, order_index, two_streams
from data.corruption.schedules import golden, widening
from data.text.tokenizer import mask_token_id


class AnySubset:
    """Random masking of a fraction of a row's trained tokens (AS-ARM, arXiv 2504.20456).

    The fraction follows the schedule and the curriculum of appendices E.2 and E.3.

    Args:
        rates: Lowest and highest masked fraction, in (0, 1]; the fraction is uniform between them.
        tokenizer: Has a mask token.
        start: Masked fraction at the beginning of the curriculum.
        curriculum: Training steps over which `start` widens linearly to `rates`; 0 for none.
        batch_size: Samples per training step.
        order: 'lattice' (Eq. 4), or 'any' for the ablation of Figure 3.
    """

    def __init__(
        self,
        rates: tuple[Share, Share],
        tokenizer: PreTrainedTokenizerBase,
        start: Share = 0.15,
        curriculum: Whole = 0,
        batch_size: Count = 1,
        order: Literal["lattice", "any"] = "lattice",
    ):
        if len(rates) != 2 or not 0 < rates[0] <= rates[1] <= 1 or not 0 < start <= 1:
            raise ValueError(
                f"rates={list(rates)} and start={start} are not allowed: rates are two masked "
                "fractions in (0, 1], the lower one first, and start is one"
            )
        self.rates, self.start, self.order = (rates[0], rates[1]), start, order
        self.curriculum = curriculum * batch_size
        self.mask_id = mask_token_id(tokenizer)

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int
    ) -> dict[str, Tensor]:
        """Return training sample `number`, which sets the curriculum, made from a packed row.

        The whole row [N] is one sequence, as published: end-of-text tokens separate its documents.

        Returns:
            input_ids, position_ids, document, index, block: [2N] each, the layout of
            `data.corruption.orders.two_streams`; target: [N]; masked: bool [N], True where the loss
            counts.
        """
        ids, present = row["input_ids"], row["document"] >= 0
        positions = (row["trained"].bool() & present).nonzero().flatten()
        hidden = self.hidden_count(number, len(positions))
        chosen = positions[torch.randperm(len(positions), generator=generator)[:hidden]]
        masked = torch.zeros_like(present)
        masked[chosen] = True
        if self.order == "lattice":
            sigma = binary_lattice(~masked)
        else:
            sigma = any_permutation(~masked, generator)
        index = order_index(sigma, (~masked).sum(-1))
        streams = two_streams(ids, index, present, self.mask_id)
        return {**streams, "target": ids, "masked": masked}

    def hidden_count(self, number: int, candidates: int) -> int:
        """Return how many of `candidates` tokens sample `number` masks.

        It is at least 1 of any, and a fraction below 1 never rounds to all: XLNet needs a prompt.
        """
        done = min(1.0, number / self.curriculum) if self.curriculum else 1.0
        low, high = widening(self.start, self.rates, done)
        rate = low + (high - low) * golden(number)
        most = candidates - 1 if rate < 1 and candidates > 1 else candidates
        return min(most, max(1, round(rate * candidates)))

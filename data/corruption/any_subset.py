"""Corruption of any-subset models: what is hidden of a row, and in which order it comes."""

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from data.corruption.orders import any_permutation, binary_lattice, order_index, two_streams
from data.corruption.schedules import golden, widening
from data.text.tokenizer import mask_token_id


class AnySubset:
    """Hides a share of a row's trained tokens (arXiv 2504.20456, appendices E.2 and E.3).

    rates: the hidden share is uniform between these two. start: the share that the curriculum
    begins with; it widens to `rates` over `curriculum` steps of `batch_size` samples (0: none).
    order: 'lattice' (Eq. 4), or 'any' for the ablation. tokenizer: with a mask token.
    """

    def __init__(
        self,
        rates: tuple[float, float],
        tokenizer: PreTrainedTokenizerBase,
        start: float = 0.15,
        curriculum: int = 0,
        batch_size: int = 1,
        order: str = "lattice",
    ):
        low, high = rates
        if not 0 < low <= high <= 1 or not 0 < start <= 1:
            raise ValueError(
                f"rates={list(rates)} and start={start} are not allowed: they are shares of "
                "hidden tokens in (0, 1], the lower rate first"
            )
        if order not in ("lattice", "any"):
            raise ValueError(f"unknown order {order!r}. Choose from ['any', 'lattice']")
        self.rates, self.start, self.order = (low, high), start, order
        self.curriculum = curriculum * batch_size
        self.mask_id = mask_token_id(tokenizer)

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int
    ) -> dict[str, Tensor]:
        """A row of `data.rows.packing.PackedRows` ([N] each) -> sample `number` of the run.

        The whole row is one sequence: documents follow each other behind their end tokens, as
        published. input_ids, position_ids, document, index, block: [2N], see
        `data.corruption.orders.two_streams`. target [N]; masked: bool [N], where the loss stands.
        """
        ids, present = row["input_ids"], row["document"] >= 0
        places = (row["trained"].bool() & present).nonzero().flatten()
        hidden = self.hidden_count(number, len(places))
        chosen = places[torch.randperm(len(places), generator=generator)[:hidden]]
        masked = torch.zeros_like(present)
        masked[chosen] = True
        if self.order == "lattice":
            sigma = binary_lattice(~masked)
        else:
            sigma = any_permutation(~masked, generator)
        index = order_index(sigma, (~masked).sum(-1))
        streams = two_streams(ids, index, present, self.mask_id)
        return {**streams, "target": ids, "masked": masked}

    def hidden_count(self, number: int, places: int) -> int:
        """How many of `places` tokens sample `number` hides: at least 1 where there are any."""
        done = min(1.0, number / self.curriculum) if self.curriculum else 1.0
        low, high = widening(self.start, self.rates, done)
        rate = low + (high - low) * golden(number)
        return min(places, max(1, round(rate * places)))

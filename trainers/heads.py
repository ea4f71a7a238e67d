"""Auxiliary heads: small networks that are trained together with a drafter and add to its logits.

They have their own learning rate (`optimization.aux_lr`) and their own file in an export. A
strategy that shards shards them too, so `added_logits` must call the module, as here. To add one,
write a class with the interface of `AuxiliaryHead` and add it to `auxiliary_heads`.
"""

import warnings
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor, device, nn
from transformers import PreTrainedModel

from decoding.drafting import markov
from models.markov import MarkovHead
from trainers.draft_vocabulary import PREVIOUS


class AuxiliaryHead(Protocol):
    """A head that is trained together with a drafter; an `nn.Module`.

    Attributes:
        key: Its key in an export's `parade` entry, and its name among the module's parameters.
        option: The recipe's key that asks for it.
        argument: The argument of the sampler that takes it.
        file: Its file in an export.
    """

    key: ClassVar[str]
    option: ClassVar[str]
    argument: ClassVar[str]
    file: ClassVar[str]

    def added_logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits [B, A, K, V] to add to the drafter's.

        The batch is of packed draft blocks, `in_draft_vocabulary` (`trainers.draft_vocabulary`).
        """

    def stored(self) -> bytes:
        """Return the bytes of its file."""

    def read(self, folder: Path, device: device) -> nn.Module:
        """Load the head of an export, as decoding reads it."""


class MarkovAuxiliary(MarkovHead, AuxiliaryHead):
    """A Markov head (`models.markov`), trained on the answers' own tokens."""

    key, option, argument, file = "markov_head", "module.markov_rank", "markov", markov.FILE

    def added_logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self(batch[PREVIOUS])

    def stored(self) -> bytes:
        return markov.stored(self)

    def read(self, folder: Path, device: device) -> nn.Module:
        return markov.read(folder / self.file).to(device)


def auxiliary_heads(
    network: PreTrainedModel, draft_ids: Tensor | None, markov_rank: int | None
) -> tuple[AuxiliaryHead, ...]:
    """Build the heads of a drafter; warn if it had one before, which is dropped.

    `draft_ids` [n] are the tokens of its logits, None: all; `markov_rank=None` means no head.
    """
    if (getattr(network.config, "parade", None) or {}).get(MarkovAuxiliary.key):
        warnings.warn(
            "the drafter to start from has a Markov head, which is left behind: one of "
            f"{MarkovAuxiliary.option} begins anew",
            stacklevel=3,
        )
    if markov_rank is None:
        return ()
    tokens = getattr(network.config, "vocab_size", None)
    if tokens is None:
        raise ValueError(
            f"{MarkovAuxiliary.option}={markov_rank} is not allowed: the drafter's config has no "
            "vocab_size"
        )
    drafted = tokens if draft_ids is None else len(draft_ids)
    return (MarkovAuxiliary(tokens, drafted, markov_rank),)

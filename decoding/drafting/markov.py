"""Markov heads in decoding: a drafter's head (`models.markov`) over the target's tokens.

Chains are drafted token by token from the conditional distributions and verified with them; in a
draft tree a node's parent is known, so they rank its children.
"""

from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from decoding.drafting.tree import Pairs
from decoding.engine import tensor_file
from decoding.engine.vocabulary import check_vocabulary
from models.markov import MarkovHead

FILE = "markov_head.tensors"  # in an export's folder
INSTEAD = "decode without it, sampler=[markov_head=false], or train one, module.markov_rank=64"


class MarkovScores:
    """A Markov head's additions to a drafter's logits, by the target's token ids.

    Args:
        head: The head, of n drafted tokens.
        vocabulary: V, number of the target's tokens.
        draft_ids: [n], the target's token of each drafted one; None: token i is the target's i, and
            either side may have padding that the other lacks.
    """

    def __init__(
        self, head: MarkovHead, vocabulary: int, draft_ids: Tensor | None, device: torch.device
    ):
        self.head, n = head.to(device), len(head.markov_w2.weight)
        self._tokens = len(head.markov_w1.weight)  # none is generated after these but padding
        check_vocabulary(self._tokens, vocabulary)
        if draft_ids is None:
            check_vocabulary(n, vocabulary)
            draft_ids = torch.arange(min(n, vocabulary), device=device)
        elif len(draft_ids) != n:
            raise ValueError(
                f"the Markov head is of {n} tokens and the drafter of {len(draft_ids)}: they are "
                "not of one export"
            )
        self.ids, self._vocabulary = draft_ids, vocabulary

    def following(self, tokens: Tensor) -> Tensor:
        """Return the additions to the logits after each token: [...] -> [..., V]."""
        scores = self.head(tokens.clamp_max(self._tokens - 1))[..., : len(self.ids)]
        everywhere = scores.new_zeros(*tokens.shape, self._vocabulary)
        return everywhere.index_copy_(-1, self.ids, scores)

    @cached_property
    def _before(self) -> Tensor:
        # Picked at the first tree: where a sampler is made the head may still be in shards.
        return self.head.markov_w1.weight[self.ids]

    def pairs(self, temperature: float) -> Pairs:
        """Return the additions over the head's own tokens, for logits divided by a temperature."""
        after = self.head.markov_w2.weight[: len(self.ids)]
        return Pairs(self._before, after, 1 / (temperature or 1))


def stored(head: MarkovHead) -> bytes:
    """Return the bytes of a Markov head's file."""
    tensors = head.state_dict().items()
    return save({name: x.detach().cpu().contiguous() for name, x in tensors})


def read(file: Path) -> MarkovHead:
    """Read an export's Markov head; ValueError where the file is missing or damaged."""
    with tensor_file.opened(file, "the Markov head", INSTEAD) as tensors:
        known = {
            name: tensors.get_tensor(name) for name in ("markov_w1.weight", "markov_w2.weight")
        }
        (before, rank), (after, _) = (x.shape for x in known.values())
        with torch.device("meta"):  # without drawing numbers
            head = MarkovHead(before, after, rank)
        head.load_state_dict(known, assign=True)
        tensor_file.finite(*known.values())
    return head.eval().requires_grad_(False)

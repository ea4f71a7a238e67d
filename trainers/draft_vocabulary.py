"""Batches in a drafter's vocabulary, which may be a part of its target's."""

import torch
from torch import Tensor

PREVIOUS = "previous"  # batch key: the target's token before each drafted one


def in_draft_vocabulary(batch: dict[str, Tensor], ids: Tensor | None) -> dict[str, Tensor]:
    """Map the targets of packed draft blocks to indices of the drafter's logits.

    A token that the drafter lacks becomes 0 and leaves `masked` [B, A, K], so it has no weight; its
    probability in stored distributions becomes 0. PREVIOUS [B, A, K] is added.

    Args:
        batch: Packed draft blocks, `target` [B, A, K] in the target's token ids.
        ids: [V], the target's tokens that the drafter has; None: all of them.
    """
    batch = {**batch, PREVIOUS: _previous(batch)}
    if ids is None:
        return batch
    target, known = _mapped(batch["target"], ids)
    mapped = {**batch, "target": target, "masked": batch["masked"] & known}
    if "teacher_ids" in batch:
        teacher, known = _mapped(batch["teacher_ids"], ids)
        mapped |= {"teacher_ids": teacher, "teacher_probs": batch["teacher_probs"] * known}
    return mapped


def _mapped(tokens: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens, and which of them the drafter has (others become 0)."""
    ordered, row = ids.to(tokens.device).sort()
    at = torch.searchsorted(ordered, tokens).clamp_max(len(ordered) - 1)
    known = ordered[at] == tokens
    return row[at] * known, known


def _previous(batch: dict[str, Tensor]) -> Tensor:
    """Return the token before each drafted one [B, A, K]; before the first, the last committed."""
    last = batch["input_ids"].gather(1, (batch["start"] - 1).clamp_min(0))
    return torch.cat([last[..., None], batch["target"][..., :-1]], -1)

"""Warping: the transformations from a model's logits to the distribution that is sampled.

They apply in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p.
Target and drafter use the same function, so a draft is verified with the q that it was drawn from.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoding.engine.params import SamplingParams

COLD = 1e-6  # temperatures below may make a quotient that float32 does not hold


def warp(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Warp logits; at temperature 0 only by the penalty, as the others do not change the argmax.

    Args:
        logits: [B, n, V].
        seen: The tokens that the repetition penalty applies to, bool [B, n, V] or broadcastable;
            None without a penalty.

    Returns:
        Warped logits [B, n, V], at least float32, -inf for excluded tokens; ValueError for NaN.
    """
    given, logits = logits.dtype, logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.amax(-1).isnan().any():
        raise ValueError(
            "the model gives logits that are not numbers (NaN): its weights are damaged, or its "
            f"values overflow in {given}. Load other weights, or give dtype=float32"
        )
    # Of an integer that int64 does not hold torch makes no number.
    temperature, penalty = float(params.temperature), float(params.repetition_penalty)
    if penalty != 1:
        weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, weaker, logits)
    if temperature == 0:
        return logits
    if temperature < COLD:  # the largest quotient is 0, and so not infinite
        logits = logits - logits.amax(-1, keepdim=True)
    if temperature != 1:
        logits = logits / temperature
    warpers = []
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if not warpers:
        return logits
    flat = logits.flatten(0, -2)
    for warper in warpers:
        flat = warper(None, flat)
    return flat.view_as(logits)


def fit_vocabulary(
    logits: Tensor, vocabulary: int, excluded: Sequence[int], ids: Tensor | None = None
) -> Tensor:
    """Map a drafter's logits [B, n, Vd] to the target's vocabulary [B, n, V].

    Tokens that only one side has (padding: 151,936 against 152,064 in Qwen2.5) and the excluded
    ones (mask, separator) get -inf; the softmax that follows renormalises, so the q that is
    verified is the q that was drawn from. `ids` [Vd] are the target's tokens of the logits
    (`decoding.engine.vocabulary`); None: token i is the target's i.
    """
    if ids is not None:
        over = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
        logits = over.index_copy(-1, ids.to(logits.device), logits)
    logits = logits[..., :vocabulary]
    if excluded := [t for t in excluded if t < logits.shape[-1]]:
        logits = logits.index_fill(-1, torch.tensor(excluded, device=logits.device), float("-inf"))
    if missing := vocabulary - logits.shape[-1]:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits


def seen_tokens(
    tokens: Tensor, lengths: Tensor, draft: Tensor, vocabulary: int, before: Tensor | None = None
) -> Tensor:
    """Return the tokens that precede each drafted position and the next one, bool [B, k + 1, V].

    Args:
        tokens, lengths: int64 [B, L], of which the first `lengths` [B] are committed.
        draft: Drafted tokens, int64 [B, k].
        before: Which drafted tokens precede each position, 0 or 1, [B, k + 1, k]; None: a chain.
    """
    counts = torch.zeros(len(tokens), vocabulary, device=tokens.device)
    committed = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    counts.scatter_add_(1, tokens.clamp_max(vocabulary - 1), committed.to(counts.dtype))
    if before is None:
        before = counts.new_ones(draft.shape[1] + 1, draft.shape[1]).tril(-1)
    one_hot = torch.nn.functional.one_hot(draft, vocabulary).to(counts.dtype)
    return (counts[:, None] + before.to(counts.dtype) @ one_hot) > 0

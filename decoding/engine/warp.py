"""From logits to the distribution that is sampled: the order is that of transformers.

repetition penalty, temperature, top-k, top-p, min-p. Target and drafter go through the same
function, so the q that a draft is verified with is the tensor that it was drawn from.
"""

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoding.engine.params import SamplingParams


def warp(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits [B, n, V] -> warped logits [B, n, V], at least float32, -inf where excluded.

    seen: bool [B, n, V] (or broadcastable), the tokens that the repetition penalty counts.
    At temperature 0 only the penalty applies: argmax ignores the rest.
    """
    given, logits = logits.dtype, logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.amax(-1).isnan().any():
        raise ValueError(
            "the model gives logits that are not numbers (NaN): its weights are damaged, or its "
            f"values overflow in {given}. Load other weights, or give dtype=float32"
        )
    if params.repetition_penalty != 1.0:
        weaker = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits = torch.where(seen, weaker, logits)
    if params.temperature == 0:
        return logits
    if params.temperature != 1:
        logits = logits / params.temperature
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


def fit_vocabulary(logits: Tensor, vocabulary: int, excluded: tuple[int, ...]) -> Tensor:
    """A drafter's logits [B, n, Vd] over the target's vocabulary: [B, n, vocabulary].

    Rows that only one side has (padding: 151,936 against 152,064 in Qwen2.5) and the excluded
    tokens (mask, separator) get -inf here; the softmax that follows renormalises.
    """
    logits = logits[..., :vocabulary]
    if excluded := [t for t in excluded if t < logits.shape[-1]]:
        logits = logits.index_fill(-1, torch.tensor(excluded, device=logits.device), float("-inf"))
    if missing := vocabulary - logits.shape[-1]:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits


def seen_tokens(
    tokens: Tensor, lengths: Tensor, draft: Tensor, vocabulary: int, before: Tensor | None = None
) -> Tensor:
    """Which tokens stand before each drafted position: bool [B, k+1, vocabulary].

    tokens [B, L] with the first lengths [B] committed; draft [B, k]. Entry i counts the committed
    tokens and the drafted ones before[:, i] ([B, k+1, k]; those in front of it if None).
    """
    counts = torch.zeros(len(tokens), vocabulary, device=tokens.device)
    committed = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    counts.scatter_add_(1, tokens.clamp_max(vocabulary - 1), committed.to(counts.dtype))
    if before is None:
        before = counts.new_ones(draft.shape[1] + 1, draft.shape[1]).tril(-1)
    one_hot = torch.nn.functional.one_hot(draft, vocabulary).to(counts.dtype)
    return (counts[:, None] + before.to(counts.dtype) @ one_hot) > 0

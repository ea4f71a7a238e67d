"""Warping: the transformations from a model's logits to the distribution that is sampled.

They apply in the order of transformers: bias, repetition penalty, temperature, top-k, top-p, min-p.
Penalties of an answer's own tokens, which transformers has not, follow the repetition penalty.
Target and drafter use the same function, so a draft is verified with the q that it was drawn from.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoding.engine.params import SamplingParams

COLD = 1e-6  # temperatures below may make a quotient that float32 does not hold


class Preceding(NamedTuple):
    """The tokens before positions, float32 [B, n, V] or broadcastable; None where no one asks.

    Attributes:
        text: How often each token is in the prompt and the answer so far.
        answer: How often it is in the answer alone.
    """

    text: Tensor | None = None
    answer: Tensor | None = None


NOTHING = Preceding()


def warp(logits: Tensor, params: SamplingParams, preceding: Preceding = NOTHING) -> Tensor:
    """Warp logits; at temperature 0 only by bias and penalties, as the rest keeps the argmax.

    Args:
        logits: [B, n, V].
        preceding: The tokens that penalties apply to (`preceding`).

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
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias)
        index = torch.tensor(tokens, device=logits.device)
        logits = logits.index_add(
            -1, index, logits.new_tensor(biases).expand(*logits.shape[:-1], -1)
        )
    if penalty != 1:
        assert preceding.text is not None
        weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(preceding.text > 0, weaker, logits)
    if params.presence_penalty or params.frequency_penalty:
        counts = preceding.answer
        assert counts is not None
        often, once = params.frequency_penalty, params.presence_penalty
        logits = logits - often * counts - once * (counts > 0)
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


def preceding(
    params: SamplingParams,
    tokens: Tensor,
    starts: Tensor,
    lengths: Tensor,
    draft: Tensor,
    vocabulary: int,
    before: Callable[[], Tensor] | None = None,
) -> Preceding:
    """Return the tokens before each drafted position and the next one that penalties apply to.

    Args:
        tokens, lengths: int64 [B, L], of which the first `lengths` [B] are committed.
        starts: Tokens of each prompt, [B].
        draft: Drafted tokens, int64 [B, k].
        before: Returns which drafted tokens precede each position, 0 or 1, [B, k + 1, k]; None: a
            chain.
    """
    of_text = params.repetition_penalty != 1
    of_answer = bool(params.presence_penalty or params.frequency_penalty)
    if not of_text and not of_answer:
        return Preceding()
    k = draft.shape[1]
    which = draft.new_ones(k + 1, k).tril(-1) if before is None else before()
    drafted = which.float() @ torch.nn.functional.one_hot(draft, vocabulary).float()

    def counts(first: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        committed = (at >= first[:, None]) & (at < lengths[:, None])
        found = drafted.new_zeros(len(tokens), vocabulary)
        found.scatter_add_(1, tokens.clamp_max(vocabulary - 1), committed.float())
        return found[:, None] + drafted

    text = counts(torch.zeros_like(starts)) if of_text else None
    return Preceding(text, counts(starts) if of_answer else None)

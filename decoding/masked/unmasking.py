"""One step of masked diffusion decoding: which masked tokens of a block are decided, and how.

Pure functions of a block's logits. Vanilla decoding takes one step per network pass; speculative
decoding takes it on the logits of each state that it evaluated. The rule is that of the public
LLaDA sampler (arXiv 2502.09992, Algorithms 4 and 5) and, with a threshold, of Fast-dLLM (arXiv
2505.22618, Algorithm 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.engine.params import SamplingParams
from decoding.engine.warp import warp


@dataclass(frozen=True)
class Unmasking:
    """The unmasking rule: which masked positions a step decides."""

    tokens_per_step: int = 1  # S: the first S positions of the order are decided
    # If given, instead of S: all positions whose confidence reaches this probability, and always
    # the most confident one.
    threshold: float | None = None
    order: str = "confidence"  # the most confident position first; or 'random'

    def __post_init__(self):
        if self.threshold is not None and (self.order, self.tokens_per_step) != ("confidence", 1):
            raise ValueError(
                f"threshold={self.threshold} determines which tokens a step unmasks: leave out "
                f"order={self.order} and tokens_per_step={self.tokens_per_step}"
            )

    def noisy(self, params: SamplingParams) -> bool:
        """Return whether a step draws noise."""
        return params.temperature > 0 or self.order == "random"


def judge(
    logits: Tensor, noise: Tensor | None, mask_id: int, rule: Unmasking, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Return scores [B, L, V], whose argmax is each position's choice, and confidence [B, L].

    Confidence is the chosen token's probability before temperature and truncation, among all tokens
    including the mask; in a random order it is the position's own noise. Gumbel noise [B, L, V + 1]
    is that of each token and, last, of the position; None unless `rule.noisy(params)`. The mask
    token is never chosen.
    """
    V = logits.shape[-1]
    scores = warp(
        logits.index_fill(-1, torch.tensor(mask_id, device=logits.device), float("-inf")), params
    )
    if params.temperature > 0:
        assert noise is not None
        scores = scores + noise[..., :V]
    if rule.order == "random":
        assert noise is not None
        return scores, noise[..., V]
    p = logits.to(scores.dtype).softmax(-1)
    return scores, p.gather(-1, scores.max(-1, keepdim=True).indices)[..., 0]


def position_order(confidence: Tensor, masked: Tensor) -> Tensor:
    """Sort the positions of a block: the most confident masked one first, unmasked ones last.

    >>> masked = torch.tensor([[True, False, True]])
    >>> position_order(torch.tensor([[0.2, 0.9, 0.5]]), masked).tolist()
    [[2, 0, 1]]
    """
    confidence = confidence.masked_fill(~masked, float("-inf"))
    return confidence.argsort(dim=-1, descending=True, stable=True)


def next_state(
    state: Tensor, scores: Tensor, confidence: Tensor, mask_id: int, rule: Unmasking
) -> Tensor:
    """Return the state [B, L] of a block after one step (Spiffy, Algorithm 1, steps 2 to 4).

    `state` [B, L] has `mask_id` where undecided; scores and confidence are those of `judge`.
    """
    masked = state == mask_id
    rank = position_order(confidence, masked).argsort(-1)
    if rule.threshold is None:
        chosen = rank < rule.tokens_per_step
    else:
        chosen = (rank == 0) | (confidence >= rule.threshold)
    return torch.where(chosen & masked, scores.max(-1).indices, state)

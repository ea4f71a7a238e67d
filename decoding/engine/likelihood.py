"""How probable a target holds each token of a text, given those before it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from decoding.engine.cache import CachedNetwork
from models.masks import causal
from models.placement import input_device


class TokenScore(NamedTuple):
    """A token's log probability, in nats at temperature 1, before any cut or penalty.

    Attributes:
        log_prob: Its own.
        best: (token, log probability) of the most probable tokens at its place, best first.
    """

    log_prob: float
    best: list[tuple[int, float]]


@torch.inference_mode()
def token_scores(
    target: PreTrainedModel,
    token_ids: Sequence[int],
    best: int,
    *,
    chunk: int = 256,
    between: Callable[[], None] = lambda: None,
) -> list[TokenScore]:
    """Score all tokens of a text but the first, which nothing comes before.

    Args:
        target: A causal LM.
        token_ids: Of the text, n of them.
        best: How many of the most probable tokens are told at each place.
        chunk: Tokens of a pass, which bounds the memory of its logits.
        between: Called after each pass.

    Returns:
        n - 1 scores.
    """
    device = input_device(target)
    ids = torch.tensor([[*token_ids]], device=device)
    network = CachedNetwork(target, causal, len(token_ids) + 1)
    positions, scores = torch.arange(len(token_ids) - 1, device=device)[None], []
    for at in positions.split(chunk, 1) if len(token_ids) > 1 else ():
        logits = network(ids[:, at[0]], at, keep=at.shape[1]).logits[0]
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        own = log_probs.gather(1, ids[0, at[0] + 1, None])[:, 0].tolist()
        values, tokens = (x.tolist() for x in log_probs.topk(min(best, log_probs.shape[-1])))
        scores += [TokenScore(p, [*zip(*top)]) for p, *top in zip(own, tokens, values)]
        between()
    return scores

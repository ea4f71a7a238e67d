"""Log probabilities of a text's tokens under a target."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from decoding.engine.recurrent import cached
from models.masks import causal
from models.placement import input_device


class TokenScore(NamedTuple):
    """A token's log probability, in nats at temperature 1, without truncation or penalty.

    `best` has (token, log probability) of the most probable tokens there, best first.
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
    """Score all n tokens of a text but the first: n - 1 scores, with the `best` tokens of each.

    A pass has `chunk` tokens, which bounds the memory of its logits; `between` follows each.
    """
    device = input_device(target)
    ids = torch.tensor([[*token_ids]], device=device)
    network = cached(target, causal, len(token_ids) + 1)
    positions, scores = torch.arange(len(token_ids) - 1, device=device)[None], []
    for at in positions.split(chunk, 1) if len(token_ids) > 1 else ():
        logits = network(ids[:, at[0]], at, keep=at.shape[1]).logits[0]
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        own = log_probs.gather(1, ids[0, at[0] + 1, None])[:, 0].tolist()
        values, tokens = (x.tolist() for x in log_probs.topk(min(best, log_probs.shape[-1])))
        scores += [TokenScore(p, [*zip(*top)]) for p, *top in zip(own, tokens, values)]
        between()
    return scores

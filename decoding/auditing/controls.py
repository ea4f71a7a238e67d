"""Speculative decoding by a right rule and by wrong ones: what an audit must pass, and must find.

Each is a program as `python -m decoding.audit` takes it. The wrong rules are those that public code
has had: they give fluent text, and no test of text finds them.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.auditing.reference import DRAFTER, tiny_model

BLOCK = 2  # tokens drafted a cycle

# (draft token, q, p, randomness) -> whether it is accepted, and the correction's distribution
Rule = Callable[[int, Tensor, Tensor, object], tuple[bool, Tensor]]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution after a rejection, (p - q)+ normalised (Leviathan et al., 2211.17192)."""
    left = (p - q).clamp_min(0)
    return left / left.sum() if left.sum() > 0 else p


def rejection(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """The right rule: accept with min(1, p/q), correct from the residual."""
    return randomness.accept(p[x] / q[x]), residual(p, q)


def correction_from_target(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """Wrong: the correction is drawn from p instead of the residual."""
    return randomness.accept(p[x] / q[x]), p


def other_temperature(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """Wrong: the ratio has another q than the draft was drawn from."""
    flat = q.sqrt() / q.sqrt().sum()
    return randomness.accept(p[x] / flat[x]), residual(p, flat)


def typical(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """Wrong: a draft that is probable enough is accepted (a tolerance, 'typical acceptance')."""
    return bool(p[x] > 0.1) or randomness.accept(p[x] / q[x]), residual(p, q)


def speculate(
    model: PreTrainedModel, prompt: Sequence[int], randomness, rule: Rule, new: int, T: float
) -> list[int]:
    """Decode `new` tokens with drafts of another tiny model, verified by a rule."""
    drafter, answer = _drafter(), []

    def p(network: PreTrainedModel, *more: int) -> Tensor:
        return _next(network, (*prompt, *answer, *more), T)

    while len(answer) < new:
        drafts: list[int] = []
        qs = []
        for _ in range(min(BLOCK, new - len(answer))):
            qs.append(p(drafter, *drafts))
            drafts.append(randomness.categorical(qs[-1]))
        for x, q in zip(drafts, qs):
            accepted, correction = rule(x, q, p(model), randomness)
            answer.append(x if accepted else randomness.categorical(correction))
            if not accepted:
                break
        else:
            if len(answer) < new:
                answer.append(randomness.categorical(p(model)))
    return answer


@cache
def _drafter() -> PreTrainedModel:
    return tiny_model(DRAFTER)


@lru_cache(2**14)  # an enumeration asks for the same prefixes thousands of times
@torch.no_grad()
def _next(network: PreTrainedModel, ids: tuple[int, ...], T: float) -> Tensor:
    """The distribution of the token after ids, float64 [V]."""
    return (network(torch.tensor([ids])).logits[0, -1].double() / T).softmax(-1)


def _program(rule: Rule):
    def program(model, prompt, *, randomness, max_new_tokens, temperature):
        return speculate(model, prompt, randomness, rule, max_new_tokens, temperature)

    program.__doc__ = rule.__doc__
    return program


RIGHT = _program(rejection)
WRONG = {r.__name__: _program(r) for r in (correction_from_target, other_temperature, typical)}

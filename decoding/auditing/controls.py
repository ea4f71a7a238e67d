"""Speculative decoding by a correct rule, which an audit must pass, and by wrong rules to be found.

Each is a program as `python -m decoding.audit` takes it. The wrong rules have occurred in public
code: they give fluent text, so no test that looks at text finds them.
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
    """Return (p - q)+ normalised, to draw from after a rejection (Leviathan et al., 2211.17192)."""
    left = (p - q).clamp_min(0)
    return left / left.sum() if left.sum() > 0 else p


def rejection(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """Apply the correct rule: accept with probability min(1, p/q), correct from the residual."""
    return randomness.accept(p[x] / q[x]), residual(p, q)


def correction_from_target(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """Apply a wrong rule: draw the correction from p instead of the residual."""
    return randomness.accept(p[x] / q[x]), p


def other_temperature(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """Apply a wrong rule: use another q in the ratio than the draft was drawn from."""
    flat = q.sqrt() / q.sqrt().sum()
    return randomness.accept(p[x] / flat[x]), residual(p, flat)


def typical(x: int, q: Tensor, p: Tensor, randomness) -> tuple[bool, Tensor]:
    """Apply a wrong rule: accept any draft that is probable enough ('typical acceptance')."""
    return bool(p[x] > 0.1) or randomness.accept(p[x] / q[x]), residual(p, q)


def speculate(
    model: PreTrainedModel, prompt: Sequence[int], randomness, rule: Rule, new: int, T: float
) -> list[int]:
    """Decode `new` tokens: another tiny model drafts, and a rule verifies."""
    drafter, answer = _drafter(DRAFTER), list[int]()

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


_drafter = cache(tiny_model)


@lru_cache(2**14)  # an enumeration asks for the same prefixes thousands of times
@torch.no_grad()
def _next(network: PreTrainedModel, ids: tuple[int, ...], T: float) -> Tensor:
    """Return the distribution of the token after ids, float64 [V]."""
    return (network(torch.tensor([ids])).logits[0, -1].double() / T).softmax(-1)


def _program(rule: Rule):
    def program(model, prompt, *, randomness, max_new_tokens, temperature):
        return speculate(model, prompt, randomness, rule, max_new_tokens, temperature)

    return program


class Coins:
    """Randomness drawn with a torch.Generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def categorical(self, probs) -> int:
        """Return an index drawn with these probabilities."""
        return int(torch.multinomial(probs, 1, generator=self.generator))

    def accept(self, prob) -> bool:
        """Return True with this probability."""
        return bool(torch.rand((), generator=self.generator, dtype=torch.double) < prob)


def drawn(control: Callable) -> Callable:
    """Wrap a control, which takes its randomness, as a program that takes a seed."""

    def program(model, prompt, *, seed, max_new_tokens, temperature):
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        return control(model, prompt, randomness=Coins(seed), **options)

    return program


RIGHT = _program(rejection)
WRONG = {r.__name__: _program(r) for r in (correction_from_target, other_temperature, typical)}

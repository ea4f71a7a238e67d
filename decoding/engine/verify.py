"""Verification of a draft block: acceptance, residual, next token.

Every rule is lossless, unless it is given a tolerance.

Symbols: k drafted tokens, p [B, k+1, V] the target's probabilities at the k drafted positions and
at the one after them, q [B, k, V] the very tensor that the draft [B, k] was drawn from. Each rule
returns (accepted [B], next [B]): how many drafted tokens are accepted, and the token that the
target adds after them (a correction, or the bonus token where all are accepted).
"""

import torch
from torch import Tensor

from decoding.engine.randomness import Randomness
from models.few_queries import loops_on, pool


def rejection(
    draft: Tensor, q: Tensor, p: Tensor, randomness: Randomness, tolerance: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    """Verify token by token: accept with min(1, p/q), sample (p-q)+ at the first rejection.

    Source: Leviathan et al., arXiv 2211.17192, Algorithm 1; DEER, arXiv 2512.15176, Eq. 5-6. The
    later p's were conditioned on the rejected token, so nothing after it is accepted.

    Args:
        tolerance: Added to p/q, for each drafted token [B, k] or for all, which is lossy (AS-ARM,
            arXiv 2504.20456, F.5): each position's distribution moves towards q by at most so much
            in total variation.
    """
    accept = (acceptance_probability(draft, q, p) + tolerance).clamp_max(1)
    accepted = _leading(randomness.accept(accept))
    correction = residual(_at(p, accepted), _drafted_at(q, accepted))
    return accepted, randomness.categorical(correction)


def block(draft: Tensor, q: Tensor, p: Tensor, randomness: Randomness) -> tuple[Tensor, Tensor]:
    """Verify the block jointly: never fewer accepted tokens in expectation than `rejection`.

    Source: Sun et al., arXiv 2403.10444, Algorithm 2. r_i is their p_i = min(1, r_{i-1} p/q); tau,
    the number of accepted tokens, is the *last* i whose own coin h_i fell.
    """
    ratio = _chosen(p[:, :-1], draft) / _chosen(q, draft)
    r = torch.ones_like(ratio[:, 0])
    weights = [r]
    for i in range(draft.shape[1]):
        r = (r * ratio[:, i]).clamp_max(1)
        weights.append(r)
    r = torch.stack(weights, 1)  # [B, k+1], r_0 = 1
    mass = (r[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp_min(0).sum(-1)  # [B, k-1]
    # Where r_i = 1 and p = q there is no mass either way: 0/0, and the token is surely accepted.
    left = mass + 1 - r[:, 1:-1]
    h = torch.where(left > 0, mass / left, 1.0)
    fell = randomness.accept(torch.cat([h, r[:, -1:]], 1))
    order = torch.arange(1, draft.shape[1] + 1, device=draft.device)
    accepted = (fell * order).amax(1)
    scaled = r.gather(1, accepted[:, None]) * _at(p, accepted)
    bonus = (accepted == draft.shape[1])[:, None]
    correction = torch.where(bonus, _at(p, accepted), residual(scaled, _drafted_at(q, accepted)))
    return accepted, randomness.categorical(correction)


def coupled(draft: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the drafts that equal the target's own choices, argmax(log p + g).

    choice [B, k+1]: made with the same keyed noise as plain decoding would use at each position
    (temperature 0: no noise), so the output is plain decoding's text for any draft.
    """
    accepted = _leading(draft == choice[:, :-1])
    return accepted, choice.gather(1, accepted[:, None]).squeeze(1)


def choose(logits: Tensor, noise: Tensor | None, of: Tensor | None = None) -> Tensor:
    """Make the keyed choice argmax(log p + g), Gumbel-max sampling: tokens [B, n].

    Args:
        logits: [B, n, V], warped.
        noise: [B, m, V], of the next m positions; None at temperature 0.
        of: [B, n], the position of each row of logits, from 0 on; None: 0, 1, ..., n - 1.
    """
    (B, n, _), device = logits.shape, logits.device
    if noise is None:
        scores = logits
    elif logits.dtype == noise.dtype == torch.float32 and (compiled := loops_on(device)):
        found = torch.empty(B, n, dtype=torch.int64)
        of = torch.arange(n).expand(B, n) if of is None else of
        with pool(compiled):
            compiled.choose(*(x.contiguous().numpy() for x in (logits, noise, of)), found.numpy())
        return found
    else:
        row = torch.arange(B, device=device)[:, None]
        scores = logits + (noise[:, :n] if of is None else noise[row, of])
    if scores.device.type == "cpu":  # numpy takes a seventh of torch's time
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def acceptance_probability(draft: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """Return min(1, p(y_i) / q(y_i)) at the drafted tokens: [B, k]. DEER Eq. 5."""
    return (_chosen(p[:, : draft.shape[1]], draft) / _chosen(q, draft)).clamp_max(1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return (p - q)+ normalised over the last axis; p itself where q is 0 (bonus). Eq. 6."""
    rest = (p - q).clamp_min(0)
    total = rest.sum(-1, keepdim=True)
    # p == q leaves nothing; a rejection then had probability zero up to rounding.
    return torch.where(total > 0, rest / total, p)


def _chosen(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _at(x: Tensor, i: Tensor) -> Tensor:
    """Index x [B, n, V] by i [B] in each row: [B, V]."""
    return x[torch.arange(len(x), device=x.device), i]


def _drafted_at(q: Tensor, i: Tensor) -> Tensor:
    """Return the drafter's distribution at i [B]; zero after the block."""
    k = q.shape[1]
    return _at(q, i.clamp_max(k - 1)) * (i < k)[:, None]


def _leading(accepted: Tensor) -> Tensor:
    """Count leading True entries: bool [B, k] -> [B]."""
    return accepted.long().cumprod(1).sum(1)

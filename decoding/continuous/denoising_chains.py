"""Two chains that make a token, a draft's and its target's, coupled at every step.

A chain starts at x_T from N(0, I) and draws x_{t-1} from a density given x_t, down to the token
x_0; a head gives the densities as `step(i, x)`, i = 0 for the first of T steps. A diffusion head's
are Gaussians; a mixture head's chain has one step, which does not depend on x_T. The target's chain
follows the draft's in such a way that it keeps its own law, and its x_0 *is* the output token: the
draft is accepted where both ends are the same. Nothing has to be corrected behind it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.continuous.coupling import couple, relaxed
from decoding.engine.randomness import ContinuousRandomness
from models.densities import Density

Step = Callable[[int, Tensor], Density]


class Trajectory(NamedTuple):
    """A run chain. states: T + 1 tensors [..., D], x_T to x_0; kernels: its T densities."""

    states: list[Tensor]
    kernels: list[Density]


def run_chain(
    step: Step, start: Tensor, steps: int, randomness: ContinuousRandomness
) -> Trajectory:
    """A chain from x_T = start [B, ..., D]."""
    states, kernels = [start], []
    for i in range(steps):
        kernels.append(step(i, states[-1]))
        states.append(kernels[-1].sample(randomness))
    return Trajectory(states, kernels)


def join(chains: Sequence[Trajectory]) -> Trajectory:
    """Chains [B, 1, D] of n tokens drafted one after the other -> [B, n, D]."""
    states = [torch.cat(x, 1) for x in zip(*(c.states for c in chains))]
    kernels = [
        type(same[0])(*(torch.cat(t, 1) for t in zip(*same)))
        for same in zip(*(c.kernels for c in chains))
    ]
    return Trajectory(states, kernels)


def follow(
    draft: Trajectory,
    step: Step,
    randomness: ContinuousRandomness,
    *,
    drafted: Tensor | None = None,
    align: bool = True,
    coupled: int | None = None,
    in_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """The target's x_0 [B, ..., D] and whether each is the draft's. Lossless.

    Given both chains' states, a step couples their two kernels maximally. That draws the target's
    state from its own kernel, whatever the draft did, so x_0 has the law of the target's chain. The
    rule is the same after the chains have parted: they may meet again, and the token still stands.
    drafted: bool [B, ...]; elsewhere what `draft` holds means nothing, and the target's chain runs
        alone.
    align: both chains have the same noise before they are coupled; False: x_T included, each its
        own, so that the states differ and little is accepted (CSpD Table 3). Lossless too.
    coupled: how many of the last steps are coupled (None: all, or without alignment the last).
    in_order: of the tokens along the last axis none is used behind the first that does not stand.
    """
    x, together = draft.states[0], torch.ones_like(draft.states[0][..., 0], dtype=torch.bool)
    drafted = together if drafted is None else drafted
    T = len(draft.kernels)
    first = T - (coupled or (T if align else 1))
    alone = not (align and drafted.all())
    if alone:
        own = randomness.normal(x.shape).to(x)
        x = torch.where(drafted[..., None], x, own) if align else own
    for i, (after, q) in enumerate(zip(draft.states[1:], draft.kernels)):
        p = step(i, x)
        own = p.sample(randomness) if alone else None
        if i >= first:
            # Only the last step can tell which is the first: chains that have parted may meet.
            y, together = couple(after, q, p, randomness, in_order and i == T - 1)
        elif align:
            y = p.mean + p.std * ((after - q.mean) / q.std)
        else:
            y = own
        x = torch.where(drafted[..., None], y, own) if alone else y
    return x, together & drafted


def follow_relaxed(
    draft: Trajectory,
    step: Step,
    randomness: ContinuousRandomness,
    *,
    drafted: Tensor | None = None,
    align: bool = True,
    inner_temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """LOSSY, as published: the same noise in both chains, then `relaxed` on the last step.

    CSpD section 3.2: x_{t-1} = mean_p + std_p e_t with the draft's own e_t, and
    Sigma = prod_{t >= 2} |std_q,t| / |std_p,t|. Arguments as in `follow`; without alignment the
    noises differ and no Sigma arises.
    """
    x, log_sigma = draft.states[0], torch.zeros_like(draft.states[0][..., 0], dtype=torch.float64)
    drafted = log_sigma == 0 if drafted is None else drafted
    own = randomness.normal(x.shape).to(x)
    x = torch.where(drafted[..., None], x, own) if align else own
    for i, (after, q) in enumerate(zip(draft.states[1:-1], draft.kernels[:-1])):
        p = step(i, x)
        noise = randomness.normal(x.shape).to(x)
        if align:
            noise = torch.where(drafted[..., None], (after - q.mean) / q.std, noise)
            log_sigma = log_sigma + (q.std.double().log() - p.std.double().log()).sum(-1)
        x = p.mean + p.std * noise
    p = step(len(draft.kernels) - 1, x)
    y, together = relaxed(
        draft.states[-1],
        draft.kernels[-1],
        p,
        randomness,
        log_sigma=log_sigma,
        inner_temperature=inner_temperature,
    )
    own = p.sample(randomness)
    return torch.where(drafted[..., None], y, own), together & drafted

"""Denoising chains of continuous tokens, and the coupling of a target's chain to a drafter's.

A chain starts at x_T from N(0, I) and draws x_{t-1} from a density given x_t, down to the token
x_0. A head gives the densities as `step(i, x)`, with i = 0 for the first of T steps. A diffusion
head's are Gaussians; a mixture head's chain has one step, which does not depend on x_T. Coupling
does not change the distribution of the target's chain, and its x_0 is the output token. The draft
is accepted if both chains end in the same x_0; otherwise the target's x_0 is the correction.
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
    """One run of a chain: T + 1 states [..., D], from x_T to x_0, and the densities of T steps."""

    states: list[Tensor]
    kernels: list[Density]


def run_chain(
    step: Step, start: Tensor, steps: int, randomness: ContinuousRandomness
) -> Trajectory:
    """Run a chain of T steps from start, x_T [B, ..., D]; `step` gives each step's density."""
    states, kernels = [start], []
    for i in range(steps):
        kernels.append(step(i, states[-1]))
        states.append(kernels[-1].sample(randomness))
    return Trajectory(states, kernels)


def join(chains: Sequence[Trajectory]) -> Trajectory:
    """Join chains [B, 1, D] of tokens that were drafted one after the other: [B, n, D]."""
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
    """Run the target's chain, coupled to the drafter's: x_0 [B, ..., D] and accepted [B, ...].

    Lossless: each coupled step is a maximal coupling of the two chains' densities given their
    states. It draws from the target's own density, so x_0 has the distribution of the target's
    chain. Chains whose states differ stay coupled: their states may become equal again, and the
    token is accepted.

    Args:
        draft: The drafter's chains [B, ..., D].
        step: The densities of the target's chain.
        drafted: Where there is a draft, bool [B, ...]; elsewhere the target's chain runs alone.
        align: Use the drafter's noise in the steps before the coupled ones. With False each chain
            has its own x_T and noise: still lossless, but few drafts are accepted (CSpD, Table 3).
        coupled: Number of last steps that are coupled; None is all, or one without alignment.
        in_order: Draw no residual after the first rejection along the last axis.
    """
    x, accepted = draft.states[0], torch.ones_like(draft.states[0][..., 0], dtype=torch.bool)
    drafted = accepted if drafted is None else drafted
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
            # Only the last step decides which rejection is first: states may become equal again.
            y, accepted = couple(after, q, p, randomness, in_order and i == T - 1)
        elif align:
            y = p.mean + p.std * ((after - q.mean) / q.std)
        else:
            y = own
        x = torch.where(drafted[..., None], y, own) if alone else y
    return x, accepted & drafted


def follow_relaxed(
    draft: Trajectory,
    step: Step,
    randomness: ContinuousRandomness,
    *,
    drafted: Tensor | None = None,
    align: bool = True,
    inner_temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Apply the published, LOSSY rule: shared noise in both chains, then `relaxed` at the end.

    CSpD, section 3.2: x_{t-1} = mean_p + std_p e_t with the drafter's own e_t, and Sigma = prod_{t
    >= 2} |std_q,t| / |std_p,t|. Without alignment the chains have different noise and Sigma is 1.
    See `follow` and `relaxed` for the arguments.
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
    last, tau = (draft.states[-1], draft.kernels[-1], p), inner_temperature
    y, accepted = relaxed(*last, randomness, log_sigma=log_sigma, inner_temperature=tau)
    own = p.sample(randomness)
    return torch.where(drafted[..., None], y, own), accepted & drafted

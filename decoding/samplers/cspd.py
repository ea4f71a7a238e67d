"""CSpD: speculative decoding of continuous tokens (the paper of that name), made lossless.

The drafter makes gamma tokens one after the other; the target sees all of them in one pass, and its
own chains for these tokens and the one behind them run as one batch, coupled with the drafter's
(`decoding.continuous.denoising_chains`). What the target's chains end in are the tokens: drafts
stand as long as both ends are the same, the first other end is the correction, and where all stand
the last one is the bonus. As published (verify=relaxed) the ratio is another one, and the law is
not the target's.
"""

from functools import partial

import torch
from torch import Tensor

from decoding.continuous.denoising_chains import Trajectory, follow, follow_relaxed, join, run_chain
from decoding.continuous.image_state import ImageParams, PatchRows
from decoding.samplers.sequential import SequentialSampler
from models import patches
from models.patches import PatchTransformer, check_pair

KNOBS = {"gamma": int}


class CspdSampler(SequentialSampler):
    """Images of a target, drafted by a smaller model of the same patches, order and schedule.

    gamma: tokens drafted a cycle, unless a request says another number.
    """

    def __init__(self, target: PatchTransformer, drafter: PatchTransformer, *, gamma: int):
        super().__init__(target)
        check_pair(target, drafter)
        if gamma < 1:
            raise ValueError(f"gamma={gamma} is not allowed: it must be at least 1")
        self.drafter, self.gamma = drafter.eval(), gamma

    def margin(self, params: ImageParams) -> int:
        """See `SequentialSampler`."""
        return (params.gamma or self.gamma) + 1

    def begin(self, rows: PatchRows, params: ImageParams) -> None:
        """See `SequentialSampler`."""
        super().begin(rows, params)
        rows.networks["drafter"] = self.cached(self.drafter, rows, params)

    def cycle(self, rows: PatchRows, params: ImageParams) -> tuple[Tensor, Tensor, Tensor]:
        """Draft, verify; or, while tokens are pre-filled, the target alone."""
        if (rows.lengths < round(params.prefill * self.target.config.tokens)).any():
            return super().cycle(rows, params)
        gamma, n = params.gamma or self.gamma, rows.lengths[:, None]
        draft = self.draft(rows, gamma, params)
        drafts = torch.arange(gamma + 1, device=n.device)
        step = self.step("target", rows, n + drafts, params)
        rule = partial(follow, coupled=params.coupled, in_order=True)
        if params.verify == "relaxed":
            rule = partial(follow_relaxed, inner_temperature=params.inner_temperature)
        drafted = (drafts < gamma).expand(len(n), -1)
        x, together = rule(draft, step, rows.randomness, drafted=drafted, align=params.align)
        stands = together.long().cumprod(1).bool()
        return x, stands.sum(1) + 1, stands

    def draft(self, rows: PatchRows, gamma: int, params: ImageParams) -> Trajectory:
        """The chains of gamma tokens [B, gamma + 1, D], written behind the committed ones.

        The last one stands a second time in the place behind them, where nothing is drafted.
        """
        n, drafter = rows.lengths, rows.networks["drafter"]
        here = torch.arange(len(n), device=n.device)
        chains = []
        for j in range(gamma):
            # The first pass also brings what was committed and not drafted since the last one; a
            # row that begins brings its first input twice.
            back = 0 if j else 1 if drafter.passes else int(n.max())
            index = ((n + j)[:, None] + torch.arange(-back, 1, device=n.device)).clamp_min(0)
            step = self.step("drafter", rows, index, params, keep=1)
            start = rows.randomness.normal((len(n), 1, self.target.config.dim)).to(rows.patches)
            chain = run_chain(step, start, self.drafter.head.steps, rows.randomness)
            chains.append(chain)
            rows.patches[here, n + j] = chain.states[-1][:, 0]
        return join([*chains, chains[-1]])


def load(path: str, config: dict, *, target: str, dtype: str, device: str) -> CspdSampler:
    """The sampler of an exported drafter (see `decoding.load`)."""
    models = (patches.load(p, dtype).to(device) for p in (target, path))
    return CspdSampler(*models, gamma=config["gamma"])

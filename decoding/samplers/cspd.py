"""CSpD: continuous speculative decoding of images (the paper of that name), made lossless.

The drafter drafts gamma tokens one after the other. The target evaluates them in one pass (a
bidirectional MAR by a row for each prefix, `decoding.continuous.prefixes`), and its denoising
chains for them and the next token run as one batch, coupled to the drafter's
(`decoding.continuous.denoising_chains`). Drafts are accepted while both chains end alike; the first
other end is the correction, and after gamma accepted drafts the last end is the bonus token.
"""

from functools import partial

import torch
from torch import Tensor

from decoding.continuous import prefixes
from decoding.continuous.denoising_chains import Trajectory, follow, follow_relaxed, join, run_chain
from decoding.continuous.image_state import ImageBatch, ImageParams
from decoding.continuous.prefixes import CHAIN, ImageTransformer
from decoding.method import Count, Method, Share
from decoding.samplers.sequential import SequentialSampler
from models.patches import check_pair


class CspdSampler(SequentialSampler):
    """Speculative sampler of images.

    Args:
        target: A patch transformer or a MAR.
        drafter: A smaller model with the same patches, order, classes and noise schedule.
        gamma: Tokens drafted per cycle, unless a request gives another number.
        prefill: Share of the tokens, at the start, without drafts, unless a request gives another.
    """

    def __init__(
        self,
        target: ImageTransformer,
        drafter: ImageTransformer,
        *,
        gamma: Count,
        prefill: Share = 0.0,
    ):
        super().__init__(target)
        check_pair(target, drafter)
        self.drafter, self.gamma, self.prefill = drafter.eval(), gamma, prefill

    def margin(self, params: ImageParams) -> int:
        return (params.gamma or self.gamma) + 1

    def begin(self, batch: ImageBatch, params: ImageParams) -> None:
        super().begin(batch, params)
        batch.networks["drafter"] = self.cached(self.drafter, batch, params)

    def cycle(self, batch: ImageBatch, params: ImageParams) -> tuple[Tensor, Tensor, Tensor]:
        """Draft and verify; while tokens are prefilled, the target decodes sequentially."""
        if (batch.lengths < round(params.prefill * self.target.config.tokens)).any():
            return super().cycle(batch, params)
        gamma, n = params.gamma or self.gamma, batch.lengths[:, None]
        draft = self.draft(batch, gamma, params)
        drafts = torch.arange(gamma + 1, device=n.device)
        step = self.step("target", batch, n + drafts, params)
        rule = partial(follow, coupled=params.coupled, in_order=True)
        if params.verify == "relaxed":
            rule = partial(follow_relaxed, inner_temperature=params.inner_temperature)
        drafted = (drafts < gamma).expand(len(n), -1)
        x, equal = rule(draft, step, batch.randomness, drafted=drafted, align=params.align)
        accepted = equal.long().cumprod(1).bool()
        return x, accepted.sum(1) + 1, accepted

    def draft(self, batch: ImageBatch, gamma: int, params: ImageParams) -> Trajectory:
        """Draft gamma tokens: chains [B, gamma + 1, D], the last repeated for the bonus token."""
        n, drafter = batch.lengths, batch.networks["drafter"]
        here = torch.arange(len(n), device=n.device)
        chains = []
        for j in range(gamma):
            # The first pass of a cycle also caches tokens that were committed but not drafted: one,
            # or all prefilled ones in the first cycle. A new row feeds its first input twice.
            back = 0 if j else 1 if drafter.passes else int(n.max())
            index = ((n + j)[:, None] + torch.arange(-back, 1, device=n.device)).clamp_min(0)
            step = self.step("drafter", batch, index, params, keep=1)
            start = batch.randomness.normal((len(n), 1, self.target.config.dim)).to(batch.patches)
            chain = run_chain(step, start, self.drafter.head.steps, batch.randomness)
            chains.append(chain)
            batch.patches[here, n + j] = chain.states[-1][:, 0]
        return join([*chains, chains[-1]])


def load(path: str, config: dict, *, target: str | None, dtype: str, device: str) -> CspdSampler:
    """Load the sampler of an exported drafter, with its target."""
    if target is None or "gamma" not in config:
        raise ValueError(
            f"{path!r} does not name its target and how many tokens to draft: give target=, and "
            "'sampler=[method=cspd,gamma=4]'"
        )
    models = (prefixes.load(p, config, dtype, device) for p in (target, path))
    return CspdSampler(*models, gamma=config["gamma"], prefill=config.get("prefill", 0.0))


METHOD = Method(CspdSampler, keys=CHAIN, load=load)

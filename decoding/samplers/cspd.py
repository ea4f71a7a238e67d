"""CSpD: continuous speculative decoding of images (the paper of that name), made lossless.

The drafter drafts gamma tokens one after the other. The target evaluates all of them in one pass
(a bidirectional MAR by a row for each prefix, `decoding.continuous.prefixes.PrefixNetwork`),
and its denoising chains for these tokens and the next one run as one batch, coupled to the
drafter's chains (`decoding.continuous.denoising_chains`). The ends of the target's chains are the
tokens: a draft is accepted while both chains have the same end, the first different end is the
correction, and if all drafts are accepted the last end is the bonus token. The published rule
(verify=relaxed) uses another acceptance ratio and does not keep the target's distribution.
"""

from functools import partial

import torch
from torch import Tensor

from decoding.continuous import prefixes
from decoding.continuous.denoising_chains import Trajectory, follow, follow_relaxed, join, run_chain
from decoding.continuous.image_state import ImageBatch, ImageParams
from decoding.continuous.prefixes import CHAIN, ImageTransformer
from decoding.samplers.sequential import SequentialSampler
from models.patches import check_pair

KNOBS = {"gamma": int, "prefill": float, **CHAIN}


class CspdSampler(SequentialSampler):
    """Speculative sampler of images.

    Args:
        target: A patch transformer or a MAR.
        drafter: A smaller model with the same patches, order, classes and noise schedule.
        gamma: Tokens drafted per cycle, unless a request gives another number.
        prefill: Share of the tokens, at the start, that the target generates without drafts,
            unless a request gives another.

    Raises:
        ValueError: The models do not fit each other, gamma is below 1, or prefill not in [0, 1].
    """

    def __init__(
        self,
        target: ImageTransformer,
        drafter: ImageTransformer,
        *,
        gamma: int,
        prefill: float = 0.0,
    ):
        super().__init__(target)
        check_pair(target, drafter)
        if gamma < 1:
            raise ValueError(f"gamma={gamma} is not allowed: it must be at least 1")
        if not 0 <= prefill <= 1:
            raise ValueError(f"prefill={prefill} is not allowed: it must be in [0, 1]")
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
        """Draft gamma tokens, and write them after the committed ones.

        Returns:
            Their chains [B, gamma + 1, D]. The last chain is repeated as padding for the bonus
            token, which has no draft.
        """
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
    """The sampler of an exported drafter.

    Args:
        path: The export's folder.
        config: Its `parade` entry.
        target: Folder of the target.
        dtype: Of the weights.
        device: Where to run.

    Returns:
        The sampler, with both models on the device.

    Raises:
        ValueError: No target or gamma is known, a model cannot be loaded, or the two do not fit
            each other.
    """
    if target is None or "gamma" not in config:
        raise ValueError(
            f"{path!r} does not name its target and how many tokens to draft: give target=, and "
            "'sampler=[method=cspd,gamma=4]'"
        )
    models = (prefixes.load(p, config, dtype, device) for p in (target, path))
    return CspdSampler(*models, gamma=config["gamma"], prefill=config.get("prefill", 0.0))

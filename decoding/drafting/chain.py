"""Chains: k drafted tokens, verified by `rejection`, `block` or `coupled`.

A rejection ends the chain: later distributions were conditioned on the rejected token.
"""

import torch
from torch import Tensor

from decoding.drafting.block_drafter import BlockDrafter, for_requests, nearest, numbered
from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.verify import choose
from decoding.method import ByNumber
from models.masks import causal


class Chain:
    """Drafts and verifies a chain.

    Args:
        block_size: k, tokens drafted a cycle unless a request asks for others.
        lengths: k by {requests: {temperature: k}}, the nearest is taken; None: block_size.
    """

    predicate = staticmethod(causal)

    def __init__(self, block_size: int, lengths: ByNumber[ByNumber[int]] | None = None):
        self.block_size = block_size
        self.lengths = numbered(lengths or {})

    def most(self, params: SamplingParams) -> int:
        """Return the most tokens that a cycle drafts."""
        calibrated = [k for found in self.lengths.values() for k in found.values()]
        return max(params.block_size or self.block_size, *calibrated, 0)

    def length(self, requests: int, params: SamplingParams) -> int:
        """Return how many tokens to draft for so many unfinished requests.

        The draws depend on the draft's length, and a request's text must not depend on its
        neighbours: so the number of requests decides only where the noise is keyed.
        """
        if params.block_size or not self.lengths:
            return params.block_size or self.block_size
        by_temperature = for_requests(self.lengths, requests if params.keyed else 1)
        return nearest(by_temperature, params.temperature)

    def begin(self, sampler: BlockDrafter, batch: Batch, params: SamplingParams) -> None:
        """Do nothing: chains keep no state."""

    def cycle(
        self, sampler: BlockDrafter, batch: Batch, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Draft k tokens, verify them, emit the accepted ones and one of the target's own."""
        k = self.length(len(batch.requests), params)
        # Where it is keyed, drafter and target share it.
        noise = sampler.noise(batch, k + 1, params) if params.keyed else None
        draft, q = sampler.draft_chain(batch, k, noise, params)
        output = sampler.target_pass(batch, draft, params)
        if params.keyed:
            accepted, following = verify.coupled(draft, choose(output.logits, noise))
        else:
            rule = {"rejection": verify.rejection, "block": verify.block}[params.verify]
            accepted, following = rule(draft, q, output.logits.softmax(-1), batch.randomness)
        path = torch.arange(k + 1, device=draft.device).expand(len(draft), -1)
        sampler.follow(batch, output.hidden_states, path, accepted + 1)
        tokens = torch.cat([draft, draft[:, :1]], 1)
        tokens.scatter_(1, accepted[:, None], following[:, None])
        return tokens, accepted + 1

"""DEER: a diffusion drafter drafts a block in one pass, the target verifies it in one pass.

Source: arXiv 2512.15176, section 3.2 and Algorithm 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting.block_sampler import BlockMethod, BlockSampler
from decoding.engine.batch import Batch, State
from decoding.engine.cache import CachedNetwork
from decoding.engine.vocabulary import check_known
from decoding.method import Text, TokenId
from models.masks import drafter_attention


@dataclass
class DeerState(State):
    """The state between cycles."""

    # Committed tokens whose keys and values the drafter's cache holds, [B]; always 0 for a drafter
    # with `bidirectional` attention, which reads the whole prefix in every pass.
    drafter_cached: Tensor


class DeerSampler(BlockSampler):
    """Speculative decoding with a block-diffusion drafter.

    Args:
        target, tokenizer, knobs: See `BlockSampler`.
        drafter: A diffusion LM over the target's tokens.
        mask_id: The token that the drafter reads in place of those it drafts.
        sep_id: The drafter's separator token; None with 'causal' attention, which has none.
        attention: The drafter's, as it was trained, one of `models.masks.DRAFTERS`. With
            'prefix_causal' its cache is exact; 'bidirectional' runs the whole prefix in each pass.
            'causal' is PARD's: a causal LM whose outputs at the last committed token and k - 1
            masks draft the k tokens after them.
        shifted: Whether the drafter's output at a position predicts the token after it.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: PreTrainedModel,
        *,
        mask_id: TokenId,
        sep_id: TokenId | None = None,
        attention: Text = "prefix_causal",
        shifted: bool = False,
        **knobs,
    ):
        super().__init__(target, tokenizer, **knobs)
        self.drafter, self.draft_predicate = drafter.eval(), drafter_attention(attention)
        if (sep_id is None) != (attention == "causal"):
            raise ValueError(
                f"a drafter with attention={attention} and sep_id={sep_id} is not allowed: with "
                "attention='causal' there is no separator, otherwise there is one"
            )
        known = drafter.config.get_text_config().vocab_size
        check_known(known, mask_id=mask_id, sep_id=sep_id)
        self.drafter_caches, self.shifted = attention != "bidirectional", shifted
        self.attention, self.mask_id, self.sep_id = attention, mask_id, sep_id
        self.never = [mask_id] if sep_id is None else [mask_id, sep_id]

    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        capacity = batch.tokens.shape[1]
        drafter = CachedNetwork(self.drafter, self.draft_predicate, capacity, ids=self.draft_ids)
        batch.networks["drafter"] = drafter
        batch.state = DeerState(drafter_cached=torch.zeros_like(batch.lengths))
        if self.drafter_caches:
            self.prefill(batch, "drafter", drafter)
            batch.state.drafter_cached = batch.lengths - 1

    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """Run one pass over the tokens committed since the last one (without a cache: over all).

        The separator and k masks follow, or without a separator k - 1 masks, as the last committed
        token drafts the first. Rows are padded on the left, so that the block is last in every row.
        """
        n = batch.lengths[:, None]
        width = int((batch.lengths - batch.state.drafter_cached).max())
        separated = self.sep_id is not None
        steps = torch.arange(-width, k + 1 if separated else k - 1, device=n.device)
        positions = n + steps
        padding = positions < batch.state.drafter_cached[:, None]
        tokens = batch.tokens.gather(1, positions.clamp_min(0))
        tokens[:, width:] = self.mask_id
        if separated:
            tokens[:, width] = self.sep_id
        logits = batch.networks["drafter"](
            tokens,
            positions.clamp_min(0),
            keep=k + self.shifted,
            block_start=batch.lengths if separated else None,
            padding=padding if padding.any() else None,
        ).logits[:, :k]
        if self.drafter_caches:
            batch.state.drafter_cached = batch.lengths
        return self.fitted(logits, self.never)


METHOD = BlockMethod(DeerSampler)

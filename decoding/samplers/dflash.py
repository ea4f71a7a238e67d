"""DFlash: a drafter that reads the target's hidden states drafts a block in one pass.

Source: arXiv 2602.06036. The states come from the verifying passes: those of accepted tokens become
keys and values of the drafter's context, those of rejected ones never do.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting.block_sampler import BlockMethod, BlockSampler
from decoding.engine.batch import Batch, State
from decoding.engine.cache import CountedNetwork, RaggedCache
from decoding.engine.vocabulary import check_known
from decoding.method import Text, TokenId
from models import dflash
from models.context import clamped
from models.dflash import DFlashDraftModel
from models.masks import Layout


@dataclass
class DFlashState(State):
    """The state between cycles."""

    # The target's hidden states at the committed tokens that the drafter's cache lacks, without the
    # last committed token, aligned to the right: [B, w, L H].
    states: Tensor
    missing: Tensor

    def join(self, fresh: Self) -> None:
        width = max(self.states.shape[1], fresh.states.shape[1])
        for state in (self, fresh):
            state.states = pad(state.states, (0, 0, width - state.states.shape[1], 0))
        super().join(fresh)


class CachedDrafter(CountedNetwork):
    """A DFlash drafter with a ragged cache of its context's keys and values.

    Slot s holds the context at position s; the last one is scratch. A draft block is written after
    the context, and the next context over it. The target gives embeddings, and a missing head.
    """

    def __init__(self, network: DFlashDraftModel, target: PreTrainedModel, capacity: int):
        super().__init__(network)
        self.target = target
        self.cache: RaggedCache = RaggedCache(capacity, network.config.num_hidden_layers)
        self._slots = torch.arange(capacity, device=network.device)[None]

    def __call__(self, states: Tensor, missing: Tensor, block: Tensor, lengths: Tensor) -> Tensor:
        """Run one forward of a draft block after new context; return its logits [B, k, Vd].

        Args:
            states, missing: Those of `DFlashState`; what a row does not miss is padding.
            block: [B, Q], the last committed token and masks.
            lengths: [B], committed tokens, n: the block begins at position n - 1.
        """
        w, Q = int(missing.max()), block.shape[1]
        states = states[:, states.shape[1] - w :]  # the row that lacked most may be gone
        first = lengths[:, None] - 1
        positions = first + torch.arange(-w, Q, device=block.device)
        padding = positions < first - missing[:, None]
        visible = int(positions[:, -1].max()) + 1
        # The very predicate of training; slots after a row's block are stale.
        slots = self._slots[:, :visible].expand(len(block), -1)
        number = (slots - first).clamp_min(-1)
        keys = Layout(-(slots > positions[:, -1:]).long(), slots.minimum(first), number, slots)
        number = torch.arange(Q, device=block.device).expand_as(block)
        queries = Layout(torch.zeros_like(block), first.expand_as(block), number, first + number)
        scratch = self.cache.capacity - 1
        self.cache.place(positions.masked_fill(padding, scratch), visible)
        network, dtype = self.network, self.network.dtype
        with self.counted():
            hidden = network(
                noise_embeds=self.target.get_input_embeddings()(block).to(dtype),
                context_hidden_states=states.to(dtype),
                attention_mask=network.masks(queries, keys, Q),
                position_ids=clamped(positions.clamp_min(0), self._range),
                past_key_values=self.cache,
            ).last_hidden_state
            return network.logits(network.drafted(hidden), self.target)


class DFlashSampler(BlockSampler):
    """Speculative decoding with a drafter that reads the target's hidden states.

    Args:
        target, tokenizer, knobs: See `BlockSampler`.
        drafter: The network (`models.dflash`); its config names the layers that it reads.
        mask_id: The token that the drafter reads in place of those it drafts.
        attention: How it was trained; None: as its own config says.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DFlashDraftModel,
        *,
        mask_id: TokenId,
        attention: Text | None = None,
        **knobs,
    ):
        if attention is not None and (attention == "causal") != drafter.causal:
            raise ValueError(
                f"the drafter was trained with attention={attention}, and its config.json has "
                f"dflash_config.causal={drafter.causal}"
            )
        knobs.setdefault("draft_ids", drafter.draft_ids)
        super().__init__(target, tokenizer, **knobs)
        dflash.check_fits(drafter.config, target)
        check_known(target.config.get_text_config().vocab_size, mask_id=mask_id)
        self.drafter, self.mask_id = drafter.eval(), mask_id
        self.hidden_layers = drafter.target_layer_ids

    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        capacity = batch.tokens.shape[1]
        batch.networks["drafter"] = CachedDrafter(self.drafter, self.target, capacity)
        missing = batch.lengths - 1
        if states:
            found = torch.cat(states, -1)
            found = _right_aligned(found, missing)
        else:  # no prompt has two tokens
            width = len(self.hidden_layers) * self.drafter.config.hidden_size
            found = torch.zeros(len(missing), 0, width, device=missing.device)
        batch.state = DFlashState(found, missing)

    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """Run one pass over the states of new tokens, and a block of the last one and masks."""
        state, last = batch.state, batch.tokens.gather(1, batch.lengths[:, None] - 1)
        masks = k - self.drafter.samples_from_anchor
        block = torch.cat([last, last.new_full((len(last), masks), self.mask_id)], 1)
        drafter = batch.networks["drafter"]
        logits = drafter(state.states, state.missing, block, batch.lengths)
        state.states, state.missing = state.states[:, :0], torch.zeros_like(state.missing)
        return self.fitted(logits, [self.mask_id])

    def follow(
        self, batch: Batch, states: tuple[Tensor, ...], path: Tensor, counts: Tensor
    ) -> None:
        found = torch.cat(states, -1)
        rows = torch.arange(len(path), device=path.device)[:, None]
        found = _right_aligned(found[rows, path], counts)
        batch.state.states, batch.state.missing = found, counts


def _right_aligned(states: Tensor, counts: Tensor) -> Tensor:
    """Return the first counts [B] of states [B, m, H] as the last of [B, max counts, H]."""
    width = int(counts.max())
    steps = torch.arange(width, device=counts.device) - (width - counts)[:, None]
    rows = torch.arange(len(counts), device=counts.device)[:, None]
    return states[rows, steps.clamp_min(0)]


def _load_assistant(path: str) -> tuple[PreTrainedModel, dict]:
    return dflash.load_assistant(path), {"speculation_type": "dflash"}


METHOD = BlockMethod(
    DFlashSampler,
    needed=("mask_id", "block_size"),  # a published drafter's config.json has no more
    load_drafter=lambda path, dtype, **options: dflash.load(path, dtype),
    load_assistant=_load_assistant,
)

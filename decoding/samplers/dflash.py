"""DFlash: a drafter that reads the target's hidden states drafts a block in one pass.

Source: arXiv 2602.06036. The states are those of the passes that verify: of each accepted token
they become keys and values of the drafter's context, those of a rejected one never do.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting import block_sampler
from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.prompt_lookup import Lookup
from decoding.engine.batch import Batch, State
from decoding.engine.cache import CountedNetwork, RaggedCache
from decoding.engine.vocabulary import check_known
from models import dflash
from models.dflash import DFlashDraftModel
from models.masks import Layout, dense

KNOBS = block_sampler.KNOBS
ARTEFACTS = block_sampler.ARTEFACTS
NEEDED = ("mask_id", "block_size")  # a published drafter's config.json has no more
read_artefacts = block_sampler.read_artefacts


@dataclass
class DFlashState(State):
    """What a batch keeps between cycles.

    states: [B, w, L H], the target's hidden states at the committed tokens that the drafter's cache
        lacks, aligned to the right; the last committed token is not among them.
    missing: [B], how many of them a row has.
    lookups: The prompt lookup of each request; None where trees do not use it.
    """

    states: Tensor
    missing: Tensor
    lookups: list[Lookup] | None = None

    def join(self, fresh: "DFlashState") -> None:
        width = max(self.states.shape[1], fresh.states.shape[1])
        for state in (self, fresh):
            state.states = pad(state.states, (0, 0, width - state.states.shape[1], 0))
        super().join(fresh)


class CachedDrafter(CountedNetwork):
    """A DFlash drafter with a ragged cache of its context's keys and values.

    Slot s of the cache holds the context at position s. A draft block is written after the context,
    and the next context over it.

    Args:
        network: The drafter.
        target: Whose embeddings, and head where the drafter has none, it borrows.
        capacity: Slots of the cache, the scratch slot included.
    """

    def __init__(self, network: DFlashDraftModel, target: PreTrainedModel, capacity: int):
        super().__init__(network)
        self.target = target
        self.cache = RaggedCache(capacity, network.config.num_hidden_layers)
        self._slots = torch.arange(capacity, device=network.device)[None]

    def __call__(self, states: Tensor, missing: Tensor, block: Tensor, lengths: Tensor) -> Tensor:
        """One forward of a draft block after new context.

        Args:
            states: [B, w, L H], of the tokens before the last committed one, aligned to the right.
            missing: [B], how many of them the cache lacks; the others are padding.
            block: [B, Q], the last committed token and masks.
            lengths: [B], committed tokens, n: the block begins at position n - 1.

        Returns:
            Logits [B, k, Vd] of what the block drafts.
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
        keys = Layout(-(slots > positions[:, -1:]).long(), slots.minimum(first), number)
        number = torch.arange(Q, device=block.device).expand_as(block)
        queries = Layout(torch.zeros_like(block), first.expand_as(block), number)
        scratch = self.cache.capacity - 1
        self.cache.place(positions.masked_fill(padding, scratch), visible)
        network, dtype = self.network, self.network.dtype
        with self.counted():
            hidden = network(
                noise_embeds=self.target.get_input_embeddings()(block).to(dtype),
                context_hidden_states=states.to(dtype),
                attention_mask=dense(network.attention(Q), queries, keys),
                position_ids=positions.clamp_min(0),
                past_key_values=self.cache,
            ).last_hidden_state
            return network.logits(network.drafted(hidden), self.target)


class DFlashSampler(BlockSampler):
    """Speculative decoding with a drafter that reads the target's hidden states.

    Args:
        target, tokenizer: See `Sampler`.
        drafter: The network (`models.dflash`); its config names the layers that it reads.
        mask_id: The token that the drafter reads in place of those it drafts.
        knobs: See `BlockSampler`.

    Raises:
        ValueError: The drafter is for a target of another size or depth.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DFlashDraftModel,
        *,
        mask_id: int,
        **knobs,
    ):
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
        """Drafter logits [B, k, V] at the next k positions, independent given the prefix.

        One pass over the states of the tokens that were committed since the last one, and the block
        of the last committed token and masks.
        """
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
    """The first counts [B] of states [B, m, H] as the last of [B, max counts, H]."""
    width = int(counts.max())
    steps = torch.arange(width, device=counts.device) - (width - counts)[:, None]
    rows = torch.arange(len(counts), device=counts.device)[:, None]
    return states[rows, steps.clamp_min(0)]


def load_drafter(path: str, dtype: str | torch.dtype, **options) -> DFlashDraftModel:
    """The network of an export."""
    return dflash.load(path, dtype)


def load_assistant(path: str) -> tuple[PreTrainedModel, dict]:
    """An export as an assistant model of transformers, and what `generate` must be told of it."""
    return dflash.load_assistant(path), {"speculation_type": "dflash"}


def from_export(target, tokenizer, drafter, config: dict) -> DFlashSampler:
    """The sampler of an exported drafter; config: its `parade` entry.

    Raises:
        ValueError: Its network has another attention than it was trained with.
    """
    trained = config.get("attention")
    if trained is not None and (trained == "causal") != drafter.causal:
        raise ValueError(
            f"the drafter was trained with attention={trained}, and its config.json has "
            f"dflash_config.causal={drafter.causal}"
        )
    return DFlashSampler(target, tokenizer, drafter, **block_sampler.knobs_of(config, "mask_id"))

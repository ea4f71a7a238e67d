"""DFlash: a drafter that reads the target's hidden states drafts a block in one pass.

Source: arXiv 2602.06036. States of accepted tokens (`drafting.state_reader`) become keys and values
of the drafter's context; a shared context is the target's own cache. A tail (`models.dflash`) then
runs once for each drafted token of a chain, or for all nodes of a depth of a tree.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting import bigrams
from decoding.drafting.block_sampler import BlockMethod
from decoding.drafting.draft_nodes import DraftNodes
from decoding.drafting.state_reader import StateReader
from decoding.engine.batch import Batch
from decoding.engine.cache import CountedNetwork, RaggedCache, SharedLayers
from decoding.engine.vocabulary import check_known
from decoding.method import Text, TokenId
from models import dflash
from models.context import clamped
from models.dflash import DFlashDraftModel
from models.hidden_states import check_layers
from models.masks import Layout
from models.placement import is_spread


class CachedDrafter(CountedNetwork):
    """A DFlash drafter with a ragged cache of its context's keys and values.

    Slot s holds the context at position s; the last one is scratch. A draft block is written after
    the context, and the next context over it. The target gives embeddings, and a missing head; for
    a shared context also `theirs`, its cache.
    """

    def __init__(
        self,
        network: DFlashDraftModel,
        target: PreTrainedModel,
        capacity: int,
        theirs: RaggedCache | None = None,
    ):
        super().__init__(network)
        self.target = target
        self.written: RaggedCache | SharedLayers
        if theirs is not None:
            self.written = SharedLayers(theirs, network.originals, target.dtype)
        else:
            self.written = self.cache = RaggedCache(capacity, network.config.num_hidden_layers)
        self._slots = torch.arange(capacity, device=network.device)[None]

    def __call__(self, states: Tensor, missing: Tensor, block: Tensor, lengths: Tensor) -> Tensor:
        """Run one forward of a draft block after new context; return its logits [B, k, Vd].

        With a tail they are those of the first token, [B, 1, Vd]; `extend` gives the others.

        Args:
            states, missing: Those of `UnreadStates`; what a row does not miss is padding. A shared
                context has no new states, [B, 0, 1].
            block: [B, Q], the last committed token and masks.
            lengths: [B], committed tokens, n: the block begins at position n - 1.
        """
        network, w, Q = self.network, states.shape[1], block.shape[1]
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
        to = positions.masked_fill(padding, self.written.capacity - 1)
        self.written.place(to, visible)
        positions = clamped(positions.clamp_min(0), self._range)
        mask = network.masks(queries, keys, Q)
        with self.counted():
            embedded = self._embedded(block)
            contexts = network.contexts(states.to(network.dtype)) if w else self._nothing(embedded)
            hidden = network.parallel(embedded, contexts, mask, positions, self.written)
            if not network.tail:
                return self._logits(network.drafted(hidden))
            self.hidden, self.nodes = hidden, DraftNodes(first, self.written.capacity)
            visible = int(first.max()) + 1
            mask = (self._slots[:, :visible] <= first)[:, None, None]
            self.written.place(to[:, : w + 1], visible)
            given = contexts, mask, positions[:, : w + 1], self.written
            return self._logits(network.sequential(hidden[:, :1], embedded[:, :1], *given))

    def read(self, states: Tensor, missing: Tensor, lengths: Tensor) -> None:
        """Write keys and values of new context, for later drafts; see `__call__`."""
        if not states.shape[1]:
            return
        first = lengths[:, None] - 1
        positions = first + torch.arange(-states.shape[1], 0, device=first.device)
        padding = positions < first - missing[:, None]
        to = positions.masked_fill(padding, self.written.capacity - 1)
        self.written.place(to, int(first.max()))
        positions = clamped(positions.clamp_min(0), self._range)
        contexts = self.network.contexts(states.to(self.network.dtype))
        self.network.remember(contexts, positions, self.written)

    def extend(self, tokens: Tensor, depth: Tensor, parent: Tensor) -> Tensor:
        """Run the tail after drafted tokens; see `BlockDrafter.extend`."""
        network = self.network
        slots, mask = self.nodes.add(parent)
        self.written.place(slots, mask.shape[-1])
        with self.counted():
            states = self.hidden
            if network.depth:
                at = depth[..., None].expand(-1, -1, states.shape[-1])
                states = states.gather(1, at)
            positions = clamped(self.nodes.first + depth, self._range)
            given = self._nothing(states), mask, positions, self.written
            return self._logits(network.sequential(states, self._embedded(tokens), *given))

    def _nothing(self, states: Tensor) -> list[Tensor]:
        """Return the contexts of no new tokens."""
        return [states[:, :0]] * len(self.network.layers)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.target.get_input_embeddings()(tokens).to(self.network.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(self.network.norm(hidden), self.target)


class DFlashSampler(StateReader):
    """Speculative decoding with a drafter that reads the target's hidden states.

    Args:
        target, tokenizer, knobs: See `BlockSampler`.
        drafter: The network (`models.dflash`); its config names the layers that it reads.
        mask_id: The token that the drafter reads in place of those it drafts.
        attention: How it was trained; None: as its own config says.
        markov_head: Whether the drafter's Markov head is used; None: if it has one.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DFlashDraftModel,
        *,
        mask_id: TokenId,
        attention: Text | None = None,
        markov_head: bool | None = None,
        **knobs,
    ):
        if attention is not None and (attention == "causal") != drafter.causal:
            raise ValueError(
                f"the drafter was trained with attention={attention}, and its config.json has "
                f"dflash_config.causal={drafter.causal}"
            )
        knobs.setdefault("draft_ids", drafter.draft_ids)
        if markov_head and drafter.markov_head is None:
            raise ValueError("markov_head=true is not allowed: the drafter has no Markov head")
        if markov_head is not False:
            knobs.setdefault("markov", drafter.markov_head)
        super().__init__(target, tokenizer, **knobs)
        drafter.check_fits(target)
        check_known(target.config.get_text_config().vocab_size, mask_id=mask_id)
        self.drafter, self.mask_id = drafter.eval(), mask_id
        self.hidden_layers = () if drafter.shared else drafter.target_layer_ids
        self.reads_prefixes = drafter.shared  # states are not kept
        if drafter.shared:
            check_layers(target, drafter.originals)
            if is_spread(target):
                raise ValueError(
                    "it reads its target's keys and values (context=shared), which are spread over "
                    "several devices: leave device_map out"
                )
        self.tail = drafter.tail > 0
        if self.tail and not drafter.samples_from_anchor:
            raise ValueError(
                f"it has tail={drafter.tail} without sample_from_anchor: a tail drafts the token "
                "after the one that it reads"
            )

    def cached_drafter(self, batch: Batch) -> CachedDrafter:
        theirs = batch.networks["target"].cache if self.drafter.shared else None
        return CachedDrafter(self.drafter, self.target, batch.tokens.shape[1], theirs)

    def read_waiting(self, batch: Batch) -> None:
        batch.networks["drafter"].read(*batch.state.take(), batch.lengths)

    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """Run one pass over the states of new tokens, and a block of the last one and masks."""
        last = batch.tokens.gather(1, batch.lengths[:, None] - 1)
        masks = k - self.drafter.samples_from_anchor if self.drafter.depth else 0
        block = torch.cat([last, last.new_full((len(last), masks), self.mask_id)], 1)
        if self.hidden_layers:
            states, missing = batch.state.take()
        else:
            states, missing = block[:, :0, None], torch.zeros_like(batch.lengths)
        logits = batch.networks["drafter"](states, missing, block, batch.lengths)
        return self.fitted(logits, [self.mask_id])

    def extend(self, batch: Batch, tokens: Tensor, depth: Tensor, parent: Tensor) -> Tensor:
        logits = batch.networks["drafter"].extend(tokens, depth, parent)
        return self.fitted(logits, [self.mask_id])


def _load_assistant(path: str) -> tuple[PreTrainedModel, dict]:
    return dflash.load_assistant(path), {"speculation_type": "dflash"}


METHOD = BlockMethod(
    DFlashSampler,
    needed=("mask_id", "block_size"),  # a published drafter's config.json has no more
    files=(bigrams.FILE,),
    load_drafter=lambda path, dtype, **options: dflash.load(path, dtype),
    load_assistant=_load_assistant,
)

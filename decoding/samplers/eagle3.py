"""EAGLE-3: a layer that reads the target's hidden states drafts one token after the other.

Source: arXiv 2503.01840. The first token of a draft comes with the states of the tokens accepted
since; each further one takes a run of the layer on its own output, for all nodes of a depth of a
tree together. P-EAGLE (arXiv 2602.01469) drafts all of them in one run.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting import bigrams
from decoding.drafting.block_sampler import BlockMethod
from decoding.drafting.draft_nodes import DraftNodes
from decoding.drafting.state_reader import StateReader
from decoding.engine.batch import Batch
from decoding.engine.cache import CountedNetwork, RaggedCache
from decoding.engine.vocabulary import check_known
from models import eagle3
from models.context import clamped
from models.eagle3 import LlamaForCausalLMEagle3


class CachedDrafter(CountedNetwork):
    """An EAGLE-3 drafter with a ragged cache of its slots' keys and values.

    Slot i is at position i and reads the token after it. Drafted slots are written after those of
    the committed tokens, and the next ones of these over them. The last slot is scratch.
    """

    def __init__(self, network: LlamaForCausalLMEagle3, target: PreTrainedModel, capacity: int):
        super().__init__(network)
        self.target = target
        self.cache: RaggedCache = RaggedCache(capacity, 1)
        self._slots = torch.arange(capacity, device=network.device)[None]

    def __call__(
        self, states: Tensor, missing: Tensor, tokens: Tensor, lengths: Tensor, masks: int = 0
    ) -> Tensor:
        """Run the slots of new states, and `masks` after them: logits [B, 1 + masks, Vd].

        They are of the first drafted token, and of those that P-EAGLE's masks draft.

        Args:
            states, missing: Those of `UnreadStates`, [B, w, L H] and [B]. A row without any, as the
                prompt has one token, reads zeros.
            tokens: The committed tokens [B, capacity].
            lengths: [B], committed tokens, n: the last slot is n - 2.
        """
        if not states.shape[1]:
            states = states.new_zeros(len(states), 1, states.shape[2])
        w, last = states.shape[1], lengths[:, None] - 2
        slots = last + torch.arange(1 - w, 1 + masks, device=last.device)
        states = pad(states, (0, 0, 0, masks))
        unknown = slots <= last - missing[:, None]
        states = states.masked_fill(unknown[..., None], 0)
        positions = slots.clamp_min(0)
        visible = int(last.max().clamp_min(0)) + 1 + masks
        keys = self._slots[:, None, :visible]
        mask = (keys <= positions[..., None])[:, None]
        scratch = unknown & (slots != last)
        self.cache.place(positions.masked_fill(scratch, self.cache.capacity - 1), visible)
        with self.counted():
            f = self.network.combined(states.to(self.network.dtype))
            read = tokens.gather(1, (slots + 1).clamp_min(0))
            if masks:
                read[:, w:] = self.network.config.pard_token
                f[:, w:] = self.network.combined(self.network.mask_hidden)
            last, state = self._run(read, f, mask, positions)
            self.states = state[:, -1:]  # which the slots after the root and the nodes read
            self.nodes = DraftNodes(positions[:, -1:], self.cache.capacity)
            return self.network.logits(last[:, -1 - masks :], self.target)

    def extend(self, tokens: Tensor, depth: Tensor, parent: Tensor) -> Tensor:
        """Run the slots of drafted tokens; see `BlockDrafter.extend`."""
        slots, mask = self.nodes.add(parent)
        self.cache.place(slots, mask.shape[-1])
        with self.counted():
            of = (parent + 1)[..., None].expand(-1, -1, self.states.shape[-1])
            before, positions = self.states.gather(1, of), self.nodes.first + depth
            last, state = self._run(tokens, before, mask, positions)
            self.states = torch.cat([self.states, state], 1)
            return self.network.logits(last, self.target)

    def _run(
        self, tokens: Tensor, state: Tensor, mask: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded = self.network.embedded(tokens, self.target)
        return self.network(embedded, state, mask, clamped(positions, self._range), self.cache)


class Eagle3Sampler(StateReader):
    """Speculative decoding with an EAGLE-3 drafter.

    Args:
        target, tokenizer, knobs: See `BlockSampler`.
        drafter: The network (`models.eagle3`); its config names the layers that it reads.
    """

    tail = True

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: LlamaForCausalLMEagle3,
        *,
        markov_head: bool = False,
        **knobs,
    ):
        if markov_head:
            raise ValueError("markov_head=true is not allowed: an EAGLE-3 drafter has no such head")
        knobs.setdefault("draft_ids", drafter.draft_ids)
        super().__init__(target, tokenizer, **knobs)
        drafter.check_fits(target)
        if drafter.parallel:
            known = target.config.get_text_config().vocab_size
            check_known(known, pard_token=drafter.config.pard_token)
        self.drafter, self.tail = drafter.eval(), not drafter.parallel
        self.hidden_layers = drafter.target_layer_ids
        self.reads_prefixes = False  # its states are not kept

    def cached_drafter(self, batch: Batch) -> CachedDrafter:
        return CachedDrafter(self.drafter, self.target, batch.tokens.shape[1])

    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """Run the slots of the tokens accepted since the last draft: logits [B, 1 or k, V]."""
        given = *batch.state.take(), batch.tokens, batch.lengths
        masks = 0 if self.tail else k - 1
        return self.fitted(batch.networks["drafter"](*given, masks), [])

    def extend(self, batch: Batch, tokens: Tensor, depth: Tensor, parent: Tensor) -> Tensor:
        return self.fitted(batch.networks["drafter"].extend(tokens, depth, parent), [])


METHOD = BlockMethod(
    Eagle3Sampler,
    needed=("block_size",),
    files=(bigrams.FILE,),
    load_drafter=lambda path, dtype, **options: eagle3.load(path, dtype),
)

"""The toy drafter's sampler: reads the target's states from the passes that verify its drafts."""

from dataclasses import dataclass
from pathlib import Path

import torch
from models.toy import Reader
from torch import Tensor

from decoding.engine import verify, vocabulary
from decoding.engine.batch import Batch, State
from decoding.engine.sampler import Sampler
from decoding.engine.verify import choose
from decoding.engine.warp import fit_vocabulary, warp

ARTEFACTS = (vocabulary.FILE,)


@dataclass
class ToyState(State):
    """hidden: [B, H], the target's state at the token before the last committed one."""

    hidden: Tensor


class ToySampler(Sampler):
    """Speculative decoding with a drafter that reads its target."""

    hidden_layers = (1,)

    def __init__(self, target, tokenizer, drafter, *, draft_ids, block_size):
        super().__init__(target, tokenizer)
        self.drafter, self.draft_ids, self.block_size = drafter.eval(), draft_ids, block_size

    def margin(self, params):
        return self.block_size + 2

    def begin(self, batch: Batch, params):
        states = self.prefill(batch, "target", self.cached_target(batch))
        hidden = torch.zeros(len(batch.requests), self.target.config.hidden_size)
        hidden = hidden.to(self.target.device, self.target.dtype)
        if states:
            at = (batch.lengths - 2).clamp_min(0)
            there = states[0][torch.arange(len(at)), at]
            hidden = there.where((batch.lengths > 1)[:, None], hidden)
        batch.state = ToyState(hidden)

    def draft_pass(self, batch: Batch, k, params):
        """Warped logits [B, k, V] of the next tokens."""
        logits = self.drafter(batch.state.hidden)[:, :k]
        return warp(fit_vocabulary(logits, self.vocabulary, (), self.draft_ids), params)

    def cycle(self, batch: Batch, params):
        q_logits = self.draft_pass(batch, self.block_size, params)
        if params.keyed:
            noise = self.noise(batch, self.block_size + 1, params)
            draft = choose(q_logits, noise)
        else:
            q = q_logits.softmax(-1)
            draft = batch.randomness.categorical(q)
        output = self.target_pass(batch, draft, params)
        if params.keyed:
            accepted, following = verify.coupled(draft, choose(output.logits, noise))
        else:
            p = output.logits.softmax(-1)
            accepted, following = verify.rejection(draft, q, p, batch.randomness)
        batch.state.hidden = output.hidden_states[0][torch.arange(len(accepted)), accepted]
        tokens = torch.cat([draft, draft[:, :1]], 1)
        tokens.scatter_(1, accepted[:, None], following[:, None])
        return tokens, accepted + 1


def load_drafter(path, dtype, **options):
    """The network of an export."""
    return Reader.from_pretrained(path, dtype=dtype)


def read_artefacts(fetch, config):
    """The drafter's vocabulary."""
    return {"draft_ids": vocabulary.read(Path(fetch(config[vocabulary.KEY])))}


def from_export(target, tokenizer, drafter, config):
    """The sampler of an exported drafter."""
    keys = ("draft_ids", "block_size")
    return ToySampler(target, tokenizer, drafter, **{key: config[key] for key in keys})

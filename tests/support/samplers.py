"""A DFlash sampler with a random drafter, wrong samplers, and a random Markov head."""

import torch

from decoding.samplers.dflash import DFlashSampler
from models.markov import MarkovHead
from tests.support import tiny


def dflash(model, k, cls=DFlashSampler, **knobs):
    vocabulary = model.config.vocab_size
    drafters = ("layout", "causal", "context", "layers", "tail", "window", "markov_rank")
    own = {name: knobs.pop(name) for name in drafters if name in knobs}
    drafter = tiny.dflash(model, scale=knobs.pop("scale", 2.0), **own)
    tokenizer = tiny.tokenizer(vocabulary)
    return cls(model, tokenizer, drafter, block_size=k, mask_id=vocabulary - 1, **knobs)


def head_of(drafted, tokens=None, seed=7, scale=1.5):
    """A random head in float64, whose terms are as large as logits."""
    head = MarkovHead(tokens or drafted, drafted, 2)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(0, scale, generator=draw)
    return head.double()


def recording(sampler):
    """A class that keeps every pass's logits, in `drafts`, with the prefix that they are after."""

    class Recording(sampler):
        def draft_logits(self, batch, k):
            logits = super().draft_logits(batch, k)
            for tokens, n, row in zip(batch.tokens.tolist(), batch.lengths.tolist(), logits):
                self.drafts.append((tokens[:n], row))
            return logits

    return Recording


def keeps_rejected(sampler):
    """A wrong class: the state of the first rejected token is read as well."""

    class Wrong(sampler):
        def follow(self, batch, states, path, counts):
            super().follow(batch, states, path, (counts + 1).clamp_max(path.shape[1]))

    return Wrong


def forgets_last(sampler):
    """A wrong class: the states are those of one position before."""

    class Wrong(sampler):
        def follow(self, batch, states, path, counts):
            super().follow(batch, states, path.roll(1, 1), counts)

    return Wrong


def verifies_marginals(sampler):
    """A wrong class: it verifies with the distribution of a draft's first token everywhere."""

    class Wrong(sampler):
        def draft_chain(self, batch, k, noise, params):
            draft, q = super().draft_chain(batch, k, noise, params)
            return draft, q[:, :1].expand_as(q)

    return Wrong

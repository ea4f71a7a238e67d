"""Plain autoregressive decoding: the distribution, and the text, of every other sampler."""

import torch
from torch import Tensor

from decoding.engine.params import VERIFY, SamplingParams
from decoding.engine.sampler import Rows, Sampler
from decoding.engine.verify import choose


class PlainSampler(Sampler):
    """One token a target pass, with keyed noise where `verify` promises a text."""

    rules = VERIFY

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """Prefill the target."""
        self.prefill(rows, "target", self.cached_target(rows))

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One token for each request."""
        nothing = rows.tokens[:, :0]
        logits = self.target_pass(rows, nothing, params).logits
        if params.keyed:
            tokens = choose(logits, self.noise(rows, 1, params))
        else:
            tokens = rows.randomness.categorical(logits.softmax(-1))
        return tokens, torch.ones_like(rows.lengths)


def from_export(target, tokenizer, drafter, config: dict) -> PlainSampler:
    """The sampler of an export without a drafter."""
    return PlainSampler(target, tokenizer)

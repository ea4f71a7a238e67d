"""Plain autoregressive decoding, whose distribution every lossless sampler has."""

import torch
from torch import Tensor

from decoding.engine.batch import Batch
from decoding.engine.params import VERIFY, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.engine.verify import choose
from decoding.method import Method


class PlainSampler(Sampler):
    """Autoregressive decoding: one token a target pass.

    With `verify` keyed (coupled, tree) or at temperature 0 the token is the keyed choice, so other
    samplers can be compared with it token by token; otherwise it is drawn.
    """

    rules = VERIFY
    chains = True

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        self.prefill(batch, "target", self.cached_target(batch))

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        nothing = batch.tokens[:, :0]
        logits = self.target_pass(batch, nothing, params).logits
        if params.keyed:
            tokens = choose(logits, self.noise(batch, 1, params))
        else:
            tokens = batch.randomness.categorical(logits.softmax(-1))
        return tokens, torch.ones_like(batch.lengths)


METHOD = Method(PlainSampler)

"""Plain autoregressive decoding, whose distribution every lossless sampler has."""

import torch
from torch import Tensor

from decoding.engine.batch import Batch
from decoding.engine.params import VERIFY, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.method import Method


class PlainSampler(Sampler):
    """Autoregressive decoding: one token a target pass.

    With `verify` keyed (coupled, tree) or at temperature 0 the token is the keyed choice, so other
    samplers can be compared with it token by token; otherwise it is drawn.
    """

    rules = VERIFY
    chains = True
    reads_prefixes = True

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        self.prefill(batch, "target", self.cached_target(batch))

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        return self.one_token(batch, params)[0], torch.ones_like(batch.lengths)


METHOD = Method(PlainSampler)

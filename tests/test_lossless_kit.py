"""The kit that proves a sampler lossless: samplers that are pass, broken ones fail, each check."""

import pytest
import torch

from decoding.engine import verify
from decoding.samplers.deer import DeerSampler
from decoding.samplers.dflash import DFlashSampler
from tests.support import lossless, tiny


def deer(target, tokenizer, cls=DeerSampler):
    V = target.config.vocab_size
    drafter = tiny.causal_lm(V + 2, seed=1).to(target.dtype)
    return cls(target, tokenizer, drafter, block_size=2, mask_id=V, sep_id=V + 1)


def dflash(target, tokenizer):
    mask = target.config.vocab_size - 1
    return DFlashSampler(target, tokenizer, tiny.dflash(target), block_size=2, mask_id=mask)


@pytest.mark.slow
@pytest.mark.parametrize("make", [deer, dflash])
def test_right_samplers_pass(make):
    lossless.prove(make)


class DraftsAgain(DeerSampler):
    """Wrong: q is not what the draft was drawn from."""

    def draft_chain(self, batch, k, noise, params):
        draft, q = super().draft_chain(batch, k, noise, params)
        return draft, q if q is None else q.flip(-1)


class OwnNoise(DeerSampler):
    """Wrong: the noise is of the row in the batch."""

    def noise(self, batch, count, params):
        noise = super().noise(batch, count, params)
        return noise if noise is None or len(noise) == 1 else noise.roll(1, 0)


class ReadsItsNeighbour(DeerSampler):
    """Wrong: what is emitted depends on how many requests there are."""

    def cycle(self, batch, params):
        tokens, counts = super().cycle(batch, params)
        return (tokens + (len(batch.requests) > 1)) % self.vocabulary, counts


class OwnRule(DeerSampler):
    """Right or not: it cannot be told, as it does not use the project's verification."""

    def cycle(self, batch, params):
        if params.keyed:
            return super().cycle(batch, params)
        with pytest.MonkeyPatch.context() as patch:
            for rule, right in RIGHT.items():
                patch.setattr(verify, rule, right)
            return super().cycle(batch, params)


RIGHT = {rule: getattr(verify, rule) for rule in ("rejection", "block")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "check", "rule", "says"),
    [
        (DraftsAgain, lossless.exact_distribution, "block", "total variation"),
        (OwnRule, lossless.wrong_rules_fail, "rejection", "does not call"),
        (OwnNoise, lossless.identity, "coupled", "not plain decoding's"),
        (ReadsItsNeighbour, lossless.batches_and_arrivals, "rejection", "another in a batch"),
    ],
)
def test_each_check_fails_a_broken_sampler(cls, check, rule, says):
    check(deer, rule)
    with pytest.raises(AssertionError, match=says):
        check(lambda target, tokenizer: deer(target, tokenizer, cls), rule)


def test_a_drafter_that_is_never_right_proves_nothing():
    with pytest.raises(AssertionError, match="no draft was accepted"):
        lossless.identity(silent, "coupled")


def silent(target, tokenizer):
    """A drafter that always drafts the same token, which the target never says."""
    with torch.no_grad():
        target.lm_head.weight[0] = 0
        target.lm_head.weight[1:] += 10 * target.lm_head.weight[1:]
    sampler = deer(target, tokenizer)
    logits = sampler.draft_logits

    def draft_logits(batch, k):
        return torch.where(torch.arange(sampler.vocabulary) == 0, 99.0, 0 * logits(batch, k))

    sampler.draft_logits = draft_logits
    return sampler

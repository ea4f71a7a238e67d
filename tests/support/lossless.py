"""The proof that a sampler is lossless, for whoever adds one: `prove` runs every check.

    def make(target, tokenizer):
        return FooSampler(target, tokenizer, drafter_for(target), block_size=3)

    def test_lossless():
        prove(make)

Each check has a negative control: the proof also fails a rule, noise or a count that is wrong, so a
sampler that does not use what it is given (its verification, its noise) cannot pass.
"""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine import verify
from decoding.engine.params import KEYED, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.arrivals import texts_of
from tests.support.exact import always_take_the_target, distance, forget_the_temperature
from tests.support.results import ids

Make = Callable[[PreTrainedModel, PreTrainedTokenizerBase], Sampler]

EXACT, WRONG = 1e-9, 1e-3  # total variation
V = 12
PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6], [11, 10], [6, 6, 6, 0, 9], [4, 4]]
SEEDS = [5, 71, 3, 900, 12, 8]
SMALL = {  # by name: vocabulary, new tokens and warps of an exact distribution
    "hot": {"max_new_tokens": 2, "temperature": 1.7},
    "top-k": {"max_new_tokens": 2, "top_k": 2},
    "penalty": {"max_new_tokens": 2, "repetition_penalty": 1.5},
    "three tokens": {"max_new_tokens": 3},
    "greedy": {"max_new_tokens": 3, "temperature": 0.0},
}
# Arrivals: how many requests come before a cycle, and which one is cancelled then.
STAGGERED = [(2, -1), (1, -1), (0, -1), (1, 0), (1, -1), (1, -1)]


def prove(make: Make, layers: int = 2) -> None:
    """Prove that a sampler decodes losslessly, under each rule that it offers.

    Args:
        make: Makes the sampler of a target and its tokenizer, with a drafter that is no copy of it.
            Called with targets of 3 tokens (float64) and of 12 (float32).
        layers: Decoder layers of the targets.

    Raises:
        AssertionError: A text or a distribution is not plain decoding's, or a wrong rule passes.
    """
    sampler = make(*_small(layers))
    for rule in {"rejection", "block"} & {*sampler.rules}:
        exact_distribution(make, rule, layers)
        wrong_rules_fail(make, rule, layers)
    for rule in {*KEYED} & {*sampler.rules}:
        identity(make, rule, layers)
        wrong_noise_fails(make, rule, layers)
    for rule in sampler.rules:
        batches_and_arrivals(make, rule, layers)


def exact_distribution(make: Make, rule: str, layers: int = 2) -> None:
    """Check the exact output distribution, over every outcome of the sampler's randomness."""
    for name, options in SMALL.items():
        params = SamplingParams(verify=rule, **options)
        found = distance(make(*_small(layers)), params)
        assert found <= EXACT, f"verify={rule}, {name}: total variation {found}"
    ending = make(*_small(layers, eos_token_id=2))
    found = distance(ending, SamplingParams(max_new_tokens=3, verify=rule), {2})
    assert found <= EXACT, f"verify={rule}, end of text inside a block: total variation {found}"


def wrong_rules_fail(make: Make, rule: str, layers: int = 2) -> None:
    """Check that the distribution is wrong under wrong rules: the negative control."""
    params = SamplingParams(max_new_tokens=2, verify=rule)
    for wrong in (always_take_the_target, forget_the_temperature):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, rule, wrong(getattr(verify, rule)))
            found = distance(make(*_small(layers)), params)
        assert found > WRONG, (
            f"verify={rule}: with the wrong rule {wrong.__name__} the distribution is right, so "
            f"the sampler does not call decoding.engine.verify.{rule}"
        )


def identity(make: Make, rule: str, layers: int = 2) -> None:
    """Check that the text is plain decoding's with the same seed, token for token."""
    accepted = rejected = 0
    for options in ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}):
        params = SamplingParams(**{"max_new_tokens": 18, "verify": rule} | options)
        target, tokenizer = _large(layers)
        found = make(target, tokenizer).generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == _alone(PlainSampler(target, tokenizer), params), (
            f"verify={rule}, {options}: the text is not plain decoding's"
        )
        for result in found:
            accepted += sum(n - 1 for n in result.stats.emitted)
            rejected += result.stats.drafted + len(result.stats.emitted) - len(result.token_ids)
    assert accepted, f"verify={rule}: no draft was accepted, so nothing is proved: another seed?"
    assert rejected, f"verify={rule}: no draft was rejected, so nothing is proved: another drafter?"


def wrong_noise_fails(make: Make, rule: str, layers: int = 2) -> None:
    """Check that noise of other positions, or a token too many, gives another text."""
    params = SamplingParams(max_new_tokens=18, verify=rule)
    target, tokenizer = _large(layers)
    expected = _alone(PlainSampler(target, tokenizer), params)
    for wrong in (noise_of_the_block, one_too_many):
        sampler = make(target, tokenizer)
        sampler.__class__ = wrong(type(sampler))
        found = ids(sampler.generate(PROMPTS, params, seeds=SEEDS))
        assert found != expected, f"verify={rule}: the text is the same with {wrong.__name__}"


def batches_and_arrivals(make: Make, rule: str, layers: int = 2) -> None:
    """Check that a request's text does not depend on its batch, nor on when it came."""
    sampler = make(*_large(layers, eos_token_id=4))
    params = SamplingParams(max_new_tokens=14, verify=rule)
    alone = _alone(sampler, params)
    assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == alone, (
        f"verify={rule}: a request's text is another in a batch"
    )
    for prefill_tokens in (None, 3):
        found = texts_of(sampler, params, PROMPTS, SEEDS, STAGGERED, prefill_tokens)
        assert len(found) >= len(PROMPTS) - 1  # one was cancelled
        for request, text in found.items():
            assert text == alone[request], f"verify={rule}: request {request}, which came later"


def noise_of_the_block(cls):
    """Wrong: the noise is keyed by the block's number instead of the absolute position."""

    class Wrong(cls):
        def noise(self, batch, count, params):
            with _shifted(batch, -(batch.lengths % count)):
                return super().noise(batch, count, params)

    return Wrong


def one_too_many(cls):
    """Wrong: a drafted token is emitted though it was not accepted."""

    class Wrong(cls):
        def cycle(self, batch, params):
            tokens, counts = super().cycle(batch, params)
            return tokens, (counts + 1).clamp_max(tokens.shape[1])

    return Wrong


@contextmanager
def _shifted(batch, by):
    right = batch.lengths
    batch.lengths = right + by
    yield
    batch.lengths = right


def _small(layers, **config):
    return tiny.causal_lm(3, layers=layers, **config), tiny.tokenizer(3)


def _large(layers, **config):
    return tiny.causal_lm(V, layers=layers, **config).float(), tiny.tokenizer(V)


def _alone(sampler, params):
    return [ids(sampler.generate([p], params, seeds=[s]))[0] for p, s in zip(PROMPTS, SEEDS)]

"""Exact output distributions of tiny samplers, and wrong rules, which change them."""

import torch

from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.samplers.deer import DeerSampler
from tests.support import tiny
from tests.support.enumerating import EnumeratingRandomness, output_distribution

CASES = {
    "two tokens, k=3": dict(vocabulary=2, k=3, new=3),
    "three tokens, k=2": dict(vocabulary=3, k=2, new=2),
    "k beyond the answer": dict(vocabulary=2, k=4, new=2),
    "k=1": dict(vocabulary=3, k=1, new=3),
    "eos inside a block": dict(vocabulary=3, k=2, new=3, eos=2),
    "cold": dict(vocabulary=3, k=2, new=2, temperature=0.4),
    "hot": dict(vocabulary=3, k=2, new=2, temperature=1.7),
    "greedy": dict(vocabulary=3, k=2, new=4, temperature=0.0),
    "top-k": dict(vocabulary=4, k=2, new=2, top_k=2),
    "top-p": dict(vocabulary=3, k=2, new=2, top_p=0.8),
    "min-p": dict(vocabulary=3, k=2, new=2, min_p=0.3),
    "penalty": dict(vocabulary=3, k=2, new=2, repetition_penalty=1.5),
    "penalties of the answer": dict(
        vocabulary=3, k=2, new=3, presence_penalty=1.0, frequency_penalty=-0.7
    ),
    "bias": dict(vocabulary=3, k=2, new=2, logit_bias=((0, 1.5), (2, -2.0))),
    "min_tokens": dict(vocabulary=3, k=2, new=3, eos=2, min_tokens=2),
}


def deer(vocabulary, k, eos=None, seed=0, drafter_vocabulary=None, **form):
    target = tiny.causal_lm(vocabulary, seed=seed, eos_token_id=eos)
    size = drafter_vocabulary or vocabulary + 2
    tokens = {"mask_id": size - 2, "sep_id": size - 1}
    if form.get("attention") == "causal":  # PARD: exactly the target's vocabulary
        size, tokens = vocabulary, {"mask_id": vocabulary - 1}
    drafter = tiny.causal_lm(size, seed=seed + 1)
    return DeerSampler(target, tiny.tokenizer(vocabulary), drafter, block_size=k, **tokens, **form)


def distance(sampler, params, eos=()):
    """Return the total variation of a sampler's distribution from plain decoding's."""
    prompt = [0, 1, 1]
    found = output_distribution(sampler, prompt, params)
    expected = tiny.plain_distribution(sampler.target, prompt, params, eos)
    return tiny.total_variation(found, expected)


def always_take_the_target(rule):
    """Wrong: a correction is drawn from p instead of the residual."""

    def wrong(draft, q, p, randomness):
        accepted, _ = rule(draft, q, p, randomness)
        return accepted, randomness.categorical(verify._at(p, accepted))

    return wrong


def go_on_after_a_rejection(_):
    """Wrong: tokens after a rejection are counted, which were conditioned on the wrong prefix."""

    def wrong(draft, q, p, randomness):
        coins = randomness.accept(verify.acceptance_probability(draft, q, p))
        accepted = coins.sum(1)
        rest = verify.residual(verify._at(p, accepted), verify._drafted_at(q, accepted))
        return accepted, randomness.categorical(rest)

    return wrong


def forget_the_temperature(rule):
    """Wrong: the draft is verified with a q that it was not drawn from."""
    return lambda draft, q, p, randomness: rule(draft, (q.log() / 2).softmax(-1), p, randomness)


def first_cycle(sampler, rule):
    """E[tokens emitted by the first target pass], by enumeration."""
    params = SamplingParams(max_new_tokens=sampler.block_size + 1, verify=rule)
    mean, paths = 0.0, [[]]
    while paths:
        randomness = EnumeratingRandomness(paths)
        with torch.inference_mode():
            rows = first_rows(sampler, [0, 1, 1], len(paths), params, randomness)
            _, counts = sampler.cycle(rows, params)
        mean += sum(w * c for w, c in zip(randomness.weight, counts.tolist()))
        paths = randomness.left
    return mean


def first_rows(sampler, prompt, count, params, randomness):
    capacity = len(prompt) + params.max_new_tokens + sampler.margin(params)
    rows = Batch([prompt] * count, capacity, randomness, "cpu")
    sampler.begin(rows, params)
    return rows

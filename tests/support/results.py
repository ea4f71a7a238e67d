"""Token ids and pass counts of results."""

from decoding.samplers.plain import PlainSampler


def ids(results):
    """Return the tokens of each result."""
    return [r.token_ids for r in results]


def passes(results):
    """Return how many passes the target made for all results."""
    return sum(r.stats.target_passes for r in results)


def as_plain(sampler, prompts, params):
    """Check that a sampler's texts are those of plain decoding; return its results."""
    found = sampler.generate(prompts, params)
    plain = PlainSampler(sampler.target, sampler.tokenizer)
    assert ids(found) == ids(plain.generate(prompts, params))
    return found

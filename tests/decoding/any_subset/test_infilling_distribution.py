"""Exactness of infilling: every way of drafting has the distribution of one token at a time."""

import pytest
import torch

from decoding.engine import verify
from decoding.engine.params import SamplingParams
from decoding.samplers import asarm
from decoding.samplers.asarm import DRAFTS, AsarmSampler
from tests.support import subsets, tiny
from tests.support.enumerating import output_distribution
from tests.support.exact import always_take_the_target

TOKENS = [1, 0, 0, 1]


class Counted(AsarmSampler):
    """Theorem 1 on every sample: calls never exceed the tokens that were filled in."""

    def generate(self, *args, **kwargs):
        results = super().generate(*args, **kwargs)
        for r in results:
            assert r.stats.target_passes == len(r.stats.emitted) <= len(r.token_ids)
            assert sum(r.stats.emitted) == len(r.token_ids)
            assert min(r.stats.emitted) >= 1
        return results


def sampler(V, k, draft, model=None, cls=Counted, **config):
    model = model or subsets.network(V, **config)
    return cls(model, tiny.tokenizer(V), mask_id=V, draft=draft, block_size=k)


def distance(s, prompt, params):
    distribution = output_distribution(s, prompt, params)
    return tiny.total_variation(distribution, subsets.infill_distribution(s.target, prompt, params))


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.filterwarnings("ignore:block_size=")
def test_the_distribution_on_every_prompt_of_four_tokens(draft, k):
    s, params = sampler(2, k, draft), SamplingParams(verify="rejection")
    for given in subsets.patterns(4):
        assert distance(s, subsets.template(TOKENS, given), params) <= 1e-9


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.filterwarnings("ignore:block_size=")
def test_the_distribution_on_prompts_of_six_tokens(draft):
    s, params = sampler(2, 2, draft, seed=3), SamplingParams(verify="rejection")
    picks = torch.randperm(63, generator=torch.Generator().manual_seed(0))[:3].tolist()
    for i in picks:
        prompt = subsets.template([1, 0, 1, 1, 0, 0], subsets.patterns(6)[i])
        assert distance(s, prompt, params) <= 1e-9


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_distribution_of_xlnet(draft):
    s = sampler(2, 3, draft, model=subsets.xlnet(2))
    params = SamplingParams(verify="rejection")
    for given in subsets.patterns(4):
        if any(given):
            assert distance(s, subsets.template(TOKENS, given), params) <= 1e-9


CASES = {
    "block": dict(verify="block"),
    "cold": dict(temperature=0.4),
    "hot": dict(temperature=1.7),
    "greedy": dict(temperature=0.0),
    "top-k": dict(top_k=2),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.3),
    "penalty": dict(repetition_penalty=1.5),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", CASES)
def test_the_distribution_of_a_warped_model(name, draft):
    params = SamplingParams(**{"verify": "rejection", **CASES[name]})
    s = sampler(3, 3, draft)
    assert distance(s, [None, 2, None, None, 0], params) <= 1e-9


class Parallel(AsarmSampler):
    """Wrong, as a discrete diffusion sampler is: independent drafts are emitted unverified."""

    def cycle(self, batch, params):
        tokens, counts = super().cycle(batch, params)
        left = batch.state.size - batch.lengths
        tokens = torch.cat([tokens[:, :1], batch.state.draft], 1)
        batch.state.draft = tokens[:, :0]
        batch.state.cached = batch.lengths
        return tokens, torch.full_like(counts, tokens.shape[1]).minimum(left)


class LateDrafts(AsarmSampler):
    """Wrong: verifies the drafts with q's of other positions than they were drawn from."""

    def cycle(self, batch, params):
        out = super().cycle(batch, params)
        if batch.state.q is not None:
            batch.state.q = batch.state.q.roll(1, 1)
        return out


class SeesTheDrafts(AsarmSampler):
    """Wrong: a draft is verified conditioned on the drafts after it, too."""

    def target_logits(self, batch, draft, A, ahead, params):
        logits = super().target_logits(batch, draft, A, ahead, params)
        return logits[:, -1:].expand(-1, A, -1, -1) if A > 1 else logits


HOLES = [None, 1, None, None]


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_a_wrong_rule_fails_the_same_test(monkeypatch, draft):
    s = sampler(3, 3, draft)
    assert distance(s, HOLES, SamplingParams(verify="block")) <= 1e-9
    monkeypatch.setattr(verify, "block", always_take_the_target(verify.rejection))
    assert distance(s, HOLES, SamplingParams(verify="block")) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "draft"),
    [(Parallel, "assd"), (LateDrafts, "assd"), (LateDrafts, "assd_fused"),
     (SeesTheDrafts, "assd"), (SeesTheDrafts, "assd_fused"), (SeesTheDrafts, "assd_ngram")],
)  # fmt: skip
def test_a_wrong_sampler_fails_the_same_test(wrong, draft):
    s = sampler(3, 3, draft, cls=wrong)
    assert distance(s, HOLES, SamplingParams(verify="rejection")) > 1e-3


def test_bigrams_by_hand():
    """Of `a b a c . a`, with the dot not known yet: after a came b once and c once."""
    text = torch.tensor([[0, 1, 0, 2, 0, 0]])
    known = torch.tensor([[True, True, True, True, False, True]])
    at = torch.tensor([[5]])
    # Position 5's left neighbour is position 4, drafted as `a`.
    assert asarm.bigram_counts(text, known, at, 4, 3).tolist() == [[0, 0.5, 0.5, 0]]
    # Position 0 has no left neighbour: the frequency of each token in the text.
    at = torch.tensor([[0]])
    assert asarm.bigram_counts(text, known, at, 4, 3)[0].tolist() == pytest.approx(
        [0.6, 0.2, 0.2, 0]
    )
    nothing = torch.zeros_like(known)
    assert asarm.bigram_counts(text, nothing, at, 4, 3)[0].tolist() == pytest.approx(
        [1 / 3] * 3 + [0]
    )

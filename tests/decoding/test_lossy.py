"""Lossy options are named in the stats, and run only for a user who allows them."""

import re

import pytest
import torch

from decoding import generate
from decoding.engine import verify
from decoding.engine.params import SamplingParams
from decoding.samplers.asarm import DRAFTS, METHOD, AsarmSampler
from tests.support import subsets, tiny
from tests.support.enumerating import EnumeratingRandomness, output_distribution

V = 3
HOLES = [None, 1, None]


def sampler(tolerance, draft="assd"):
    model, letters = subsets.network(V), tiny.tokenizer(V)
    options = {"mask_id": V, "draft": draft, "block_size": 3, "tolerance": tolerance}
    return AsarmSampler(model, letters, **options)


def params(**values):
    return SamplingParams(**{"verify": "rejection", "lossy": True, **values})


@pytest.mark.parametrize(("tolerance", "accepted"), [(0.0, 1 / 3), (0.1, 1 / 3 + 0.1), (1.0, 1.0)])
def test_the_tolerance_by_hand(tolerance, accepted):
    """p = (0.2, 0.8), q = (0.6, 0.4), token 0 drafted; the bonus is token 0, of p = (0.5, 0.5)."""
    p = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]], dtype=torch.float64)
    q, randomness = torch.tensor([[[0.6, 0.4]]], dtype=torch.float64), EnumeratingRandomness([[1]])
    verify.rejection(torch.tensor([[0]]), q, p, randomness, tolerance)
    assert randomness.weight[0] == pytest.approx(accepted * 0.5)


def tolerant_distribution(model, epsilon):
    """Algorithm 1 on two holes, written out: the first token is accepted, the second is a draft."""
    prompt = [(1, HOLES[1])]

    def probs(generated, position):
        return subsets.one_position(model, prompt, generated, position)[:V].softmax(-1)

    distribution, q = {}, probs([], 2)
    for a, weight in enumerate(probs([], 0).tolist()):
        p = probs([(0, a)], 2)
        accept = (p / q + epsilon).clamp_max(1)
        rest = (p - q).clamp_min(0)
        second = q * accept + (q * (1 - accept)).sum() * rest / rest.sum()
        distribution |= {(a, b): weight * second[b].item() for b in range(V)}
    return distribution


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 1.0])
def test_the_distribution_with_a_tolerance_is_algorithm_1_written_out(epsilon):
    s = sampler(epsilon)
    distribution, lossless = (
        output_distribution(s, HOLES, params()),
        subsets.infill_distribution(s.target, HOLES, params()),
    )
    assert tiny.total_variation(distribution, tolerant_distribution(s.target, epsilon)) <= 1e-9
    assert (tiny.total_variation(distribution, lossless) <= 1e-9) == (epsilon == 0)


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_a_tolerance_changes_the_distribution_and_says_so(draft):
    s, holes = sampler(0.3, draft), [None, 1, None, None]
    lossless = subsets.infill_distribution(s.target, holes, params())
    assert tiny.total_variation(output_distribution(s, holes, params()), lossless) > 1e-3
    assert s.generate([holes], params(seed=1))[0].stats.lossy == "tolerance=0.3"


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_it_runs_for_those_only_who_allow_it(draft):
    with pytest.raises(ValueError, match=re.escape("tolerance=0.3 is lossy")) as error:
        sampler(0.3, draft).generate([HOLES], params(lossy=False))
    assert "lossy=true" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_lossless_is_not_called_lossy():
    for s in (sampler(0.0), sampler(0.3, "sequential")):
        for allowed in (False, True):
            [result] = s.generate([HOLES], params(lossy=allowed, seed=1))
            assert result.stats.lossy == ""


@pytest.mark.parametrize("values", [{"verify": "coupled"}, {"verify": "block"}, {"temperature": 0}])
def test_a_tolerance_where_it_means_nothing_is_refused(values):
    with pytest.raises(ValueError, match=r"tolerance=0\.3 loosens verify=") as error:
        sampler(0.3).generate([HOLES], params(**values))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tolerance", [-0.1, 1.5, float("nan")])
def test_a_tolerance_is_a_probability(tolerance):
    with pytest.raises(ValueError, match=r"tolerance=.* is not allowed: it must be "):
        METHOD.check({"tolerance": tolerance})


def test_generate_says_lossy(monkeypatch, capsys):
    for tolerance in (0.0, 0.3):
        monkeypatch.setattr(generate, "load", lambda *a, t=tolerance, **k: sampler(t))
        words = ["model=m", "prompt=a<hole:3>b", "verify=rejection", "lossy=true", "seed=1"]
        generate.run(words)
        assert ("lossy: tolerance=0.3" in capsys.readouterr().out) == (tolerance > 0)

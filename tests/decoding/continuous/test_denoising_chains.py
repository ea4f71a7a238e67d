"""The coupled diffusion chain: x_0 is distributed as by the target's own chain, in closed form."""

import pytest
import torch
from scipy import stats

from decoding.continuous.denoising_chains import follow, follow_relaxed, join, run_chain
from models.densities import Gaussian
from tests.support.drawing import TorchRandomness

N = 200_000
# (slope, shift, std) of each step of a chain in one dimension: x_0 is Gaussian.
TARGET = [(0.9, 0.1, 0.6), (0.7, -0.2, 0.5), (0.8, 0.3, 0.3)]
NEAR = [(0.9, 0.2, 0.6), (0.7, -0.1, 0.5), (0.8, 0.36, 0.3)]
OTHER = [(0.9, 0.2, 0.5), (0.7, -0.1, 0.4), (0.8, 0.36, 0.35)]


def head(chain):
    def step(i, x):
        slope, shift, std = chain[i]
        return Gaussian(slope * x + shift, torch.full_like(x, std))

    return step


def mean_and_std(chain):
    """Mean and standard deviation of x_0."""
    mean, variance = 0.0, 1.0
    for slope, shift, std in chain:
        mean, variance = slope * mean + shift, slope**2 * variance + std**2
    return mean, variance**0.5


def p_value(x, chain):
    return stats.kstest(x.flatten().numpy(), stats.norm(*mean_and_std(chain)).cdf).pvalue


def followed(draft, rule=follow, seed=0, **options):
    randomness = TorchRandomness(seed)
    start = randomness.normal((N, 1))
    chain = run_chain(head(draft), start, len(draft), randomness)
    return chain, *rule(chain, head(TARGET), randomness, **options)


@pytest.mark.parametrize("options", [{}, {"coupled": 2}, {"coupled": 1}, {"align": False}])
@pytest.mark.parametrize("draft", [NEAR, OTHER])
def test_x_0_has_the_distribution_of_the_targets_own_chain(draft, options):
    chain, x, together = followed(draft, **options)
    assert p_value(chain.states[-1], draft) > 1e-3
    assert p_value(chain.states[-1], TARGET) < 1e-9
    assert p_value(x, TARGET) > 1e-3
    assert torch.equal((x == chain.states[-1])[:, 0], together)


def test_accepted_and_rejected_are_right_together_but_not_alone():
    _, x, together = followed(NEAR)
    assert p_value(x[together], TARGET) < 1e-9
    assert p_value(x[~together], TARGET) < 1e-9


def test_alignment_raises_the_acceptance():
    _, _, aligned = followed(NEAR)
    _, _, loose = followed(NEAR, align=False)
    assert aligned.double().mean() > loose.double().mean() + 0.1


def test_how_many_steps_to_couple_depends_on_the_errors_of_the_draft():
    """Errors that cancel on the way: sharing noise until the end beats parting at once."""
    cancelling = [(0.9, 0.2, 0.6), (0.7, -0.27, 0.5), (0.8, 0.3, 0.3)]
    for draft, better in ((cancelling, "last"), ([(0.9, 0.3, 0.6), *TARGET[1:]], "all")):
        _, _, every = followed(draft)
        _, _, last = followed(draft, coupled=1)
        assert (last.double().mean() > every.double().mean()) == (better == "last")


def test_the_first_step_that_parts_is_the_closed_form():
    """One step, equal variances: 2 Phi(-|Delta| / 2 sigma)."""
    randomness = TorchRandomness(0)
    start = randomness.normal((N, 1))
    chain = run_chain(head(NEAR[:1]), start, 1, randomness)
    _, together = follow(chain, head(TARGET[:1]), randomness)
    expected = 2 * stats.norm.cdf(-0.1 / 0.6 / 2)
    assert together.double().mean().item() == pytest.approx(expected, abs=4 * 0.25 / N**0.5)


def test_where_nothing_is_drafted_the_target_runs_alone():
    drafted = torch.arange(N) % 3 > 0
    chain, x, together = followed(NEAR, drafted=drafted)
    own, noise = x[~drafted, 0].numpy(), chain.states[0][~drafted, 0].numpy()
    assert stats.pearsonr(own, noise).pvalue > 1e-3  # not even x_T is shared
    assert p_value(x[~drafted], TARGET) > 1e-3
    assert p_value(x, TARGET) > 1e-3
    assert not together[~drafted].any()


def test_the_published_sigma_is_refused():
    _, x, _ = followed(OTHER, follow_relaxed)
    assert p_value(x, TARGET) < 1e-9


def test_the_inner_temperature_is_refused():
    _, x, together = followed(NEAR, follow_relaxed, inner_temperature=42.0)
    assert p_value(x, TARGET) < 1e-9
    assert together.double().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("align", [True, False])
def test_with_equal_variances_the_published_rule_is_exact(align):
    """Sigma is 1 then, and shared noise on the way is a coupling too."""
    _, x, _ = followed(NEAR, follow_relaxed, align=align)
    assert p_value(x, TARGET) > 1e-3


def test_joined_chains_are_followed_as_one_batch():
    randomness = TorchRandomness(0)
    starts = [randomness.normal((50_000, 1, 1)) for _ in "ab"]
    chains = [run_chain(head(NEAR), start, 3, randomness) for start in starts]
    both = join(chains)
    assert both.states[-1].shape == (50_000, 2, 1)
    assert torch.equal(both.kernels[1].mean[:, 1:], chains[1].kernels[1].mean)
    x, _ = follow(both, head(TARGET), randomness)
    assert p_value(x[:, 0], TARGET) > 1e-3
    assert p_value(x[:, 1], TARGET) > 1e-3

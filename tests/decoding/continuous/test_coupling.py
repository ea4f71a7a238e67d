"""Accept, residual and coupling against closed forms; the published rules must fail the same tests.

200,000 draws and fixed seeds: a distribution is rejected below p = 1e-3; wrong ones give far less.
"""

import math

import pytest
import torch
from scipy import stats

from decoding.bench.image_metrics import permutation_test
from decoding.continuous.coupling import (
    acceptance_probability,
    maximal,
    mirror,
    reflection,
    relaxed,
    residual,
)
from decoding.engine.randomness import KeyedRandomness
from models.densities import Gaussian, GaussianMixture
from tests.support.drawing import TorchRandomness, gaussian_overlap

N = 200_000


def gaussian(mean, std):
    mean, std = (torch.tensor(v, dtype=torch.float64).expand(N, -1) for v in (mean, std))
    return Gaussian(mean, std)


def mixture(weight, mean, std):
    tensors = (torch.tensor(v, dtype=torch.float64) for v in (weight, mean, std))
    logits, mean, std = (t.expand(N, *t.shape) for t in tensors)
    return GaussianMixture(logits.log(), mean, std)


def projected_cdf(density, direction):
    """The distribution function of <x, direction>, in closed form."""
    if isinstance(density, Gaussian):
        weight, mean, std = torch.ones(1), density.mean[:1], density.std[:1]
    else:
        weight, mean, std = density.logits[0].softmax(-1), density.mean[0], density.std[0]
    means = (mean @ direction).numpy()
    stds = ((std * direction) ** 2).sum(-1).sqrt().numpy()
    return lambda v: sum(
        w * stats.norm.cdf(v, m, s) for w, m, s in zip(weight.tolist(), means, stds)
    )


def p_value(y, density):
    """The least Kolmogorov-Smirnov p of draws [N, D] along each axis and both diagonals."""
    D = y.shape[-1]
    directions = torch.eye(D, dtype=torch.float64)
    if D == 2:
        diagonals = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        directions = torch.cat([directions, diagonals / 2**0.5])
    return min(stats.kstest((y @ d).numpy(), projected_cdf(density, d)).pvalue for d in directions)


ONE = (gaussian([0.4], [1.0]), gaussian([0.0], [1.0]))
WIDE = (gaussian([0.0], [0.8]), gaussian([0.3], [1.1]))
PLANE = (gaussian([0.3, -0.5], [0.7, 1.3]), gaussian([-0.2, 0.1], [0.7, 1.3]))
SKEW = (gaussian([0.0, 0.0], [1.0, 0.6]), gaussian([0.2, 0.3], [0.8, 1.0]))
HILLS = (
    mixture([0.5, 0.5], [[-1.0], [1.5]], [[0.5], [0.7]]),
    mixture([0.3, 0.7], [[-1.2], [1.0]], [[0.6], [0.5]]),
)
ISLES = (
    mixture([0.6, 0.4], [[-1.0, 0.0], [1.0, 0.5]], [[0.5, 0.9], [0.7, 0.4]]),
    mixture([0.4, 0.6], [[-0.8, 0.3], [1.1, 0.0]], [[0.6, 0.6], [0.5, 0.6]]),
)
PAIRS = {"one": ONE, "wide": WIDE, "plane": PLANE, "skew": SKEW, "hills": HILLS, "isles": ISLES}
RULES = {"one": [maximal, reflection], "wide": [maximal, reflection], "plane": [reflection],
         "skew": [reflection], "hills": [maximal], "isles": [maximal]}  # fmt: skip


def drawn(rule, q, p, seed=0, **options):
    randomness = TorchRandomness(seed)
    x = q.sample(randomness)
    return x, *rule(x, q, p, randomness, **options)


@pytest.mark.parametrize(("rule", "name"), [(r, n) for n, rules in RULES.items() for r in rules])
def test_the_output_has_the_targets_distribution(rule, name):
    q, p = PAIRS[name]
    x, y, together = drawn(rule, q, p)
    assert p_value(y, p) > 1e-3
    assert p_value(x, p) < 1e-9  # negative control: the drafter's own distribution
    assert torch.equal((x == y).all(-1), together)
    # Scheffé: the overlap of p and q is E_q min(1, p / q).
    overlap = acceptance_probability(x, q, p)
    error = (overlap.var() / N).sqrt().item() + 0.5 / N**0.5
    assert together.double().mean().item() == pytest.approx(overlap.mean().item(), abs=4 * error)


@pytest.mark.slow
def test_in_order_nothing_is_drawn_after_the_first_rejection():
    """Pairs of tokens: the second is right where the first is accepted, and not drawn elsewhere."""
    q, p = (type(d)(*(t.unflatten(0, (-1, 2)) for t in d)) for d in HILLS)
    randomness = KeyedRandomness(range(N // 2))
    x = q.sample(randomness)
    y, together = maximal(x, q, p, randomness, in_order=True)
    one = type(p)(*(t[:, 0] for t in p))
    accepted = together[:, 0]
    assert p_value(y[:, 0], one) > 1e-3
    assert p_value(y[accepted, 1], one) > 1e-3
    assert p_value(y[:, 1], one) < 1e-9  # negative control
    assert (y[~accepted & ~together[:, 1], 1] == 0).all()


def test_acceptance_of_equal_variances_is_the_closed_form():
    for q, p in (ONE, PLANE):
        _, _, together = drawn(reflection, q, p)
        z = ((q.mean - p.mean) / p.std)[0].norm().item()
        expected = 2 * stats.norm.cdf(-z / 2)
        assert gaussian_overlap(q, p)[0].item() == pytest.approx(expected, rel=1e-12)
        error = math.sqrt(expected * (1 - expected) / N)
        assert together.double().mean().item() == pytest.approx(expected, abs=4 * error)


@pytest.mark.parametrize("rule", [maximal, reflection])
def test_equal_densities_are_always_accepted(rule):
    for name in ("one", "plane"):
        _, p = PAIRS[name]
        _, _, together = drawn(rule, p, p)
        assert together.all()


SIGMA = torch.full((N,), math.log(1.5))
WRONG = {
    "the factor Sigma": (ONE, {"log_sigma": SIGMA}),
    "the factor Sigma below one": (ONE, {"log_sigma": -SIGMA}),
    "Sigma of mixtures": (HILLS, {"log_sigma": SIGMA}),
    "the inner temperature": (ONE, {"inner_temperature": 42.0}),
    "the inner temperature of mixtures": (HILLS, {"inner_temperature": 42.0}),
    "a capped loop": (ONE, {"tries": 1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_published_rules_are_refused(name):
    (q, p), options = WRONG[name]
    _, y, _ = drawn(relaxed, q, p, **{"tries": 12} | options)
    assert p_value(y, p) < 1e-9


@pytest.mark.parametrize(("std", "accepted"), [(1.0, 0.990), (1.25, 0.795)])
def test_the_inner_temperature_divides_deviations_and_not_log_determinants(std, accepted):
    """Drafts of N(0, 1) for N(6, std^2), accepted as by the authors' rule: E min(1, ratio)."""
    q, p = gaussian([0.0], [1.0]), gaussian([6.0], [std])
    _, _, together = drawn(relaxed, q, p, inner_temperature=42.0, tries=1)

    def ratio(x):
        return min(1.0, math.exp((x**2 - ((x - 6) / std) ** 2) / 42**2 / 2) / std)

    expected = stats.norm.expect(ratio, lb=-9, ub=9)
    assert expected == pytest.approx(accepted, abs=1e-3)  # a log-ratio over 42: 0.658 and 0.762
    error = math.sqrt(expected * (1 - expected) / N)
    assert together.double().mean().item() == pytest.approx(expected, abs=4 * error)


@pytest.mark.slow
def test_without_its_three_errors_the_published_rule_is_exact():
    q, p = HILLS
    _, y, _ = drawn(relaxed, q, p, tries=32)
    assert p_value(y, p) > 1e-3


def test_the_residual_is_p_minus_q():
    """Far from the overlap it is p itself; of two Gaussians its mean is known."""
    q, p = ONE
    y = residual(p, q, TorchRandomness(1), torch.ones(N, dtype=torch.bool))
    assert (y < 0.2).all()  # p > q exactly there
    inside = stats.norm.cdf(0.2) - stats.norm.cdf(0.2 - 0.4)
    expected = lambda v: (stats.norm.cdf(v) - stats.norm.cdf(v - 0.4)) / inside  # noqa: E731
    assert stats.kstest(y[:, 0].numpy(), expected).pvalue > 1e-3


def test_nothing_is_drawn_where_nothing_is_wanted():
    q, p = ONE
    wanted = torch.arange(N) % 2 == 0
    y = residual(p, q, TorchRandomness(1), wanted)
    assert (y[~wanted] == 0).all()
    assert (y[wanted] != 0).all()


def test_the_mirror_is_an_involution_and_keeps_lengths():
    q, p = PLANE
    x = q.sample(TorchRandomness(3))
    y = mirror(x, q, p)
    back = mirror(y, p, q)
    torch.testing.assert_close(back, x)
    for density, a in ((q, x), (p, y)):
        torch.testing.assert_close(
            ((a - density.mean) / density.std).norm(dim=-1),
            ((x - q.mean) / q.std).norm(dim=-1),
        )


def test_energy_distance_tells_distributions_apart():
    q, p = (type(d)(*(t[:600] for t in d)) for d in ISLES)
    randomness = TorchRandomness(5)
    x = q.sample(randomness)
    y, _ = maximal(x, q, p, randomness)
    plain = p.sample(randomness)
    assert permutation_test(y, plain)[1] > 0.05
    distance, refused = permutation_test(x, plain)
    assert refused == pytest.approx(1 / 200)
    within = torch.cdist(x, x).mean() + torch.cdist(plain, plain).mean()
    energy = 2 * torch.cdist(x, plain).mean() - within
    assert distance == pytest.approx(energy.item(), rel=1e-9)


def test_mixture_density_by_hand():
    density = GaussianMixture(
        torch.tensor([0.0, math.log(3)]), torch.tensor([[0.0], [2.0]]), torch.ones(2, 1)
    )
    expected = 0.25 * stats.norm.pdf(1) + 0.75 * stats.norm.pdf(-1)
    assert density.log_prob(torch.ones(1)).exp().item() == pytest.approx(expected, rel=1e-6)
    assert density.cooled(0.5).std.tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("density", [SKEW[1], ISLES[1]])
def test_samples_have_their_density(density):
    assert p_value(density.sample(TorchRandomness(2)), density) > 1e-3


class TestKeyed:
    """The production randomness: its distribution, and rows that do not affect each other."""

    def test_normal_numbers_are_normal(self):
        draws = [KeyedRandomness([1, 2, 3]).normal((3, 5000)).flatten()]
        assert stats.kstest(torch.cat(draws).numpy(), stats.norm.cdf).pvalue > 1e-3

    def test_a_split_is_of_its_own(self):
        a, b = KeyedRandomness([7]), KeyedRandomness([7])
        first, second = a.split(), a.split()
        assert not torch.equal(first.normal((1, 4)), second.normal((1, 4)))
        b.split(), b.split().normal((1, 3))
        assert torch.equal(a.normal((1, 4)), b.normal((1, 4)))

    def test_a_row_does_not_depend_on_how_long_others_loop(self):
        near, far = 1e-3, 3.0  # rejected seldom and left late; rejected often and left at once
        q = Gaussian(torch.tensor([[near], [far]]).double(), torch.ones(2, 1).double())
        p = Gaussian(torch.zeros(2, 1).double(), torch.ones(2, 1).double())
        wanted = torch.tensor([True, True])
        both = KeyedRandomness([5, 6])
        y = residual(p, q, both, wanted)
        after = both.normal((2, 1))
        for b in range(2):
            alone = KeyedRandomness([5 + b])
            one = [type(d)(*(t[b : b + 1] for t in d)) for d in (p, q)]
            assert torch.equal(residual(*one, alone, wanted[:1])[0], y[b])
            assert torch.equal(alone.normal((1, 1))[0], after[b])

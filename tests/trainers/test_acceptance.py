"""Losses of acceptance: by hand, by enumeration, by drawn noise, and their gradients."""

from functools import partial
from itertools import product
from math import log

import pytest
import torch

from tests.decoding.bench.test_limits import conditionals, drafter_marginals, joint
from tests.decoding.test_exact_distribution import deer, first_cycle
from trainers.losses.acceptance import coupled_miss, length, log_acceptance, total_variation


def logits_of(*probabilities):
    """Logits whose softmax gives these distributions: [..., V]."""
    return torch.tensor(probabilities, dtype=torch.float64).log() + 3.0  # any shift


def random_logits(*shape, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_by_hand():
    p, q = logits_of([0.5, 0.5]), logits_of([0.25, 0.75])
    assert total_variation(q, p).tolist() == pytest.approx([1 / 4])
    assert log_acceptance(q, p).tolist() == pytest.approx([log(4 / 3)])
    # Token 0: 1 / (1 + max(1, 3)), token 1: 1 / (max(1, 1/3) + 1).
    assert coupled_miss(q, p).tolist() == pytest.approx([1 - 1 / 4 - 1 / 2])
    # Token 0: 1 / (1 + 1 + 2), token 1: 1 / (2 + 1 + 2), token 2: 1 / (2 + 1 + 1).
    p, q = logits_of([0.5, 0.25, 0.25]), logits_of([0.25, 0.25, 0.5])
    assert coupled_miss(q, p).tolist() == pytest.approx([0.3])
    assert total_variation(q, p).tolist() == pytest.approx([0.25])


def test_a_position_counts_only_after_accepted_tokens():
    p = logits_of([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    q = logits_of([0.25, 0.75], [0.25, 0.75], [0.5, 0.5])
    # The target's first token 0 is accepted with 1/2, its second token 1 with 1.
    found = length(q, p, torch.tensor([0, 1, 0]))
    assert found.tolist() == pytest.approx([1 / 4, 1 - 1 / 2 * 3 / 4, 1 - 1 / 2])


def test_length_is_the_expected_acceptance_of_rejection():
    """Over all answers of a model, with their weights: what the sampler's own cycle accepts."""
    k, V = 3, 3
    sampler = deer(V, k)
    p, q = conditionals(sampler, k), drafter_marginals(sampler, k)
    accepted = plainer = 0.0
    for x in product(range(V), repeat=k):
        teacher = torch.stack([p[x[:i]] for i in range(k)])
        probability = 1 - length(q.log(), teacher.log(), torch.tensor(x))
        accepted += joint(p, x) * probability.sum().item()
        plainer += joint(p, x) * torch.minimum(teacher, q).sum(-1).cumprod(0).sum().item()
    expected = first_cycle(sampler, "rejection") - 1
    assert accepted == pytest.approx(expected, abs=1e-9)
    # Negative control: the product of overlaps along the answers is another number.
    assert abs(plainer - expected) > 1e-3


def test_hits_are_the_sum_over_all_pairs():
    p, q = random_logits(7, 40), random_logits(7, 40, seed=1)
    ratios = [x.softmax(-1)[:, None] / x.softmax(-1)[..., None] for x in (p, q)]  # [7, i, j]
    expected = (1 / torch.maximum(*ratios).sum(-1)).sum(-1)
    torch.testing.assert_close(1 - coupled_miss(q, p), expected, rtol=0, atol=1e-12)


def test_hits_are_the_share_of_equal_choices_under_one_noise():
    p, q = random_logits(12, spread=1.0), random_logits(12, seed=1, spread=1.0)
    generator = torch.Generator().manual_seed(2)
    g, other = (
        -torch.rand(2, 40_000, 12, dtype=torch.float64, generator=generator).log().neg().log()
    )
    rate, error = 1 - coupled_miss(q, p), 0.5 / 40_000**0.5
    assert abs(((p + g).argmax(-1) == (q + g).argmax(-1)).double().mean() - rate) < 4 * error
    # Negative control: noise of one's own for each.
    assert abs(((p + g).argmax(-1) == (q + other).argmax(-1)).double().mean() - rate) > 20 * error


def test_hits_between_their_bounds():
    """(1 - TV) / (1 + TV) <= hits <= 1 - TV (Daliri et al., arXiv 2408.07978)."""
    for spread in (0.1, 1.0, 5.0):
        p, q = (random_logits(50, 30, seed=s, spread=spread) for s in (0, 1))
        distance, rate = total_variation(q, p), 1 - coupled_miss(q, p)
        assert (rate <= 1 - distance + 1e-12).all()
        assert (rate >= (1 - distance) / (1 + distance) - 1e-12).all()


def length_of_some_tokens(logits, teacher):
    return length(logits, teacher, torch.arange(3).expand(logits.shape[:-1]))


LOSSES = {  # of (logits, teacher), K = 3
    "total_variation": total_variation,
    "log_acceptance": log_acceptance,
    "coupled_miss": coupled_miss,
    "length": length_of_some_tokens,
}


@pytest.mark.parametrize("name", LOSSES)
def test_at_least_zero_and_zero_only_where_both_distributions_are_equal(name):
    loss, p = LOSSES[name], random_logits(5, 3, 20)
    assert loss(p + 1.5, p).abs().max() < 1e-12
    for spread in (1e-3, 1.0, 10.0):
        found = loss(p + random_logits(5, 3, 20, seed=1, spread=spread), p)
        assert (found > 1e-6).all()
        if name != "log_acceptance":
            assert (found <= 1).all()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    p, q = random_logits(2, 3, 6), random_logits(2, 3, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(partial(LOSSES[name], teacher=p), (q,))


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_against_the_gradient_is_accepted_more_often(name):
    p, q = random_logits(3, 20), random_logits(3, 20, seed=1).requires_grad_()
    loss = LOSSES[name]
    before = loss(q, p).sum()
    (gradient,) = torch.autograd.grad(before, q)
    assert loss(q - 0.1 * gradient, p).sum() < before
    assert loss(q + 0.1 * gradient, p).sum() > before


@pytest.mark.parametrize("name", LOSSES)
def test_certain_and_contrary_distributions_have_finite_gradients(name):
    for size in (0.0, 80.0, 1e4):
        p = size * torch.nn.functional.one_hot(torch.tensor([0, 1, 2]), 5).float()
        q = (
            size * torch.nn.functional.one_hot(torch.tensor([1, 1, 4]), 5).float()
        ).requires_grad_()
        found = LOSSES[name](q, p)
        found.sum().backward()
        assert torch.isfinite(found).all()
        assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_what_only_one_vocabulary_has_does_not_count(name):
    loss, p, q = LOSSES[name], random_logits(3, 8), random_logits(3, 8, seed=1)
    more = random_logits(3, 2, seed=2)
    expected = loss(q, p)
    torch.testing.assert_close(loss(torch.cat([q, more], -1), p), expected)
    torch.testing.assert_close(loss(q, torch.cat([p, more], -1)), expected)

"""The total variation of drafter and target as a loss: by hand, and its gradients."""

import pytest
import torch

from tests.support.tiny import logits_of
from trainers.losses.diffusion import total_variation


def random_logits(*shape, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_by_hand():
    p, q = logits_of([0.5, 0.5]), logits_of([0.25, 0.75])
    assert total_variation(q, p).tolist() == pytest.approx([1 / 4])
    p, q = logits_of([0.5, 0.25, 0.25]), logits_of([0.25, 0.25, 0.5])
    assert total_variation(q, p).tolist() == pytest.approx([0.25])


def test_at_least_zero_and_zero_only_where_both_distributions_are_equal():
    loss, p = total_variation, random_logits(5, 3, 20)
    assert loss(p + 1.5, p).abs().max() < 1e-12
    for spread in (1e-3, 1.0, 10.0):
        found = loss(p + random_logits(5, 3, 20, seed=1, spread=spread), p)
        assert (found > 1e-6).all()
        assert (found <= 1).all()


def test_gradients_are_those_of_finite_differences():
    p, q = random_logits(2, 3, 6), random_logits(2, 3, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: total_variation(logits, p), (q,))


def test_a_step_against_the_gradient_is_accepted_more_often():
    p, q = random_logits(3, 20), random_logits(3, 20, seed=1).requires_grad_()
    loss = total_variation
    before = loss(q, p).sum()
    (gradient,) = torch.autograd.grad(before, q)
    assert loss(q - 0.1 * gradient, p).sum() < before
    assert loss(q + 0.1 * gradient, p).sum() > before


def test_certain_and_contrary_distributions_have_finite_gradients():
    for size in (0.0, 80.0, 1e4):
        p = size * torch.nn.functional.one_hot(torch.tensor([0, 1, 2]), 5).float()
        q = (
            size * torch.nn.functional.one_hot(torch.tensor([1, 1, 4]), 5).float()
        ).requires_grad_()
        found = total_variation(q, p)
        found.sum().backward()
        assert torch.isfinite(found).all()
        assert torch.isfinite(q.grad).all()


def test_what_only_one_vocabulary_has_does_not_count():
    loss, p, q = total_variation, random_logits(3, 8), random_logits(3, 8, seed=1)
    more = random_logits(3, 2, seed=2)
    expected = loss(q, p)
    torch.testing.assert_close(loss(torch.cat([q, more], -1), p), expected)
    torch.testing.assert_close(loss(q, torch.cat([p, more], -1)), expected)

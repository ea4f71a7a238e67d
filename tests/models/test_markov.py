"""Markov heads: each token's term, a new head that changes nothing, ranks that are refused."""

import pytest
import torch

from models.markov import MarkovHead


def test_the_term_is_a_row_of_u_times_v():
    head = MarkovHead(7, 5, 2)
    torch.nn.init.normal_(head.markov_w1.weight)
    U, V = head.markov_w1.weight, head.markov_w2.weight
    found = head(torch.tensor([[3, 6], [0, 3]]))
    assert found.shape == (2, 2, 5)
    torch.testing.assert_close(found[0, 0], U[3] @ V.T)
    torch.testing.assert_close(found[1, 0], U[0] @ V.T)
    assert not torch.equal(found[0, 0], found[1, 0])


def test_a_new_head_changes_nothing_and_learns():
    head = MarkovHead(7, 5, 2)
    previous = torch.arange(7)
    assert torch.equal(head(previous), torch.zeros(7, 5))
    head(previous).log_softmax(-1)[:, 0].sum().backward()
    assert head.markov_w1.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("rank", [0, -1, 6])
def test_a_rank_that_is_not_allowed(rank):
    with pytest.raises(ValueError, match=rf"markov_rank={rank} is not allowed: .* from 1 to 5"):
        MarkovHead(7, 5, rank)

import pytest
import torch

from data.corruption.orders import any_permutation, binary_lattice, order_index, two_streams


def test_the_prompt_comes_first_and_the_rest_from_left_to_right():
    given = torch.rand(50, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    for sigma, g in zip(binary_lattice(given).tolist(), given.tolist()):
        m = sum(g)
        assert sigma[:m] == [p for p in range(9) if g[p]]
        assert sigma[m:] == [p for p in range(9) if not g[p]]


def test_any_permutation_keeps_the_prompt_first_and_reaches_every_order():
    given, generator = torch.tensor([False, True, False, False]), torch.Generator().manual_seed(0)
    drawn = {tuple(any_permutation(given, generator).tolist()) for _ in range(200)}
    assert len(drawn) == 6
    assert {sigma[0] for sigma in drawn} == {1}


def test_the_prompt_shares_an_index_and_others_count_up():
    given = torch.tensor([[False, True, False, True], [False] * 4, [True] * 4])
    index = order_index(binary_lattice(given), given.sum(-1))
    assert index.tolist() == [[2, 1, 3, 1], [0, 1, 2, 3], [3, 3, 3, 3]]


@pytest.mark.parametrize("sigma", [[0, 0, 2], [0, 1, 3], [-1, 0, 1]])
def test_an_order_must_be_a_permutation(sigma):
    with pytest.raises(ValueError, match="permutation"):
        order_index(torch.tensor(sigma), torch.tensor(1))


def test_a_row_as_two_streams():
    present = torch.tensor([True, True, False])
    x = two_streams(torch.tensor([7, 8, 0]), torch.tensor([0, 1, 2]), present, 9)
    assert {k: v.tolist() for k, v in x.items()} == {
        "input_ids": [7, 8, 0, 9, 9, 9],
        "position_ids": [0, 1, 2, 0, 1, 2],
        "document": [0, 0, -1, 0, 0, -1],
        "index": [0, 1, 2, 0, 1, 2],
        "block": [-1, -1, -1, 0, 1, 2],
    }

"""Two streams in one forward give the logits of one forward for each position."""

import pytest
import torch

from data.corruption.orders import any_permutation, binary_lattice, order_index, two_streams
from models.masks import Layout, dense, draft_blocks
from models.twostream import joint_logits
from tests.support import subsets

V = 5
TOKENS = torch.tensor([3, 1, 4, 1, 0, 2])
GIVEN = [
    [True, False, False, True, False, False],
    [False, False, True, False, False, True],
    [True, True, True, True, True, False],
    [False, False, False, False, True, False],
]
EMPTY = [False] * 6
NETWORKS = {
    "llama": lambda: subsets.network(V),
    "qwen2": lambda: subsets.network(V, kind="qwen2"),
    "qwen3": lambda: subsets.network(V, kind="qwen3"),
    "xlnet": lambda: subsets.xlnet(V),
}


def batch(sigma, given, tokens=TOKENS):
    index = order_index(sigma, given.sum(-1))
    streams = two_streams(tokens.expand_as(index), index, torch.ones_like(given), V)
    return {**streams, "masked": ~given}


def reference(model, sigma, given, tokens=TOKENS):
    """{position: logits} of one row, one forward each."""
    m = int(given.sum())
    prompt = [(p, int(tokens[p])) for p in sigma[:m].tolist()]
    rest = [(p, int(tokens[p])) for p in sigma[m:].tolist()]
    return {p: subsets.one_position(model, prompt, rest[:i], p) for i, (p, _) in enumerate(rest)}


def distance(model, sigma, given):
    with torch.no_grad():
        logits = joint_logits(model, batch(sigma, given))
    return max(
        (logits[b, p] - x).abs().max().item()
        for b in range(len(given))
        for p, x in reference(model, sigma[b], given[b]).items()
    )


@pytest.mark.parametrize("order", ["lattice", "any"])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_forward_is_one_position_at_a_time(name, order):
    given = torch.tensor(GIVEN if name == "xlnet" else [*GIVEN, EMPTY])
    sigma = binary_lattice(given)
    if order == "any":
        sigma = any_permutation(given, torch.Generator().manual_seed(0))
    assert distance(NETWORKS[name](), sigma, given) <= 1e-9


@pytest.mark.parametrize("name", NETWORKS)
def test_another_order_is_another_density(name):
    """Negative control: the same tokens in an order that is not the one asked for."""
    given = torch.tensor(GIVEN[:1])
    model, sigma = NETWORKS[name](), binary_lattice(given)
    wrong = torch.cat([sigma[:, :2], sigma[:, 2:].flip(1)], 1)
    with torch.no_grad():
        logits = joint_logits(model, batch(wrong, given))
    expected = reference(model, sigma[0], given[0])
    assert max((logits[0, p] - x).abs().max().item() for p, x in expected.items()) > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_a_query_does_not_see_its_token_or_a_later_one(name):
    given = torch.tensor(GIVEN[:1])
    model, sigma = NETWORKS[name](), binary_lattice(given)
    position = int(sigma[0, 3])
    changed = TOKENS.clone()
    changed[sigma[0, 3:]] = (TOKENS[sigma[0, 3:]] + 1) % V
    with torch.no_grad():
        before = joint_logits(model, batch(sigma, given))[0]
        after = joint_logits(model, batch(sigma, given, changed))[0]
    assert torch.allclose(before[position], after[position], atol=1e-12)
    later = int(sigma[0, 4])
    assert (before[later] - after[later]).abs().max() > 1e-3


def test_the_masks_of_the_two_streams():
    """Prompt at 1 and 3 of four positions; then 0, then 2."""
    given = torch.tensor([[False, True, False, True]])
    x = batch(binary_lattice(given), given, torch.arange(4))
    seen = dense(draft_blocks, Layout(x["document"], x["index"], x["block"]))[0, 0].int().tolist()
    content = [
        [1, 1, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0, 0],
    ]
    asked = {0: [0, 1, 0, 1, 1, 0, 0, 0], 2: [1, 1, 0, 1, 0, 0, 1, 0]}
    assert seen[:4] == content
    assert {p: seen[4 + p] for p in asked} == asked


def test_xlnet_refuses_a_query_that_sees_nothing():
    given = torch.tensor([EMPTY])
    with pytest.raises(ValueError, match="XLNet"):
        joint_logits(subsets.xlnet(V), batch(binary_lattice(given), given))


def test_xlnet_would_look_ahead_without_a_prompt():
    """Why it is refused: a softmax over nothing is a softmax over everything."""
    model, hidden = subsets.xlnet(V), torch.ones(1, 3, 3).double()
    target = torch.tensor([[[1.0, 0, 0]]]).double()
    with torch.no_grad():
        a, b = (
            model(torch.tensor([x]), perm_mask=hidden, target_mapping=target).logits
            for x in ([0, 1, 2], [0, 3, 4])
        )
    assert (a - b).abs().max() > 1e-3

"""The fitted sharpness of a depth is the true one, and a tree that uses it accepts more."""

import pytest
import torch

from decoding.calibration import tree_ranking
from decoding.calibration.tree_ranking import MAX_SHARPNESS, fit, observed
from decoding.drafting.tree import ROOT, draft_trees
from decoding.engine.params import SamplingParams
from decoding.engine.warp import warp
from decoding.samplers.deer import DeerSampler
from tests.support.texts import PROMPTS, deer, random_drafter, target


def drawn(sharpness, n=4000, V=6):
    """Logits, and choices drawn from softmax(sharpness z) at each depth."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, len(sharpness), V, generator=generator, dtype=torch.float64)
    p = (torch.tensor(sharpness)[:, None] * z).softmax(-1)
    choice = torch.multinomial(p.flatten(0, 1), 1, generator=generator)
    return z, choice.view(n, len(sharpness))


def test_it_finds_the_distribution_of_the_choices():
    z, choice = drawn([3.0, 1.0, 0.4])
    assert fit(z, choice)[0] == pytest.approx([3.0, 1.0, 0.4], abs=0.15)
    assert fit(2 * z, choice)[0] == pytest.approx([1.5, 0.5, 0.2], abs=0.1)


def test_tokens_that_cannot_be_do_no_harm():
    z, choice = drawn([1.0])
    assert fit(torch.cat([z, torch.full_like(z[..., :2], -torch.inf)], -1), choice) == fit(
        z, choice
    )


def test_choices_that_the_drafter_does_not_have_tell_nothing():
    z, choice = drawn([2.0, 1.0])
    missing = z.clone()
    missing[:1000] = missing[:1000].scatter(-1, choice[:1000, :, None], -torch.inf)
    assert fit(missing, choice) == fit(z[1000:], choice[1000:])
    assert fit(torch.full_like(z, -torch.inf), choice) == ([1.0, 1.0], [0.0, 0.0])


def test_the_tokens_of_a_large_vocabulary_that_no_tree_reaches_are_left_out(monkeypatch):
    z, choice = drawn([3.0, 2.0], V=40)
    whole, _ = fit(z, choice)
    monkeypatch.setattr(tree_ranking, "RANKED", 20)
    assert fit(z, choice)[0] == pytest.approx(whole, abs=0.05)
    monkeypatch.setattr(tree_ranking, "RANKED", 1)  # negative control: one token tells nothing
    assert fit(z, choice)[0] != pytest.approx(whole, abs=0.05)


def test_a_drafter_that_is_always_right_or_always_wrong():
    z, _ = drawn([1.0])
    assert fit(z, z.argmax(-1))[0] == pytest.approx([MAX_SHARPNESS], abs=0.01)
    assert fit(z, z.argmin(-1))[0][0] < 0.1


class TargetLogits(DeerSampler):
    """A drafter that has the target's own logits of the next token, at every depth."""

    def draft_pass(self, batch, k, params):
        super().draft_pass(batch, k, params)
        logits = self.target(batch.tokens).logits.double()
        here = torch.arange(len(batch.lengths))
        return warp(logits[here, batch.lengths - 1][:, None].expand(-1, k, -1), params)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_what_is_observed_is_what_a_cycle_sees(temperature):
    """Prefix, position, seed and temperature: one that is wrong, and the choices are others."""
    model = target()
    params = SamplingParams(20, temperature, verify="tree", seed=3, ignore_eos=True)
    z, choice = observed(deer(model, random_drafter(), 3, TargetLogits), PROMPTS, params)
    assert len(z) == len(choice) == len(PROMPTS) * 9
    assert torch.equal(z[:, 0].argmax(-1), choice[:, 0])
    assert not torch.equal(z[:, 1].argmax(-1), choice[:, 1])  # a later token has another one


def test_a_fitted_tree_holds_more_of_the_choices():
    """Depth 1 is nearly sure, the others are not: one number for both spends nodes badly."""
    sharpness = [4.0, 0.6, 0.6]
    z, choice = drawn(sharpness, n=2000)

    def held(s):
        trees = draft_trees(z, 5, s).rows
        return sum(followed(tree, row) for tree, row in zip(trees, choice.tolist()))

    assert held(torch.tensor(sharpness)) > 1.02 * max(held(s) for s in (0.6, 1.0, 1.5, 2.5, 4.0))


def followed(tree, tokens):
    at, count = ROOT, 0
    for token in tokens:
        at = tree.child.get((at, token), ROOT)
        if at == ROOT:
            break
        count += 1
    return count


def test_answers_that_are_too_short_are_one_line():
    model = target()
    params = SamplingParams(2, 0.0, verify="tree")
    with pytest.raises(ValueError, match=r"3 tokens.*max_new_tokens="):
        observed(deer(model, random_drafter(), 3), PROMPTS, params)

"""A wide pass takes what its products take, by a clock that these products move."""

import pytest
from torch import nn

from decoding.drafting import pass_cost
from decoding.engine.params import SamplingParams
from decoding.samplers import ngram, redrafter
from decoding.samplers.ngram import NgramSampler
from decoding.samplers.redrafter import RedrafterSampler
from models.packed import PackedLinear, Product
from tests.support import tiny


class Timed(Product):
    """A product that takes `a` seconds, and `b` more for each row."""

    def __init__(self, layer, clock, a, b):
        super().__init__([layer])
        self.clock, self.times = clock, (a, b)

    def _keep(self, weight):
        pass

    def multiply(self, rows):
        a, b = self.times
        self.clock[0] += a + b * len(rows)


def network(monkeypatch, a, b, layers=2, least=1000):
    clock = [0.0]
    monkeypatch.setattr(pass_cost, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(pass_cost, "FEWEST_BYTES", least)
    found = nn.Sequential()
    for _ in range(layers):
        layer = nn.Linear(32, 16)
        found.append(PackedLinear(layer, Timed(layer, clock, a, b), 0, keep=False))
    return found


@pytest.mark.parametrize(("a", "b", "times"), [(1, 0, 1), (1, 1, 4.5), (0, 1, 8)])
def test_it_is_what_products_take(monkeypatch, a, b, times):
    found = pass_cost.wide_pass(network(monkeypatch, a, b))
    assert found == pytest.approx(times)


def test_weights_that_stay_in_caches_say_nothing(monkeypatch):
    assert pass_cost.wide_pass(network(monkeypatch, 0, 1, least=10000)) == 1


def test_large_networks_are_measured_in_part(monkeypatch):
    monkeypatch.setattr(pass_cost, "MOST_BYTES", 3000)
    layers = network(monkeypatch, 0, 1, layers=9)
    layers[-1].product.times = 1e9, 0
    assert pass_cost.wide_pass(layers) == pytest.approx(8)


def test_settings_are_those_of_the_machine(monkeypatch):
    target, tokenizer = tiny.causal_lm(13), tiny.tokenizer(13)
    drafter = tiny.redrafter(target)
    found = []
    for dear in (False, True):
        for module in (ngram, redrafter):
            monkeypatch.setattr(module, "is_dear", lambda target, dear=dear: dear)
        one = NgramSampler(target, tokenizer).tree
        sampler = RedrafterSampler(target, tokenizer, drafter, block_size=3)
        two = sampler.tree
        found.append((one.least[1][0], two.least[1][0], two.fewest[1][0]))
        ways = [sampler.way(n, SamplingParams(1, 0.0)) for n in (1, 2, 4, 16)]
        assert ways == ["tree", "tree", "plain" if dear else "tree", "plain"]
        assert NgramSampler(target, tokenizer, least=0.5).tree.least[1] == 0.5
    (a, b, c), (x, y, z) = found
    assert (a < x, b < y, c > z) == (True, True, True)

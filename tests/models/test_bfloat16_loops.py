"""Products in bfloat16 as compiled loops: exact where numbers are, and a row's bits its own."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import few_queries
from models.few_queries import bits
from models.loops import compiled
from models.packed import GroupedProduct

loops = few_queries.bfloat16_loops()
pytestmark = pytest.mark.skipif(loops is None, reason="needs numba, and vectors without AMX")


def linear(inputs, outputs, bias, draw):
    """A layer of small integers, whose sums are exact in float32."""
    layer = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randint(-3, 4, parameter.shape, generator=draw))
    return layer


def expected(layer, rows):
    bias = 0 if layer.bias is None else layer.bias.float()
    return (rows.float() @ layer.weight.float().T + bias).bfloat16()


@torch.inference_mode()
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40) | st.integers(250, 260),
    inputs=st.integers(1, 90),
    outputs=st.integers(1, 100) | st.sampled_from([32, 64, 96]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_integers_are_exact(rows, inputs, outputs, bias, seed):
    draw = torch.Generator().manual_seed(seed)
    layer = linear(inputs, outputs, bias, draw)
    x = torch.randint(-3, 4, (rows, inputs), generator=draw).bfloat16()
    found = GroupedProduct([layer]).multiply(x)
    assert found.is_contiguous()
    assert torch.equal(found, expected(layer, x))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_share_the_groups(threads):
    draw = torch.Generator().manual_seed(0)
    layer = linear(64, 160, True, draw)
    x = torch.randint(-3, 4, (33, 64), generator=draw).bfloat16()
    found = torch.full((33, 160), torch.nan).bfloat16()
    product = GroupedProduct([layer])  # has the weights
    with few_queries.pool(few_queries.loops()):
        loops.product(bits(x), *product.weights, bits(found), threads)
    assert torch.equal(found, expected(layer, x))


@torch.inference_mode()
@pytest.mark.parametrize("count", range(1, 18))
def test_a_rows_bits_do_not_depend_on_the_others(count):
    torch.manual_seed(count)
    layer = nn.Linear(576, 96).bfloat16()
    product, x = GroupedProduct([layer]), torch.randn(300, 576).bfloat16()
    found = product.multiply(x)
    assert torch.equal(product.multiply(x[:count]), found[:count])
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()  # rounded once


def test_another_order_of_weights_is_seen():
    """Negative control: pairs of inputs in the wrong order."""
    draw = torch.Generator().manual_seed(0)
    layer = linear(64, 32, False, draw)
    x = torch.randint(-3, 4, (5, 64), generator=draw).bfloat16()
    product = GroupedProduct([layer])
    found = torch.empty(5, 32).bfloat16()
    for right in (True, False):
        with few_queries.pool(few_queries.loops()) as threads:
            loops.product(bits(x), *product.weights, bits(found), threads)
        assert torch.equal(found, expected(layer, x)) == right
        product._weight[:] = product._weight[..., ::-1].copy()


@compiled()
def sum_of_powers(scores):
    """Call the code that is compiled into other loops."""
    return loops.exponentiate(scores.ctypes.data, len(scores) // loops.LANES)


def powers(scores):
    found = scores.copy()
    return found, sum_of_powers(found)


@pytest.mark.parametrize("spread", [0.1, 3, 60, 3000])
def test_weights_are_powers_of_two(spread):
    """To half a bfloat16's last bit, and their sum to that of float32; hidden ones are 0."""
    scores = (spread * np.random.default_rng(0).standard_normal(96)).astype(np.float32)
    scores[[0, 7, 90]] = -np.inf
    found, total = powers(scores)
    exact = np.exp2(scores.astype(np.float64) - scores.max())
    assert np.allclose(found, exact, rtol=2**-8, atol=1e-30)
    assert abs(total - exact.sum()) <= 3e-6 * exact.sum()
    assert not found[[0, 7, 90]].any()
    exact = np.exp(scores.astype(np.float64) - scores.max())  # negative control
    assert spread == 3000 or not np.allclose(found, exact, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("seed", range(20))
def test_hidden_keys_change_no_weight_and_no_sum(seed):
    draw = np.random.default_rng(seed)
    scores = draw.standard_normal(160).astype(np.float32)
    with_gaps = np.full(320, -np.inf, np.float32)
    at = np.sort(draw.choice(320, 160, replace=False))
    with_gaps[at] = scores
    (found, total), (other, same) = powers(scores), powers(with_gaps)
    assert np.array_equal(other[at], found)
    assert same == total
    nothing, zero = powers(np.full(32, -np.inf, np.float32))
    assert zero == 0
    assert not nothing.any()


def test_padded_weights_are_not_for_other_loops():
    for inputs, outputs, whole in ((64, 64, True), (63, 64, False), (64, 63, False)):
        layer = nn.Linear(inputs, outputs).bfloat16()
        assert (GroupedProduct([layer]).weights is not None) == whole


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "features"),
    [("haswell", "avx2 fma"), ("skylake-avx512", "avx2 fma avx512f avx512bw avx512dq avx512vl")],
)
def test_other_vectors_compute_the_same(name, features):
    """The tests of this file, as on CPUs with other vectors than this one's."""
    asked = {*features.split()}
    if not asked <= loops.FEATURES:
        pytest.skip(f"this CPU has not {features}")
    of = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ",".join(f"+{x}" for x in asked)}
    code = "from models import bfloat16_loops as b; print(b.IN_PAIRS, b.LANES)"
    known = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | of, capture_output=True, text=True
    )
    assert known.stdout.split() == ["False", "16" if "avx512f" in asked else "8"]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__]
    subprocess.run(tests, env=os.environ | of, check=True)

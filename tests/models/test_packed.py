"""Packed and converted weights give the products of the weights that they were made from."""

import os
import subprocess
import sys
from threading import Thread

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from models import few_queries, packed
from models.attention import GROUPED, switch_attention
from models.head import ReducedHead
from models.markov import MarkovHead
from models.packed import (
    ConvertedProduct,
    GroupedProduct,
    PackedLinear,
    PackedProduct,
    pack,
    precision,
)

KINDS = [
    pytest.param(
        PackedProduct,
        marks=pytest.mark.skipif(not packed.packs(), reason="no bfloat16 products of oneDNN here"),
    ),
    pytest.param(
        GroupedProduct,
        marks=pytest.mark.skipif(
            few_queries.bfloat16_loops() is None, reason="no loops of bfloat16 products here"
        ),
    ),
    ConvertedProduct,
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request, monkeypatch):
    """The product of 16-bit weights, as on a CPU with bfloat16 products or without."""
    found = dict.fromkeys((torch.bfloat16, torch.float16), request.param)
    monkeypatch.setattr(packed, "products", lambda network: found)
    monkeypatch.setattr(packed, "_BLOCK", 1000)  # several, and one that is not full
    return request.param


def type_in(kind):
    """The type of inputs."""
    return torch.bfloat16 if kind is not ConvertedProduct else torch.float32


def network(tied=True, bias=False, dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=bias,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    found = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(dtype).eval()
    for name, parameter in found.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return found


@torch.inference_mode()
def logits(model, rows=1, length=7):
    tokens = torch.arange(rows * length).view(rows, length) % 96
    return model(tokens).logits.float()


def error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_networks_logits(kind, tied, bias):
    model = network(tied, bias)
    before, exact = logits(model), logits(network(tied, bias).double())
    pack(model)
    names = {name for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert len(names) == 2 * 7 + 1  # the head too
    assert model.get_input_embeddings().weight.shape == (96, 64)
    if kind is not ConvertedProduct:
        # As near to the network in float64 as bfloat16 is without it, and no nearer.
        assert error(logits(model), exact) < 1.2 * error(before, exact) < 0.05
        assert precision(model) == "bfloat16"
        assert not packed.told(model)
    else:
        assert error(logits(model), exact) < 1e-6 < 1e-3 < error(before, exact)
        assert precision(model) == "float32, weights in bfloat16"
        assert packed.told(model).startswith("weights in bfloat16, products in float32")


def test_a_markov_head_keeps_the_rows_that_samplers_read(kind):
    model = network()
    model.markov_head = MarkovHead(96, 24, 8).to(torch.bfloat16)
    tokens = torch.tensor([5, 7])
    model.markov_head.markov_w1.weight.data.normal_()
    exact = model.markov_head(tokens).float()
    pack(model)
    assert model.markov_head.markov_w2.weight.shape == (24, 8)
    assert torch.allclose(model.markov_head(tokens).float(), exact, atol=0.1)
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)


def test_another_order_of_the_parts_is_seen(kind, monkeypatch):
    """Negative control: keys in place of queries."""
    model = network()
    exact = logits(network().double())
    monkeypatch.setattr(packed, "TOGETHER", (("k_proj", "q_proj", "v_proj"),))
    right = network()
    pack(right)  # another order in the product is none in the network
    assert error(logits(right), exact) < 0.05
    pack(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj.columns = slice(0, 64)
    assert error(logits(model), exact) > 0.2


@pytest.fixture(params=["numba", "no numba"])
def numba(request, monkeypatch):
    """With and without the loops of few rows, which must not be used for more of them."""
    if request.param == "no numba":
        monkeypatch.setattr(packed, "loops", lambda: None)
    elif packed.loops() is None:
        pytest.skip("no numba here")
    monkeypatch.setattr(packed, "_MOST", 9)


@pytest.mark.usefixtures("numba")
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_a_rows_product_does_not_depend_on_the_others(kind, rows):
    if kind is GroupedProduct and packed.loops() is None:
        pytest.skip("it is of numba")
    torch.manual_seed(1)
    layers = [nn.Linear(64, n, bias=n == 32).bfloat16() for n in (96, 32)]
    product = kind(layers)
    x = torch.randn(12, 64).to(type_in(kind))
    with torch.inference_mode():
        both = [product(x) for _ in layers]
        assert both[0] is both[1]  # computed once
        assert product._input is None  # and not held
        few = product(x[:rows].clone())
        expected = torch.cat([layer.to(x.dtype)(x) for layer in layers], 1)
    if kind is not ConvertedProduct:
        assert torch.equal(few, both[0][:rows])
        assert torch.allclose(both[0].float(), expected.float(), atol=0.02)
    else:
        assert torch.allclose(few, both[0][:rows], atol=1e-6)
        assert torch.allclose(both[0], expected, atol=1e-6)


def test_each_input_has_its_own_product(kind):
    """Two layers that turn out to read different inputs."""
    layers = [nn.Linear(64, 32).bfloat16() for _ in range(2)]
    parent = nn.Module()
    parent.gate_proj, parent.up_proj = layers
    product = kind(layers)
    first = PackedLinear(layers[0], product, 0, keep=False)
    second = PackedLinear(layers[1], product, 32, keep=False)
    x, y = torch.randn(2, 5, 64).to(type_in(kind))
    with torch.inference_mode():
        one, two = (layer.to(x.dtype)(z).float() for layer, z in zip(layers, (x, y)))
        for _ in range(2):
            assert torch.allclose(first(x).float(), one, atol=0.02)
            assert torch.allclose(second(y).float(), two, atol=0.02)


def test_a_reduced_head_has_its_own_rows(kind):
    model, ids = network(), torch.tensor([3, 90, 11])
    pack(model)
    tokens = torch.arange(7)[None]
    with torch.inference_mode():
        found = ReducedHead(model, ids)(input_ids=tokens)
        assert torch.allclose(found.float(), logits(model)[..., ids], atol=0.05)


def test_other_weights_stay(kind):
    model = network(dtype=torch.float32)
    before = logits(model)
    pack(model)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    assert torch.equal(logits(model), before)
    assert precision(model) == "float32"


@pytest.mark.skipif(few_queries.bfloat16_loops() is None, reason="no loops of products here")
def test_without_fast_products_loops_take_networks_that_multiply_nowhere_else(monkeypatch):
    for name in ("multiplies_bfloat16", "packs"):
        monkeypatch.setattr(packed, name, lambda: False)
    model = network()
    assert packed.products(model)[torch.bfloat16] is ConvertedProduct  # attention is torch's
    switch_attention(model, GROUPED)
    assert packed.products(model)[torch.bfloat16] is GroupedProduct
    model.model.experts = nn.Parameter(torch.zeros(2, 3, 4))
    assert packed.products(model)[torch.bfloat16] is ConvertedProduct
    pack(model)
    assert model.dtype == torch.float32


def test_weights_that_are_converted_stay_in_16_bits():
    layers = [nn.Linear(64, 32).half(), nn.Linear(64, 96).half()]
    product = ConvertedProduct(layers)
    assert product._weight.dtype == torch.float16
    assert product._weight.shape == (128, 64)


@pytest.mark.usefixtures("numba")
def test_converted_weights_serve_several_threads_and_modes(monkeypatch):
    """Each has its own block of converted weights."""
    monkeypatch.setattr(packed, "_BLOCK", 64 * 8)
    torch.manual_seed(2)
    layers = [nn.Linear(64, 512, bias=False).bfloat16() for _ in range(2)]
    products = [ConvertedProduct([layer]) for layer in layers]
    x = torch.randn(1, 64)
    expected = [layer.float()(x) for layer in layers]
    wrong = []

    def decode(n):
        for mode in (torch.inference_mode, torch.no_grad) * 100:
            with mode():
                wrong.append(not torch.allclose(products[n](x), expected[n], atol=1e-5))

    threads = [Thread(target=decode, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 400
    assert not any(wrong)


@pytest.mark.processes
def test_variables_make_a_laptops_cpu_of_any():
    """`make test-avx2` depends on them."""
    code = (
        "from models import few_queries, packed; import torch; "
        "here = few_queries.bfloat16_loops(); "
        "print(packed.multiplies_bfloat16(), torch.backends.cpu.get_cpu_capability()); "
        "print(here and here.LANES)"
    )
    only = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    only |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | only, capture_output=True, text=True
    )
    here = "None" if few_queries.loops() is None else "8"
    assert found.stdout.split() == ["False", "AVX2", here]

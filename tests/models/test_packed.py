"""Packed weights give the products of the weights that they were packed from."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from models import packed
from models.head import ReducedHead
from models.packed import PackedLinear, PackedProduct, pack

pytestmark = pytest.mark.skipif(not packed.packs(), reason="no bfloat16 products of oneDNN here")


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
def test_a_networks_logits(tied, bias):
    model = network(tied, bias)
    before, exact = logits(model), logits(network(tied, bias).double())
    pack(model)
    names = {name for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert len(names) == 2 * 7 + 1  # the head too
    # As near to the network in float64 as bfloat16 is without it, and no nearer.
    assert error(logits(model), exact) < 1.2 * error(before, exact) < 0.05
    assert model.get_input_embeddings().weight.shape == (96, 64)


def test_another_order_of_the_parts_is_seen(monkeypatch):
    """Negative control: keys in place of queries."""
    model = network()
    exact = logits(network().double())
    monkeypatch.setattr(packed, "TOGETHER", (("k_proj", "q_proj", "v_proj"),))
    right = network()
    pack(right)  # another order in the product is none in the network
    assert error(logits(right), exact) < 0.05
    pack(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj._columns = slice(0, 64)
    assert error(logits(model), exact) > 0.2


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_a_rows_product_does_not_depend_on_the_others(rows):
    torch.manual_seed(1)
    layers = [nn.Linear(64, n, bias=n == 32).bfloat16() for n in (96, 32)]
    product = PackedProduct(layers)
    x = torch.randn(12, 64).bfloat16()
    with torch.inference_mode():
        both = [product(x) for _ in layers]
        assert both[0] is both[1]  # computed once
        assert product._input is None  # and not held
        few = product(x[:rows].clone())
        expected = torch.cat([layer(x) for layer in layers], 1)
    assert torch.equal(few, both[0][:rows])
    assert torch.allclose(both[0].float(), expected.float(), atol=0.02)


def test_each_input_has_its_own_product():
    """Two layers that turn out to read different inputs."""
    layers = [nn.Linear(64, 32).bfloat16() for _ in range(2)]
    parent = nn.Module()
    parent.gate_proj, parent.up_proj = layers
    product = PackedProduct(layers)
    first = PackedLinear(layers[0], product, 0, keep=False)
    second = PackedLinear(layers[1], product, 32, keep=False)
    x, y = torch.randn(2, 5, 64).bfloat16()
    with torch.inference_mode():
        for _ in range(2):
            assert torch.allclose(first(x).float(), layers[0](x).float(), atol=0.02)
            assert torch.allclose(second(y).float(), layers[1](y).float(), atol=0.02)


def test_a_reduced_head_has_its_own_rows():
    model, ids = network(), torch.tensor([3, 90, 11])
    pack(model)
    tokens = torch.arange(7)[None]
    with torch.inference_mode():
        found = ReducedHead(model, ids)(input_ids=tokens)
        assert torch.allclose(found.float(), logits(model)[..., ids], atol=0.05)


def test_other_weights_stay():
    model = network(dtype=torch.float32)
    before = logits(model)
    pack(model)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    assert torch.equal(logits(model), before)

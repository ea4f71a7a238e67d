"""RMS norms as loops: the formula's numbers, and only where it is the norm's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from models import few_queries, norms
from models.norms import FusedNorm, fuse
from tests.support import tiny

pytestmark = pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")


class OnePlus(LlamaRMSNorm):
    """Gemma's formula under Llama's names."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * (1 + self.weight) / self.weight


def norm(size=48, kind=LlamaRMSNorm, seed=0):
    found = kind(size, eps=1e-5).bfloat16()
    draw = torch.Generator().manual_seed(seed)
    found.weight.data = (torch.rand(size, generator=draw) + 0.5).bfloat16()
    return found


@torch.inference_mode()
@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (16, 1), (2, 7), (3, 2, 5)]),
    size=st.integers(1, 70),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_the_norm(shape, size, scale, strided, seed):
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(*shape, 2 * size, generator=draw) * scale).bfloat16()
    x = x[..., size:] if strided else x[..., size:].contiguous()
    stock = norm(size, seed=seed)
    found = FusedNorm(stock)(x)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact *= stock.weight.double()
    # Rounded twice, each time to 2^-9 of the number.
    assert found.shape == x.shape
    assert ((found - exact).abs() <= 2**-7 * exact.abs() + 1e-30).all()


@torch.inference_mode()
def test_a_row_has_the_same_bits_whoever_is_beside_it():
    x = torch.randn(37, 1, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    fused = FusedNorm(norm())
    together = fused(x)
    for b in range(len(x)):
        assert torch.equal(fused(x[b : b + 1]), together[b : b + 1])


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [(LlamaRMSNorm, 1), (Olmo2RMSNorm, 0), (OnePlus, 0), (Qwen3NextRMSNormGated, 0)],
)
def test_only_norms_of_its_formula_are_replaced(kind, replaced):
    parent = nn.ModuleDict({"norm": norm(kind=kind)})
    fuse(parent)
    assert isinstance(parent["norm"], FusedNorm) == bool(replaced)


@pytest.mark.parametrize(("kind", "count"), [("llama", 5), ("qwen3", 9)])
def test_a_networks_norms(kind, count):
    network = tiny.causal_lm(12, layers=2, kind=kind).bfloat16()
    tokens = torch.arange(10)[None]
    with torch.inference_mode():
        before = network(tokens).logits
        fuse(network)
        found = network(tokens).logits
    assert sum(isinstance(m, FusedNorm) for m in network.modules()) == count
    torch.testing.assert_close(found, before, atol=0.03, rtol=0.03)
    with torch.inference_mode():
        for m in network.modules():
            if isinstance(m, FusedNorm):
                m._bits[:] = 0
        assert (network(tokens).logits - before).abs().max() > 0.1  # the loops are what runs


def test_other_numbers_are_left_to_the_norm():
    stock = norm()
    fused, x = FusedNorm(stock), torch.randn(3, 48)
    with torch.inference_mode():
        assert torch.equal(fused(x), stock(x))
    (fused(x.bfloat16().requires_grad_()).sum()).backward()  # it keeps nothing for a backward


def test_float_networks_and_machines_without_numba_keep_theirs(monkeypatch):
    parent = nn.ModuleDict({"norm": norm().float()})
    fuse(parent)
    assert type(parent["norm"]) is LlamaRMSNorm
    monkeypatch.setattr(norms, "loops", lambda: None)
    parent = nn.ModuleDict({"norm": norm()})
    fuse(parent)
    assert type(parent["norm"]) is LlamaRMSNorm

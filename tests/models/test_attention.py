"""Attention written out is the fused kernel's, in a network and in its gradients."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decoding.engine.sampler import check_attention
from models import attention, causal
from models.attention import (
    GROUPED,
    WRITTEN_OUT,
    Span,
    attention_inputs,
    check_masks,
    fused_attention,
    switch_attention,
)
from models.masks import causal as causal_mask
from tests.support import tiny
from tests.support.masks import layout


def network():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").double()


def logits_and_gradients(model):
    # Two documents in one row, so that ignoring the mask changes the logits.
    tokens_layout = layout([0, 0, 0, 1, 1], [0, 1, 2, 3, 4], [-1] * 5)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    inputs = attention_inputs(model, causal_mask, tokens_layout)
    logits = model(tokens, use_cache=False, **inputs).logits
    logits.square().sum().backward()
    return logits.detach(), [p.grad for p in model.parameters()]


def test_it_is_the_fused_kernels():
    fused, other = network(), network()
    switch_attention(other, WRITTEN_OUT)
    assert other.config._attn_implementation == WRITTEN_OUT
    expected, gradients = logits_and_gradients(fused)
    found, others = logits_and_gradients(other)
    tokens = torch.arange(5)[None]  # and with the mask that a model makes itself
    assert torch.allclose(other(tokens).logits, fused(tokens).logits, atol=1e-9)
    assert torch.allclose(found, expected, atol=1e-9)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(others, gradients))


def test_without_its_mask_it_is_not(monkeypatch):
    """Negative control."""
    unmasked = lambda *a, **k: attention.written_out(*a[:4], torch.ones_like(a[4]), **k)  # noqa: E731
    monkeypatch.setitem(attention.AttentionInterface._global_mapping, WRITTEN_OUT, unmasked)
    model = network()
    switch_attention(model, WRITTEN_OUT)
    found, _ = logits_and_gradients(model)
    assert not torch.allclose(found, logits_and_gradients(network())[0], atol=1e-3)


def test_decoding_and_exports_have_the_fused_kernel(tmp_path):
    model = network()
    switch_attention(model, WRITTEN_OUT)
    with fused_attention(model):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == WRITTEN_OUT
    model.save_pretrained(tmp_path)
    tiny.tokenizer(13).save_pretrained(tmp_path)
    assert causal.load(str(tmp_path)).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["eager", "flex_attention"])
def test_a_network_that_has_another_keeps_it(kind):
    model = network()
    model.config._attn_implementation = kind
    switch_attention(model, WRITTEN_OUT)
    assert model.config._attn_implementation == kind


def test_heads_of_a_group_together():
    fused, other = network(), network()
    switch_attention(other, GROUPED)
    tokens_layout = layout([0, 0, 0, 1, 1], [0, 1, 2, 3, 4], [-1] * 5)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    mask = attention_inputs(other, causal_mask, tokens_layout)["attention_mask"]
    expected = fused(tokens, attention_mask=mask).logits
    added = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)
    for given in (mask, added):
        assert torch.allclose(other(tokens, attention_mask=given).logits, expected, atol=1e-9)
    assert torch.allclose(other(tokens).logits, fused(tokens).logits, atol=1e-9)


def test_heads_in_another_order_are_not_their_group(monkeypatch):
    """Negative control: query head i with keys i mod 2 instead of i / 2."""

    def wrong(module, query, *others, **options):
        found, _ = attention.grouped(module, query[:, [0, 2, 1, 3]], *others, **options)
        return found[:, :, [0, 2, 1, 3]], None

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, GROUPED, wrong)
    model, tokens = network(), torch.arange(5)[None]
    switch_attention(model, GROUPED)
    assert not torch.allclose(model(tokens).logits, network()(tokens).logits, atol=1e-3)


def test_values_of_another_size_and_a_mask_for_each_head():
    """DeepSeek's latent attention, and Doge's masks; a layer may take a view of the result."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, 3, 6), (2, 2, 7, 6), (2, 2, 7, 5)
    q, k, v = (torch.randn(shape, generator=draw).double() for shape in shapes)
    masks = torch.randn(2, 4, 3, 7, generator=draw).double()
    for mask in (masks, masks[:, :1]):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, enable_gqa=True
        ).transpose(1, 2)
        found, _ = attention.grouped(None, q, k, v, mask)
        assert torch.allclose(found, expected, atol=1e-12)
        assert found.view(2, 3, 20).shape == (2, 3, 20)
        spans = [Span(0, slice(0, 3), (slice(7),)), Span(1, slice(1, 3), (slice(2), slice(2, 7)))]
        rows, _ = attention.grouped(None, q, k, v, mask, spans=spans)
        assert torch.allclose(rows[1, 1:], expected[1, 1:], atol=1e-12)
        assert not rows[1, 0].any()


def patterns(count):
    """Masks [1, 1, count, count + 9] of a prompt after nine tokens."""
    distance = torch.arange(count)[:, None] + 9 - torch.arange(count + 9)
    causal = distance >= 0
    return {
        "causal": causal,
        "a window": causal & (distance < 20),
        "both directions": torch.ones_like(causal),
        "blocks": torch.arange(count + 9) < (torch.arange(count)[:, None] + 9) // 32 * 32 + 32,
        "the beginning and a window": causal & ((distance < 20) | (torch.arange(count + 9) < 9)),
    }


def wide_pass(mask):
    """The attention of a wide pass, torch's own, and how many scores were computed."""
    draw = torch.Generator().manual_seed(0)
    count, keys = mask.shape
    shapes = (2, 4, count, 6), (2, 2, keys, 6), (2, 2, keys, 6)
    q, k, v = (torch.randn(shape, generator=draw).double() for shape in shapes)
    right, scores = torch.nn.functional.scaled_dot_product_attention, []

    def counted(query, key, *others, **options):
        scores.append(query.shape[2] // 2 * key.shape[2])
        return right(query, key, *others, **options)

    expected = right(q, k, v, mask, enable_gqa=True).transpose(1, 2)
    added = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        found = [attention.grouped(None, q, k, v, m[None, None])[0] for m in (mask, added)]
    assert scores[: len(scores) // 2] == scores[len(scores) // 2 :]
    return found, expected, sum(scores) // 2 / mask.numel()


@pytest.mark.parametrize("name", patterns(1))
def test_a_wide_pass_leaves_out_what_none_reads(name):
    found, expected, share = wide_pass(patterns(200)[name])
    for each in found:
        assert torch.allclose(each, expected, atol=1e-12)
    most = {"causal": 0.7, "a window": 0.45, "both directions": 1, "blocks": 0.8}
    assert share <= most.get(name, 0.5)
    assert (share == 1) == (name == "both directions")


def test_a_key_too_few_is_another_attention(monkeypatch):
    """The negative control."""
    right = attention._read_by_some

    def wrong(mask):
        keys = right(mask)
        return slice(keys.start, keys.stop - 1)

    monkeypatch.setattr(attention, "_read_by_some", wrong)
    found, expected, _ = wide_pass(patterns(200)["causal"])
    assert not torch.allclose(found[0], expected, atol=1e-3)


def gradients_of_a_wide_pass(attend, mask):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, heads, len(mask) + more, 6) for heads, more in ((4, 0), (2, 9), (2, 9))]
    given = [torch.randn(shape, generator=draw).double().requires_grad_() for shape in shapes]
    attend(*given, mask).square().sum().backward()
    return [x.grad for x in given]


def test_gradients_of_a_wide_pass(monkeypatch):
    def expected(*given):
        return torch.nn.functional.scaled_dot_product_attention(*given, enable_gqa=True)

    def found(query, key, value, mask):
        return attention.grouped(None, query, key, value, mask[None, None])[0]

    mask = patterns(200)["the beginning and a window"]
    pairs = [gradients_of_a_wide_pass(attend, mask) for attend in (found, expected)]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*pairs))
    # Negative control: without the beginning.
    monkeypatch.setattr(attention, "_read_by_some", lambda mask: slice(-20, None))
    others = gradients_of_a_wide_pass(found, mask)
    assert not torch.allclose(others[1], pairs[1][1], atol=1e-3)


@pytest.mark.parametrize("count", [3, 200])
def test_dropout_of_training(count):
    q = torch.ones(1, 2, count, 6)
    mask = torch.ones(1, 1, count, count, dtype=torch.bool)
    whole, dropped = (attention.grouped(None, q, q, q, mask, dropout=p)[0] for p in (0.0, 0.5))
    assert torch.allclose(whole, torch.ones_like(whole))
    assert set((dropped * count / 2).round(decimals=3).flatten().tolist()) <= {*range(count + 1)}
    assert dropped.unique().numel() > 1


TOKENIZER = tiny.tokenizer(13)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "bloom": ({"hidden_size": 16, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "falcon": (SIZES | {"alibi": True}, "ALiBi"),
    "mpt": ({"d_model": 16, "n_layers": 2, "n_heads": 4}, "ALiBi"),
    "codegen": ({"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "eager"),
    "recurrent_gemma": (SIZES | {"num_hidden_layers": 3}, "layers of"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_families_without_our_masks_are_one_line(kind):
    """Told what a command takes: another model."""
    sizes, reason = KINDS[kind]
    with pytest.raises(ValueError, match=rf"'{kind}' model .*{reason}") as caught:
        causal.from_config(TOKENIZER, kind, **sizes)
    assert "attn_implementation" not in str(caught.value)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=300, **sizes))
    for refuse in (check_masks, check_attention):
        with pytest.raises(ValueError, match=reason):
            refuse(built)


def test_families_with_our_masks():
    """The negative control: Falcon with rotary positions among them."""
    for kind, more in (("falcon", {"alibi": False}), ("gpt2", {}), ("llama", {})):
        model = causal.from_config(TOKENIZER, kind, **SIZES, **more).double().eval()
        tokens = torch.tensor([[1, 2, 3, 4, 5]])
        inputs = attention_inputs(model, causal_mask, layout([0] * 5, [*range(5)], [-1] * 5))
        found = model(tokens, use_cache=False, **inputs).logits
        assert torch.allclose(found, model(tokens).logits, atol=1e-9)
        check_attention(model)


def test_a_class_that_takes_no_positions_is_one_line():
    """Its texts would be others, since it counts a cache's slots as positions."""
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = AutoConfig.for_model("bart", vocab_size=300, decoder_ffn_dim=16, **sizes)
    with pytest.raises(ValueError, match=r"'bart' model .*takes no positions") as caught:
        check_attention(AutoModelForCausalLM.from_config(config))
    assert "\n" not in str(caught.value)


def test_an_attention_that_was_asked_for():
    model = network()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"attention=eager .*attention=sdpa"):
        check_attention(model)


@pytest.mark.parametrize("kind", ["lama", "imagegpt", "zamba", "helium", "roberta", ""])
def test_types_that_cannot_be_built_or_run_are_one_line(kind):
    """Among them those that fail in a forward, or in one of the export's check alone."""
    with pytest.raises(ValueError, match=f"network.model_type={kind}") as caught:
        causal.from_config(TOKENIZER, kind, **SIZES)
    assert "\n" not in str(caught.value)

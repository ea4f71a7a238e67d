"""Windows of layers: their limits, and the masks of packed texts and draft blocks."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from decoding.engine.sampler import check_attention
from models.attention import GROUPED, WRITTEN_OUT, attention_inputs, grouped, masked_inputs
from models.attention import written_out as written
from models.context import context
from models.masks import causal, chunked, dense, draft_blocks, flex, limited, sliding
from models.windows import windows_of
from tests.support.masks import drawn, layout
from tests.support.windowed import KINDS, WINDOW, V, causal_lm

ROW = layout([0] * 6, [*range(6)], [-1] * 6)


def test_a_window_has_the_token_itself_and_those_before_it():
    expected = drawn(
        """
        x . . . . .
        x x . . . .
        x x x . . .
        . x x x . .
        . . x x x .
        . . . x x x
        """
    )
    assert torch.equal(dense(limited(causal, sliding(3)), ROW)[0, 0], expected)


def test_a_chunk_does_not_see_the_one_before_it():
    expected = drawn(
        """
        x . . . . .
        x x . . . .
        x x x . . .
        . . . x . .
        . . . x x .
        . . . x x x
        """
    )
    assert torch.equal(dense(limited(causal, chunked(3)), ROW)[0, 0], expected)


def test_a_draft_block_s_tokens_count_by_position():
    """Their `index` is the length of their prefix: by it all of them would have one window."""
    rows = layout([0] * 7, [0, 1, 2, 3, 3, 3, 3], [-1, -1, -1, -1, 0, 0, 0])
    rows = rows._replace(position=torch.tensor([[0, 1, 2, 3, 3, 4, 5]]))
    found = dense(limited(draft_blocks, sliding(3)), rows)[0, 0, 4:]
    assert torch.equal(found, drawn(". x x . x x x \n . . x . x x x \n . . . . x x x"))
    by_index = dense(limited(draft_blocks, sliding(3)), rows._replace(position=None))[0, 0, 4:]
    assert not torch.equal(by_index, found)


@pytest.mark.parametrize("limit", [sliding(3), chunked(4)])
def test_block_masks_are_the_dense_ones(limit):
    rows = layout([0] * 5 + [1] * 4, [*range(5), *range(4)], [-1] * 9)
    predicate = limited(causal, limit)
    mod = flex(predicate, rows).mask_mod
    q, k = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    zero = torch.zeros_like(q)
    assert torch.equal(mod(zero, zero, q, k), dense(predicate, rows)[0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_texts_are_each_text_alone(kind):
    model = causal_lm(kind)
    text = torch.randint(V, (1, 35), generator=torch.Generator().manual_seed(1))
    row = layout([0] * 20 + [1] * 15, [*range(20), *range(15)], [-1] * 35)
    batch = {"input_ids": text} | dict(zip(row._fields, row[:3]))
    with torch.inference_mode():
        found = model(**masked_inputs(model, batch, causal)).logits
        alone = torch.cat([model(part).logits for part in text.split([20, 15], 1)], 1)
        one = dense(causal, row)  # the control: one mask for all layers
        if model.config._attn_implementation == "eager":
            one = torch.zeros(one.shape).masked_fill(~one, -torch.inf)
        wrong = model(text, attention_mask=one, position_ids=row.index).logits
    assert torch.allclose(found, alone, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(wrong, alone, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("attention", [GROUPED, WRITTEN_OUT])
def test_both_of_our_attentions_have_windows(attention):
    model = causal_lm("qwen3")
    text = torch.randint(V, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(text).logits
        model.set_attn_implementation(attention)
        inputs = attention_inputs(model, causal, layout([0] * 20, [*range(20)], [-1] * 20))
        assert {*inputs["attention_mask"]} == {"full_attention", "sliding_attention"}
        assert torch.allclose(model(text, **inputs).logits, expected, atol=1e-4)
        assert torch.allclose(model(text).logits, expected, atol=1e-4)


@pytest.mark.parametrize("function", [grouped, written])
@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias"])
def test_what_they_do_not_compute_is_one_line(function, extra):
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"'{extra}', which only its own"):
        function(torch.nn.Module(), q, k, v, mask, **{extra: torch.ones(2)})
    function(torch.nn.Module(), q, k, v, mask, **{extra: None})


def llama(**config):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, intermediate_size=24, **sizes, **config))


def test_only_a_window_below_the_context_limits_a_layer():
    assert windows_of(MistralConfig(max_position_embeddings=64, sliding_window=64)) is None
    assert windows_of(MistralConfig(sliding_window=None)) is None
    assert windows_of(llama(sliding_window=None).config) is None
    found = windows_of(MistralConfig(max_position_embeddings=64, sliding_window=63))
    assert found.narrowest == 63
    assert found.shared
    mixed = windows_of(causal_lm("gpt_oss").config)
    assert not mixed.shared
    assert mixed.narrowest == WINDOW
    assert {kind: limit is None for kind, limit in mixed.limits.items()} == {
        "full_attention": True,
        "sliding_attention": False,
    }


def test_a_text_ends_at_the_context_and_not_at_the_window():
    assert context(causal_lm("mistral").config) == 128

    class Foreign(MistralConfig):  # of a repository's own code: nobody knows what its masks are
        pass

    Foreign.__module__ = "transformers_modules.its"
    config = Foreign(sliding_window=WINDOW, max_position_embeddings=128)
    assert windows_of(config) is None
    assert context(config) == WINDOW


def test_configs_without_a_meaning_are_one_line():
    model = causal_lm("qwen3")
    check_attention(model)
    model.config.layer_types = ["sliding_attention", "spiral_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"'qwen3' model has layers of \['spiral_attention'\]"):
        check_attention(model)
    for size in (None, 0, -3):
        model = causal_lm("qwen3")
        model.config.sliding_window = size
        with pytest.raises(ValueError, match=f"'sliding_attention' and sliding_window={size}"):
            check_attention(model)
    tuned = causal_lm("llama4_text", attn_temperature_tuning=True)
    with pytest.raises(ValueError, match="attn_temperature_tuning"):
        check_attention(tuned)

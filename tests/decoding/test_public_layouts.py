"""Public masked diffusion checkpoints, read from their own layouts without their code."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.engine.params import SamplingParams
from decoding.loading import load, load_tokenizer
from models import causal, public
from tests.support.denoising import L, V, reference, sees
from tests.support.public_layouts import ATTENTION, CONFIGS, SHIFTED, forward, save
from tests.support.results import passes

PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9], [9, 9, 2, 1]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
KINDS = list(CONFIGS)


def attention(kind):
    return ATTENTION.get(kind, "bidirectional")


def opened(folder, *knobs, **options):
    return load(str(folder), sampler=("method=denoise", f"block_size={L}", *knobs), **options)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_public_network(kind, shards, tmp_path):
    _, tensors = save(kind, tmp_path, shards=shards)
    model = causal.load(str(tmp_path), dtype="auto")
    assert type(model).__module__.startswith("transformers.")
    for tokens in (PROMPTS[2] + [V] * 6, PROMPTS[3]):
        seen = sees(attention(kind), len(tokens), L)
        with torch.no_grad():
            found = model(torch.tensor([tokens]), attention_mask=seen[None, None]).logits[0]
        expected = forward(kind, tensors, tokens, seen)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


SWAPS = {  # what two names differ in
    "llada": ("model.transformer.blocks.0.{}.weight", "ff_proj", "up_proj"),
    "llada_moe": ("model.layers.1.mlp.experts.{}.up_proj.weight", "0", "1"),
    "llada2": ("model.layers.0.attention.{}_layernorm.weight", "query", "key"),
    "dream": ("model.layers.0.self_attn.{}_proj.bias", "k", "v"),
    "sdar": ("model.layers.{}.self_attn.q_norm.weight", "0", "1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_tensors_in_each_others_stead_fail_the_same_test(kind, tmp_path):
    _, tensors = save(kind, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    a, b = map(SWAPS[kind][0].format, SWAPS[kind][1:])
    stored[a], stored[b] = stored[b].clone(), stored[a].clone()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, tokens = causal.load(str(tmp_path)), PROMPTS[2] + [V] * 6
    seen = sees(attention(kind), len(tokens), L)
    with torch.no_grad():
        found = model(torch.tensor([tokens]), attention_mask=seen[None, None]).logits[0]
    expected = forward(kind, tensors, tokens, seen)
    assert (found - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_decoded_as_it_was_trained(kind, tmp_path, capsys):
    """The texts, what the loader chooses and names, and drafts that change nothing."""
    save(kind, tmp_path)
    sampler = opened(tmp_path)
    said = capsys.readouterr()
    assert f"attention={attention(kind)}" in said.err
    assert said.out == ""
    assert (sampler.mask_id, sampler.attention) == (V, attention(kind))
    assert sampler.shifted == (kind in SHIFTED)
    expected = [
        reference(sampler.target, p, 12, attention(kind), shifted=kind in SHIFTED) for p in PROMPTS
    ]
    plain = sampler.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in plain] == expected
    chain = opened(tmp_path, "method=spiffy", "graph=chain:3")
    found = chain.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in found] == expected
    assert not any(r.stats.lossy for r in found)
    assert passes(found) < passes(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_text_in_text_out(kind, tmp_path):
    save(kind, tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("abc")["input_ids"] == [0, 1, 2]
    (result,) = opened(tmp_path).generate(["abc"], GREEDY)
    assert re.fullmatch("[a-l]{12}", result.text)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_again_is_a_stock_model_that_knows_how_it_is_decoded(kind, tmp_path):
    save(kind, tmp_path / "public")
    first = opened(tmp_path / "public")
    first.target.save_pretrained(tmp_path / "stock")
    first.tokenizer.save_pretrained(tmp_path / "stock")
    assert public.layout_of(str(tmp_path / "stock")) is None
    again = opened(tmp_path / "stock")
    assert (again.attention, again.mask_id) == (first.attention, first.mask_id)
    assert again.shifted == first.shifted
    a, b = (s.generate(PROMPTS, GREEDY) for s in (first, again))
    assert [r.token_ids for r in a] == [r.token_ids for r in b]


@pytest.mark.parametrize("kind", KINDS)
def test_published_masks_and_blocks(kind, tmp_path):
    """What the published configurations leave out comes from the layout."""
    save(kind, tmp_path, mask_token_id="absent", block_size="absent")
    known = causal.load(str(tmp_path)).config.denoising
    published = {
        "llada": (126336, 32), "llada_moe": (156895, 32), "llada2": (156895, 32),
        "dream": (151666, 32), "sdar": (151669, 4),
    }  # fmt: skip
    assert (known["mask_id"], known["block_size"]) == published[kind]
    with pytest.raises(ValueError, match=rf"mask_id={published[kind][0]} .*0 to {V}"):
        opened(tmp_path)
    assert opened(tmp_path, f"mask_id={V}").mask_id == V


@pytest.mark.parametrize("kind", KINDS)
def test_another_attention_than_the_trained_one_is_refused(kind, tmp_path):
    save(kind, tmp_path)
    trained = attention(kind)
    wrong = {"bidirectional": "block_causal", "block_causal": "bidirectional"}[trained]
    with pytest.raises(ValueError, match=rf"attention='{wrong}'.*'{trained}'") as error:
        opened(tmp_path, f"attention={wrong}")
    assert "\n" not in str(error.value)
    assert opened(tmp_path, f"attention={trained}").attention == trained


def test_end_tokens_are_those_of_the_generation_config(tmp_path):
    save("llada", tmp_path)
    assert opened(tmp_path).eos == frozenset()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert opened(tmp_path).eos == {3, 5}


MISTAKES = [
    ("llada", {"block_type": "sequential"}, "block_type='sequential'"),
    ("llada", {"scale_logits": True}, "scale_logits=True"),
    ("llada_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8"),
    ("llada_moe", {"clip_qkv": 1.0}, "clip_qkv=1.0"),
    ("llada2", {"use_bias": True}, "use_bias=True"),
]


@pytest.mark.parametrize(("kind", "changed", "named"), MISTAKES)
def test_what_stock_classes_cannot_do_is_refused(kind, changed, named, tmp_path):
    save(kind, tmp_path, **changed)
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        opened(tmp_path)
    assert "trust_remote_code=true" in str(error.value)
    assert "\n" not in str(error.value)


LOST = [(kind, name.format(one)) for kind, (name, one, _) in SWAPS.items() if kind != "llada_moe"]
LOST += [("llada_moe", "model.layers.0.self_attn.q_norm.weight")]


@pytest.mark.parametrize(("kind", "lost"), LOST)
def test_a_missing_tensor_is_named(kind, lost, tmp_path):
    save(kind, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored[lost]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.") as error:
        opened(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changed", [{"architectures": ["Other"]}, {"model_type": "unheard_of"}])
def test_an_unknown_layout_needs_its_code(changed, tmp_path):
    save("llada", tmp_path, **changed)
    with pytest.raises(ValueError, match="trust_remote_code"):
        opened(tmp_path)

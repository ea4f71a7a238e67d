"""DFlash drafters that were trained elsewhere: their folders know nothing of parade."""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding import generate
from decoding.bench import text as bench
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.loading import load
from decoding.samplers.dflash import DFlashSampler
from tests.support import tiny

V = 26
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, block_size=3, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
FULL = "full_attention"
SLIDING = {"use_sliding_window": True, "sliding_window": 6}


@pytest.fixture
def folders(tmp_path):
    """A target, and a drafter for it in the layout of z-lab/Qwen3-8B-DFlash-b16."""
    model = tiny.causal_lm(V, kind="qwen3", layers=4).float()
    model.save_pretrained(tmp_path / "target")
    tiny.tokenizer(V).save_pretrained(tmp_path / "target")
    drafter = tiny.dflash(model, states=2)
    drafter.save_pretrained(tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    ours = json.loads(file.read_text())
    kept = (
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
        "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
        "num_key_value_heads", "num_target_layers", "rms_norm_eps", "vocab_size",
    )  # fmt: skip
    published = {key: ours[key] for key in kept} | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "dflash_config": {
            "mask_token_id": V - 1,
            "target_layer_ids": ours["dflash_config"]["target_layer_ids"],
        },
        "dtype": "float32",
        "layer_types": ["full_attention"] * ours["num_hidden_layers"],
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": ours["rope_parameters"]["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    file.write_text(json.dumps(published))
    return str(tmp_path / "target"), str(tmp_path / "drafter"), (model, drafter)


def change(folder, **changes):
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    config["dflash_config"] |= changes.pop("dflash_config", {})
    file.write_text(json.dumps({**config, **changes}))


def draft_logits(sampler):
    """Of three tokens after each of PROMPTS."""
    batch = Batch(PROMPTS, 32, KeyedRandomness([0, 0]), "cpu")
    sampler.begin(batch, GREEDY)
    return sampler.draft_pass(batch, 3, GREEDY)


def test_it_drafts_what_its_network_does(folders):
    target, drafter, (model, network) = folders
    published = load(drafter, target=target, dtype="float32")
    assert (type(published), published.block_size) == (DFlashSampler, 3)
    ours = DFlashSampler(model, tiny.tokenizer(V), network, mask_id=V - 1, block_size=3)
    torch.testing.assert_close(draft_logits(published), draft_logits(ours), atol=1e-4, rtol=0)
    plain = load(target, dtype="float32").generate(PROMPTS, GREEDY)
    texts = [r.token_ids for r in published.generate(PROMPTS, GREEDY)]
    assert texts == [r.token_ids for r in plain]


def test_a_dspark_drafter_drafts_what_its_network_does(folders):
    """In the layout that vLLM reads; control: its head, and the token that drafts the first."""
    target, folder, (model, _) = folders
    network = tiny.dflash(model, 2, layout="dspark", markov_rank=3)
    network.save_pretrained(folder)
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    special = config.pop("dflash_config")
    assert config["architectures"] == ["Qwen3DSparkModel"]
    config |= {"target_layer_ids": special["target_layer_ids"], "mask_token_id": V - 1}
    config |= {"block_size": 3, "confidence_head_with_markov": True, "markov_head_type": "vanilla"}
    file.write_text(json.dumps(config))
    weights = load_file(Path(folder) / "model.safetensors")
    assert weights["markov_head.markov_w1.weight"].shape == (V, 3)
    weights |= {f"confidence_head.proj.{name}": torch.zeros(1) for name in ("weight", "bias")}
    save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
    published = load(folder, target=target, dtype="float32")
    assert (published.block_size, published.markov is not None) == (3, True)
    ours = DFlashSampler(model, tiny.tokenizer(V), network, mask_id=V - 1, block_size=3)
    right = draft_logits(ours)
    torch.testing.assert_close(draft_logits(published), right, atol=1e-4, rtol=0)
    texts = published.generate(PROMPTS, GREEDY)
    plain = load(target, dtype="float32").generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in texts] == [r.token_ids for r in plain]
    without = load(folder, target=target, dtype="float32", sampler=["markov_head=false"])
    known = right.isfinite()
    assert (draft_logits(without) - right)[known].abs().max() > 1e-2
    file.write_text(json.dumps(config | {"sample_from_anchor": False}))
    assert load(folder, target=target, dtype="float32").block_size == 2
    file.write_text(json.dumps(config | {"markov_head_type": "rnn"}))
    with pytest.raises(ValueError, match="markov_head_type=rnn: only vanilla is known"):
        load(folder, target=target)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask_token_id": 0},
        {"target_layer_ids": [0, 1]},
        {"causal": True},
        {"sample_from_anchor": True},
    ],
)
def test_what_the_config_says_matters(folders, wrong):
    """The negative control of the test above: another mask, layer or block drafts otherwise."""
    target, drafter, _ = folders
    right = draft_logits(load(drafter, target=target, dtype="float32"))
    change(drafter, dflash_config=wrong)
    other = draft_logits(load(drafter, target=target, dtype="float32"))
    known = right.isfinite() & other.isfinite()  # the mask is never drafted
    assert (right[known] - other[known]).abs().max() > 1e-2


@pytest.mark.parametrize("kinds", [["sliding_attention"] * 2, ["sliding_attention", FULL]])
def test_a_window_is_followed(folders, kinds):
    """Texts stay plain decoding's; another window drafts otherwise, and so does another block."""
    target, drafter, _ = folders
    plain = load(target, dtype="float32").generate(PROMPTS, GREEDY)
    change(drafter, **SLIDING, layer_types=kinds, dflash_config={"causal": False})
    found = {}
    for size in (5, 6, 500):
        change(drafter, sliding_window=size)
        sampler = load(drafter, target=target, dtype="float32")
        found[size] = draft_logits(sampler)
        assert [r.token_ids for r in sampler.generate(PROMPTS, GREEDY)] == [
            r.token_ids for r in plain
        ]
    change(drafter, layer_types=[FULL] * 2)
    assert torch.equal(draft_logits(load(drafter, target=target, dtype="float32")), found[500])
    known = found[5].isfinite()
    assert (found[5] - found[6])[known].abs().max() > 1e-3
    if FULL not in kinds:  # blocks of a drafter that does not say so are causal, as in vLLM
        change(drafter, layer_types=kinds, dflash_config={"causal": None}, sliding_window=500)
        sampler = load(drafter, target=target, dtype="float32")
        assert sampler.drafter.causal
        assert (draft_logits(sampler) - found[500])[known].abs().max() > 1e-3


def test_a_block_of_which_all_tokens_draft_drafts_one_more(folders):
    target, drafter, _ = folders
    change(drafter, dflash_config={"sample_from_anchor": True})
    assert load(drafter, target=target, dtype="float32").block_size == 4


@pytest.mark.slow
def test_commands_take_it(folders, capsys, tmp_path):
    target, drafter, _ = folders
    generate.run([f"model={drafter}", f"target={target}", "prompt=abc", "max_new_tokens=4"])
    assert "target passes" in capsys.readouterr().out
    out = tmp_path / "out"
    bench.run([
        f"model={drafter}", f"target={target}", "prompts=2", "max_new_tokens=8", "prompt_lookup=0",
        "generate=false", "temperatures=[0]", f"out={out}", "source=stdlib", "prompt_length=16",
    ])  # fmt: skip
    rows = [*csv.DictReader((out / "bench.csv").open())]
    assert [row["sampler"] for row in rows] == ["plain", "dflash", "dflash, tree"]


def remove_weight(folder):
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("hidden_norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})


def add_weight(folder):
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file) | {"selector.weight": torch.zeros(2, 2)}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: change(f, dflash_config={"mask_token_id": None}),
            "mask_token_id=null and block",
        ),
        (lambda f: change(f, block_size=1), "block_size=1; it needs a token id and an integer"),
        (lambda f: change(f, num_target_layers=9), "num_target_layers=9, and this one has 4"),
        (
            lambda f: change(f, layer_types=["sliding_attention"] * 2),
            "sliding_window=None: its config must give the tokens of their window",
        ),
        (
            lambda f: change(f, layer_types=["full_attention", "linear_attention"]),
            r"\['linear_attention'\]: only full_attention and sliding_attention are known",
        ),
        (
            lambda f: change(f, **SLIDING, layer_types=["sliding_attention", "full_attention"]),
            "does not say whether draft blocks are causal",
        ),
        (lambda f: change(f, dflash_config={"use_swa": True}), "by dflash_config.use_swa"),
        (
            lambda f: change(f, **SLIDING, dflash_config={"swa_window_size": 7}),
            "only layer_types and sliding_window are known",
        ),
        (
            lambda f: change(f, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor=0.5, which this class does not know",
        ),
        (
            lambda f: change(f, dflash_config={"context": "other", "target_layer_ids": [1]}),
            "it has context='other': only fused, layerwise, shared are known",
        ),
        (
            lambda f: change(f, dflash_config={"context": "layerwise", "target_layer_ids": [1]}),
            "it has 2 layers with contexts of 1 states",
        ),
        (remove_weight, "lacks tensors of the network: hidden_norm.weight"),
        (add_weight, "tensors that the network does not have: selector.weight"),
    ],
)
def test_another_format_is_one_line(folders, damage, message):
    target, drafter, _ = folders
    damage(drafter)
    with pytest.raises(ValueError, match=message) as error:
        load(drafter, target=target)
    assert "\n" not in str(error.value)


def test_it_needs_a_target(folders):
    with pytest.raises(ValueError, match="names no target: give target="):
        load(folders[1])

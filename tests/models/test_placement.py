"""Placement: the key `device_map`, and networks that are spread over host memory and disk."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from models import causal, options, placement
from tests.support import tiny

V = 300
LIMITS = "cpu:60KB"  # most of the model, and not all


@pytest.fixture
def folder(tmp_path):
    tiny.causal_lm(V, kind="qwen3", layers=4).float().save_pretrained(tmp_path)
    return str(tmp_path)


def test_no_key_spreads_nothing(folder):
    assert options.loading_options(None) == {}
    network = causal.load(folder)
    assert not placement.is_spread(network)
    assert placement.input_device(network) == torch.device("cpu")
    assert not placement.layers_by_device(network)


def test_a_strategy_and_limits():
    assert options.loading_options("auto") == {"device_map": "auto"}
    found = options.loading_options("cpu:1.5MiB")
    assert found == {"device_map": "auto", "max_memory": {"cpu": 3 * 2**19}}


def test_weights_on_disk_give_the_same_logits(folder):
    whole, spread = causal.load(folder), causal.load(folder, device_map=LIMITS)
    assert {"cpu", "disk"} == set(spread.hf_device_map.values())
    assert any(p.is_meta for p in spread.parameters())
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(whole(ids).logits, spread(ids).logits)
        assert not torch.equal(whole(ids).logits, spread(ids + 1).logits)
    assert placement.input_device(spread) == torch.device("cpu")
    assert placement.layers_by_device(spread) == {torch.device("cpu"): 4}
    assert placement.place(spread, "cpu") is spread


def test_merged_experts_on_disk(tmp_path):
    """Weights that no safetensors file holds as they are: they are written for the while."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, moe_intermediate_size=8,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, num_experts_per_tok=2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    whole, spread = (causal.load(str(tmp_path), device_map=m) for m in (None, "cpu:45KB"))
    assert {"cpu", "disk"} == set(spread.hf_device_map.values())
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(whole(ids).logits, spread(ids).logits)


def test_the_offload_folder_lives_as_long_as_the_network(folder, tmp_path, monkeypatch):
    made = []

    def noted(**options):
        made.append(Folder(**options))
        return made[-1]

    Folder = causal.TemporaryDirectory
    monkeypatch.setattr(causal, "TemporaryDirectory", noted)
    spread = causal.load(folder, device_map=LIMITS)
    assert Path(made[0].name).is_dir()
    del spread
    gc.collect()
    assert not Path(made[0].name).exists()


def test_the_device_of_every_layer_of_a_map():
    """What accelerate's map says, read without a GPU: the last name that a layer is part of."""
    network = tiny.causal_lm(V, layers=4)
    network.hf_device_map = {
        "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.layers.2": "cpu",
        "model.layers.3": "disk", "model.norm": 1, "lm_head": 1,
    }  # fmt: skip
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert placement.input_device(network) == first
    # What waits in host memory or on disk runs on the first GPU.
    assert placement.layers_by_device(network) == {first: 3, second: 1}
    network.hf_device_map = {"model.embed_tokens": "cpu", "model.layers": 1, "lm_head": 1}
    assert placement.layers_by_device(network) == {second: 4}


@pytest.mark.parametrize("given", ["atuo", "cpu", "cpu:12", "cpu:1GB,", "gpu:1GB", "0:1XB", ""])
def test_another_text_is_refused_with_what_is_allowed(given):
    with pytest.raises(ValueError) as error:
        options.loading_options(given)
    text = str(error.value)
    assert repr(given) in text
    assert "auto" in text
    assert "cpu:200GiB" in text
    assert "\n" not in text


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert options.parsed("0:1GB") == {0: 10**9}
    with pytest.raises(ValueError, match=r"GPU 1.*there are 1"):
        options.parsed("0:1GB,1:1GB")


def test_accelerate_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install accelerate"):
        options.loading_options("auto")


def test_a_network_that_was_not_spread_is_moved():
    moved = []
    network = SimpleNamespace(to=lambda device: moved.append(device) or network)
    assert placement.place(network, "cpu") is network
    assert moved == ["cpu"]

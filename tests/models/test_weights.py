"""Checkpoints that do not fit their network, or are no numbers, are errors at loading."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models import causal, patches
from models.weights import check_finite
from tests.support import images, tiny


@pytest.fixture
def folder(tmp_path):
    tiny.causal_lm(32).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


KEY = "model.layers.1.mlp.up_proj.weight"


def test_a_whole_checkpoint_loads(folder):
    """Negative control."""
    assert causal.load(str(folder)).config.vocab_size == 32


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_needs_no_tensor_and_an_own_one_does(tmp_path, tied):
    tiny.causal_lm(32, tie_word_embeddings=tied).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None))
    if tied:
        causal.load(str(tmp_path))
    else:
        with pytest.raises(ValueError, match=r"lacks.*lm_head.weight"):
            causal.load(str(tmp_path))


def test_a_missing_tensor_is_an_error_and_not_random_numbers(folder):
    rewrite(folder, lambda tensors: tensors.pop(KEY))
    AutoModelForCausalLM.from_pretrained(folder)  # transformers itself takes it
    with pytest.raises(ValueError, match=f"lacks.*{KEY}") as error:
        causal.load(str(folder))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_more_layers_than_the_checkpoint_has(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks.*model\.layers\.2\..* and 6 more"):
        causal.load(str(folder))


def test_fewer_layers_than_the_checkpoint_has(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"does not have.*model\.layers\.1\."):
        causal.load(str(folder))


def test_a_tensor_of_another_size(folder):
    rewrite(folder, lambda tensors: tensors.update({KEY: torch.zeros(3, 16)}))
    with pytest.raises(ValueError, match=r"size|shape"):
        causal.load(str(folder))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(folder, number):
    rewrite(folder, lambda tensors: tensors[KEY].fill_(number))
    with pytest.raises(ValueError, match=f"{KEY}.*not finite"):
        causal.load(str(folder))


def test_finite_extremes_are_fine():
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(torch.finfo(torch.float32).max)
    check_finite(layer)


def test_code_of_its_own_does_not_run_unasked(folder):
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    file = folder / "config.json"
    own = {"model_type": "its_own", "auto_map": {"AutoConfig": "own.A", "AutoModel": "own.B"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with pytest.raises(ValueError, match="trust_remote_code=true"):
        causal.load(str(folder))


def test_patch_transformers_are_checked_too(tmp_path):
    images.model().save_pretrained(tmp_path)
    again = patches.load(str(tmp_path))
    patches.check_pair(patches.skeleton(str(tmp_path)), again)
    assert next(patches.skeleton(str(tmp_path)).parameters()).is_meta
    rewrite(tmp_path, lambda tensors: tensors["token.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"token\.weight.*not finite"):
        patches.load(str(tmp_path))
    rewrite(tmp_path, lambda tensors: tensors.pop("token.weight"))
    with pytest.raises(ValueError, match=r"lacks.*token\.weight"):
        patches.load(str(tmp_path))


def test_the_skeleton_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        patches.skeleton(str(tmp_path / "none"))

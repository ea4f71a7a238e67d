"""An export keeps the sampling and the ends of the model that it was trained from."""

import json

import pytest

from decoding.engine.defaults import model_defaults
from decoding.loading import load
from models import causal
from recipes.settings import Optimization
from tests.support import tiny
from trainers.ar import Autoregressive
from trainers.publishing.export_folder import _write_weights

V = 40
# As several public models have it; save_pretrained itself would refuse it.
SAMPLING = {"temperature": 0.6, "top_p": 0.9, "do_sample": False, "eos_token_id": [3, 5]}


@pytest.fixture
def base(tmp_path):
    """A model with its own sampling."""
    tiny.causal_lm(V).save_pretrained(tmp_path / "base")
    tiny.tokenizer(V).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(SAMPLING))
    return str(tmp_path / "base")


def exported(base, folder, network, **entry):
    """The export of a network with a tokenizer, as after a run."""
    module = Autoregressive(network, tiny.tokenizer(V), Optimization())
    module.export_config = lambda: {"method": "plain", **entry}
    _write_weights(module, network, folder)
    return json.loads((folder / "generation_config.json").read_text())


def test_a_fine_tuned_model_keeps_its_sampling_and_its_ends(base, tmp_path):
    found = exported(base, tmp_path, causal.load(base))
    assert SAMPLING.items() <= found.items()
    again, before = load(str(tmp_path)), load(base)
    assert again.eos == before.eos == {3, 5}
    assert model_defaults(again) == model_defaults(before) == {"temperature": 0.6, "top_p": 0.9}


def test_a_drafter_has_its_own_ends_alone(base, tmp_path):
    """Its target says how to sample; the tokenizer here names no end."""
    found = exported(base, tmp_path, causal.load(base), target=base)
    assert {*SAMPLING}.isdisjoint(found)


def test_a_new_model_has_its_tokenizers_ends(base, tmp_path):
    """Its config has ids of another tokenizer by default, which the export must not keep."""
    network = tiny.causal_lm(V, eos_token_id=7)
    assert network.generation_config.eos_token_id == 7
    assert "eos_token_id" not in exported(base, tmp_path, network)

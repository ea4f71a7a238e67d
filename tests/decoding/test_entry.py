"""The `parade` entry of a stranger's export: one line, or a sampler's settings; nothing else."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from decoding.loading import VERSION, load, method_of, methods, parade_config, sampling_config

DEER = {
    "method": "deer",
    "target": "runs/target",
    "tokenizer_fingerprint": "x",
    "mask_id": 3,
    "sep_id": 4,
    "block_size": 8,
    "nodes": {"1": 8, "16": 4},
    "lengths": {"1": {"0": 3, "1": 2}},
    "sharpness": {"0": [1.0, 0.9], "0.7": [1]},
    "bigrams": {"0": [0.5]},
    "draft_vocabulary": "draft_vocabulary.tensors",
    "markov_head": True,
    "something_new": [1],
}


def written(folder, config):
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return str(folder)


def test_an_entry_as_training_and_calibration_write_it(tmp_path):
    assert sampling_config(written(tmp_path, {"parade": DEER})) == DEER


@pytest.mark.parametrize("entry", [None, [], "x", {}, 3, {"target": "x"}])
def test_an_entry_without_a_method(tmp_path, entry):
    with pytest.raises(
        ValueError, match=r"config\.json: parade=.* is not allowed: it needs a method"
    ):
        load(written(tmp_path, {"parade": entry}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", None),
        ("method", 3),
        ("target", 3),
        ("target", ""),
        ("mask_id", -1),
        ("mask_id", "x"),
        ("mask_id", True),
        ("block_size", 0),
        ("block_size", -1),
        ("block_size", 10**9),
        ("nodes", {}),
        ("nodes", {"a": 3}),
        ("nodes", [3]),
        ("sharpness", {"0": []}),
        ("sharpness", float("nan")),
        ("bigrams", {"0": "x"}),
        ("lengths", {"1": 3}),
        ("draft_vocabulary", "../secret.safetensors"),
        ("draft_vocabulary", ".."),
        ("markov_head", "markov_head.tensors"),
        ("version", VERSION - 1),
    ],
)
def test_a_value_that_is_not_allowed(tmp_path, key, value):
    folder = written(tmp_path, {"parade": DEER | {key: value}})
    refused = r"is not allowed: it must|is of type .*, but .* is needed"
    with pytest.raises(ValueError, match=rf"config\.json: parade\.{key}=.* ({refused})"):
        load(folder)


@pytest.mark.parametrize("key", ["mask_id", "sep_id"])
def test_a_token_that_the_network_does_not_know(lab, tmp_path, key):
    folder = tmp_path / "export"
    shutil.copytree(lab.runs / "deer_stage2" / "export", folder)
    config = json.loads((folder / "config.json").read_text())
    size = config["vocab_size"]
    for token in (size - 1, size):
        config["parade"][key] = token
        (folder / "config.json").write_text(json.dumps(config))
        if token < size:
            load(str(folder))
    message = rf"{key}={size} is not allowed: the network's tokens are 0 to {size - 1}"
    with pytest.raises(ValueError, match=message):
        load(str(folder))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000 is not allowed"),
        ("num_hidden_layers", "x", "'num_hidden_layers' expected int, got str"),
        ("vocab_size", 10**12, "its config asks for more weights than there are"),
    ],
)
def test_sizes_that_are_not_those_of_the_weights(lab, tmp_path, key, value, message):
    folder = tmp_path / "export"
    shutil.copytree(lab.runs / "ar_target" / "export", folder)
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(str(folder))


@pytest.mark.parametrize("key", ["mask_id", "block_size", "tokenizer_fingerprint"])
def test_a_key_that_is_missing(tmp_path, key):
    entry = {k: v for k, v in DEER.items() if k != key}
    with pytest.raises(ValueError, match=rf"parade\.{key} is missing, which method=deer needs"):
        load(written(tmp_path, {"parade": entry}))


def test_a_drafters_method_on_an_ordinary_model(tmp_path):
    with pytest.raises(ValueError, match=r"parade\.target is missing, which method=deer needs"):
        load(written(tmp_path, {"model_type": "llama"}), sampler=["method=deer"])


def test_a_newer_version(tmp_path):
    folder = written(tmp_path, {"parade": DEER | {"version": VERSION + 1}})
    with pytest.raises(ValueError, match="is of version 2, and this parade reads up to 1"):
        load(folder)


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "3", '"x"', "{", "", "[" * 100_000, "\ud800".encode("utf-16", "surrogatepass")],
)
def test_a_config_that_is_none(tmp_path, text):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        parade_config(str(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = sorted({key for name in methods() for key in method_of({"method": name}).types})
ENTRIES = st.builds(
    lambda method, more: DEER | more | {"method": method},
    st.sampled_from(methods()) | JSON,
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
)


@given(ENTRIES | JSON)
def test_any_entry(tmp_path_factory, entry):
    """A ValueError of one line, or settings that the method takes."""
    folder = tmp_path_factory.mktemp("any")
    path = written(folder, {"parade": entry})
    problem = None
    try:
        config = sampling_config(path)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        assert "\n" not in problem
        return
    assert config["method"] in methods()
    for key, hint in method_of(config).types.items():
        if key in config:
            TypeAdapter(hint).validate_python(config[key])


@pytest.mark.parametrize(
    ("knob", "must"),
    [
        ("method=jacobi block_size=0", "it must be greater than or equal to 1"),
        ("method=jacobi_mr blocks=0", "it must be greater than or equal to 1"),
        ("method=jacobi_mr pool_size=-1", "it must be greater than or equal to 0"),
        ("method=jacobi_mr spawn_ratio=1.5", "it must be less than or equal to 1"),
        ("method=denoise threshold=0.0", "it must be greater than 0"),
        ("method=denoise threshold=1.1", "it must be less than or equal to 1"),
        ("method=denoise tokens_per_step=0", "it must be greater than or equal to 1"),
        ("method=denoise order=magic", r"'magic'. Choose from \['confidence', 'random'\]"),
        ("method=asarm draft=magic", "Choose from .*'sequential'"),
        ("method=asarm nodes=0", "it must be greater than or equal to 1"),
        ("method=asarm nodes=64", "it must be less than or equal to 63"),
        ("method=asarm sharpness=0.0", "it must be greater than 0"),
        ("method=asarm tolerance=2.0", "it must be less than or equal to 1"),
    ],
)
def test_a_knob_that_is_out_of_range(tmp_path, knob, must):
    method, pair = knob.split()
    folder = written(tmp_path, {"model_type": "llama"})
    with pytest.raises(ValueError, match=rf"parade\.{pair.partition('=')[0]}.*{must}"):
        sampling_config(folder, [method, pair])


def test_arguments_that_are_no_json_are_no_keys():
    """Tensors and networks come from files: an entry's text never takes their place."""
    for name in methods():
        assert not {"draft_ids", "markov", "drafter"} & method_of({"method": name}).types.keys()

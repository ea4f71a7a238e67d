"""A stranger's run, checkpoint or export: nothing of it runs, and one line says what is wrong."""

import io
import json
import pickle
import shutil
import time
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.checkpoint import save as save_shards
from torch.distributed.checkpoint.metadata import Metadata

from models import causal
from recipes.compose import RECIPES, compose, places
from recipes.stored import asks_for_code, checked_config, read_config
from trainers.export import export_checkpoint
from trainers.publishing.bundle import BUNDLE, check_bundle, write_bundle
from trainers.publishing.verify import verify
from trainers.runs.checkpoint_files import Damaged, step_of
from trainers.runs.safe_load import METADATA, Refused, check_folder

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def theirs(lab, tmp_path_factory):
    """A run's folder, which tests copy."""
    run = lab.fit("ar_target").parent
    copy = tmp_path_factory.mktemp("theirs") / "run"
    shutil.copytree(run, copy)
    return copy


@pytest.fixture
def run(theirs, tmp_path):
    return shutil.copytree(theirs, tmp_path / "run")


def last(run):
    return sorted((run / "checkpoints").glob("step-*.ckpt"))[-1]


def one_line(run, match, checkpoint=None, error=ValueError):
    before = {*run.iterdir()}
    start = time.process_time()
    with pytest.raises(error, match=match) as raised:
        export_checkpoint(run, checkpoint or last(run))
    assert time.process_time() - start < 10
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 3000
    assert {*run.iterdir()} == before
    return str(raised.value)


def put(config, key, value):
    *parents, leaf = key.split(".")
    for part in parents:
        config = config[part]
    config[leaf] = value


LOAD = "decoding.loading.load_tokenizer"
CHANGES = {
    "arguments by position": ("tokenizer", {"_target_": LOAD, "_args_": ["./tok", True]}),
    "by position, deeper": ("module.base", {"_target_": LOAD, "_args_": ["./tok", True]}),
    "a partial": ("network._partial_", True),
    "another way to convert": ("module._convert_", "all"),
    "not recursive": ("network._recursive_", False),
    "rows for a tokenizer": (
        "tokenizer", {"_target_": "data.rows.documents.documents", "source": ".", "length": 8,
                      "folder": "made"}
    ),
    "a tokenizer for a network": ("network", {"_target_": LOAD, "path": "x"}),
    "a network in a setting": ("optimization.lr", {"_target_": "models.causal.load", "path": "x"}),
    "a node in a list": ("lora.targets", [{"_target_": "models.causal.load", "path": "x"}]),
    "a node in a key of its own": ("more", {"a": {"_target_": LOAD, "path": "x"}}),
    "a function of Python": ("network._target_", "os.system"),
    "no name": ("network._target_", {"a": 1}),
    "nothing to build": ("network", {"a": 1}),
    "no module": ("module", {}),
    "a value for a network": ("module.target", 5),
    "an option of the Hub": ("network", {"_target_": "models.causal.pretrained", "path": "x",
                                         "cache_dir": "made"}),
    "an older key": ("optimization.beside_lr", 0.1),
    "a text for a number": ("optimization.lr", "fast"),
    "a list for a node": ("trainer", [1]),
    "a number for a text": ("acceptance.source", 5),
    "no number": ("optimization.lr", float("nan")),
    "a missing value": ("seed", "???"),
    "layers without end": ("network.num_hidden_layers", 10**9),
    "a key that is no text": ("network", {1: 2}),
    "no recipe": ("recipe", ["ar_target"]),
    "a recipe elsewhere": ("recipe", "../recipe/ar_target"),
    "another's command": ("recipe", "deer_answers\0"),
    "the environment": ("name", "${oc.env:HOME}"),
    "another key": ("name", "${recipe}"),
    "an interpolation in a key": ("network", {"${oc.env:HOME}": 1}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_says_no_more_than_a_command_line(run, change):
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    put(config, *CHANGES[change])
    file.write_text(yaml.safe_dump(config))
    one_line(run, r"config\.yaml is (damaged|no config of this version): ")


def test_what_was_not_changed_is_exported(run):
    assert export_checkpoint(run, last(run)).name == "export-step-4"


BOMB = "recipe: ar_target\na: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "line 2 has an anchor"),
        ("recipe: &r ar_target\nname: *r\n", "line 1 has an anchor"),
        ("a: &a {b: *a}\nrecipe: ar_target\n", "anchor"),
        ("recipe: !!python/object/apply:os.system [ls]\n", "tag"),
        ("recipe: !!set {a, b}\n", "tag"),
        ("recipe: " + "[" * 50 + "]" * 50, "levels deep"),
        ("recipe: " + "[" * 100_000, "levels deep"),
        ("recipe: " + "x" * 300_000, "characters"),
        (f"recipe: ar_target\nseed: {'9' * 5000}\n", "damaged"),
        ("recipe: a\nrecipe: b\n", "damaged"),
        ("- 1\n", "no keys"),
        ("5\n", "damaged"),
        ("\0", "damaged"),
    ],
)
def test_yaml_that_is_more_than_values(run, text, said):
    (run / "config.yaml").write_text(text)
    assert str(run / "config.yaml") in one_line(run, said)


def test_a_plain_file_is_read(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("recipe: x\na: {b: [1, 2.5e-3, null, yes, 'a & *b']}\n")
    assert read_config(file) == {"recipe": "x", "a": {"b": [1, 2.5e-3, None, True, "a & *b"]}}


def test_code_needs_a_flag_of_the_command(run):
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    assert not asks_for_code(checked_config(file))
    put(config, "tokenizer", {"_target_": LOAD, "path": "./tok", "trust_remote_code": True})
    file.write_text(yaml.safe_dump(config))
    one_line(run, "asks to run code that a model brings")
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from '\./tok'"):
        export_checkpoint(run, last(run), trust_remote_code=True)


def test_each_key_builds_what_recipes_build_there():
    assert places()["tokenizer.tokenizer"] == {LOAD}
    for recipe in RECIPES.glob("recipe/*.yaml"):
        assert "_args_" not in recipe.read_text()
    with pytest.raises(ValueError, match=r"network\._target_=.* is not allowed: recipes build"):
        compose(["recipe=deer_stage1", f"network={{_target_: {LOAD}, path: x}}"], "fit")


def spoil(folder, how):
    file = folder / BUNDLE / "generate.py"
    if how == "changed":
        file.write_text("open('made', 'w')\n" + file.read_text())
    elif how == "of equal length":
        file.write_text(file.read_text()[:-2] + "#\n")
    elif how == "one more":
        (folder / BUNDLE / "more.py").write_text("")
    elif how == "in a folder":
        (folder / BUNDLE / "more").mkdir()
        (folder / BUNDLE / "more" / "__init__.py").write_text("")
    elif how == "a folder of its name":
        file.unlink()
        file.mkdir()
        (file / "x").write_text("")
    elif how == "needs":
        (folder / BUNDLE / "requirements.txt").write_text("evil\n")
    elif how == "none":
        shutil.rmtree(folder / BUNDLE)


@pytest.mark.parametrize(
    "how",
    ["changed", "of equal length", "one more", "in a folder", "a folder of its name", "needs",
     "none"],
)  # fmt: skip
def test_an_exports_code_is_ours_or_does_not_run(tmp_path, how):
    write_bundle(tmp_path, "deer")
    check_bundle(tmp_path, "deer")
    spoil(tmp_path, how)
    with pytest.raises(ValueError, match="is not what this version of parade writes"):
        check_bundle(tmp_path, "deer")


def test_verify_compares_first(lab, tmp_path, monkeypatch):
    run = shutil.copytree(lab.fit("deer_stage2").parent, tmp_path / "run")
    started = []
    monkeypatch.setattr("subprocess.run", lambda *a, **k: started.append(a))
    with pytest.raises(AttributeError):  # the negative control: it is started
        verify(run, ["transformers"])
    assert started
    started.clear()
    spoil(run / "export", "changed")
    with pytest.raises(ValueError, match=r"generate\.py is not what this version"):
        verify(run, ["transformers"])
    assert not started


def called(module, name, *arguments):
    """A pickle that calls module.name with texts and None."""
    given = (b"N" if a is None else b"X" + len(a).to_bytes(4, "little") + a.encode()
             for a in arguments)  # fmt: skip
    return b"\x80\x04c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(given) + b"tR."


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "step-3.ckpt"
    save_shards({"a": torch.ones(3), "rate": 0.5}, checkpoint_id=folder, no_dist=True)
    size = {f.name: f.stat().st_size for f in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"step": 3, "files": size}))
    assert step_of(folder) == 3
    return folder


def rewritten(shards, change):
    metadata = pickle.loads((shards / METADATA).read_bytes())
    change(metadata)
    (shards / METADATA).write_bytes(pickle.dumps(metadata))


TORCH = "torch.distributed.checkpoint."


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        (f"{TORCH}staging", "_ReplicationStager", (None, None, None, "MADE/by/it")),
        (f"{TORCH}_async_process_executor", "_AsyncCheckpointProcess", ("x",)),
        (f"{TORCH}filesystem", "FileSystemWriter", ("MADE",)),
        (f"{TORCH}filesystem", "_FileSystemWriter", ("MADE",)),
        (f"{TORCH}hf_storage", "HuggingFaceStorageWriter", ("MADE",)),
        (f"{TORCH}metadata", "os.mkdir", ("MADE",)),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor", ()),
        ("builtins", "getattr", ("a", "b")),
    ],
)
def test_metadata_call_no_class_but_data(shards, monkeypatch, module, name, arguments):
    monkeypatch.chdir(shards.parent)
    (shards / METADATA).write_bytes(called(module, name, *arguments))
    with pytest.raises(Refused, match="asks to call"):
        check_folder(shards)
    assert [f.name for f in shards.parent.iterdir()] == [shards.name]


def test_metadata_change_no_class(shards):
    change = b"\x80\x04c" + f"{TORCH}metadata\nMetadata\n".encode() + b"N}X\x01\x00\x00\x00xK\x01s"
    (shards / METADATA).write_bytes(change + b"\x86b.")
    with pytest.raises(pickle.UnpicklingError):
        check_folder(shards)
    assert not hasattr(Metadata, "x")


def test_shards_are_beside_their_metadata(shards, tmp_path):
    def elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../secret"

    rewritten(shards, elsewhere)
    (tmp_path / "secret").write_text("x")
    with pytest.raises(TypeError, match=r"'\.\./secret', no file of its own"):
        check_folder(shards)


class Makes:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_value_among_shards_calls_nothing(shards, tmp_path):
    """torch reads what is no tensor with weights_only=False."""
    value = io.BytesIO()
    torch.save(Makes(tmp_path / "made"), value)
    (shards / "more.distcp").write_bytes(value.getvalue())

    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "rate":
                info.relative_path, info.offset = "more.distcp", 0
                info.length = len(value.getvalue())

    rewritten(shards, change)
    with pytest.raises(Refused, match="asks to call"):
        check_folder(shards)
    assert not (tmp_path / "made").exists()
    load_shards({"rate": 0.0}, checkpoint_id=shards, no_dist=True)  # the negative control
    assert (tmp_path / "made").exists()


ODD = {
    "a text for a step": {"global_step": "4", "state_dict": {}},
    "no step": {"state_dict": {}},
    "a negative step": {"global_step": -1, "state_dict": {}},
    "a step without end": {"global_step": 10**4400, "state_dict": {}},
    "a switch": {"global_step": True, "state_dict": {}},
    "a tensor": {"global_step": torch.ones(2), "state_dict": {}},
    "no weights": {"global_step": 4},
    "a list": {"global_step": 4, "state_dict": [1]},
    "not a dict": [1, 2],
    "only a tensor": torch.ones(2),
    "null": None,
}


@pytest.mark.parametrize("content", ODD)
def test_a_checkpoint_with_odd_content(run, content):
    torch.save(ODD[content], last(run))
    one_line(run, r"step-4\.ckpt is damaged \((it|Unpick)", error=Damaged)


def changed_state(run, change):
    content = torch.load(last(run), weights_only=True)
    name, value = next((n, x) for n, x in content["state_dict"].items() if x.dim() == 2)
    change(content["state_dict"], name, value)
    torch.save(content, last(run))


@pytest.mark.parametrize(
    "change",
    [
        lambda state, name, x: state.update({name: x[:1]}),
        lambda state, name, x: state.update({name: x[None]}),
        lambda state, name, x: state.update({name: "text"}),
        lambda state, name, x: state.update({name: None}),
        lambda state, name, x: state.update({name: x.to_sparse()}),
        lambda state, name, x: state.update({5: x}),
        lambda state, name, x: state.update({("a", "b"): x}),
        lambda state, name, x: state.pop(name),
        lambda state, name, x: state.clear(),
    ],
)
def test_a_checkpoint_of_other_tensors(run, change):
    changed_state(run, change)
    one_line(run, r"step-4\.ckpt|weights than there are")


def test_a_packed_checkpoint(run):
    """A few bytes that are many once unpacked; torch packs nothing."""
    with ZipFile(last(run), "w", ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10**7)
    one_line(run, "is damaged", error=Damaged)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 1000},
        {"hidden_size": 65536, "num_attention_heads": 1},
        {"intermediate_size": 10**6},
        {"model_type": "mixtral", "num_local_experts": 10**6},
    ],
)
def test_a_run_s_network_is_as_large_as_its_checkpoint(run, sizes):
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["network"] |= sizes
    file.write_text(yaml.safe_dump(config))
    one_line(run, "asks for more weights than there are")


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10_000},
        {"num_hidden_layers": 300},
        {"vocab_size": 10**9},
        {"intermediate_size": 10**9},
        {"model_type": "gpt2", "n_layer": 10**6},
        {"model_type": "mixtral", "num_local_experts": 10**8},
    ],
)
def test_an_export_s_network_is_as_large_as_its_weights(run, sizes):
    file = run / "export" / "config.json"
    causal.load(str(file.parent))
    config = json.loads(file.read_text()) | sizes
    config.pop("layer_types", None)
    file.write_text(json.dumps(config))
    start = time.process_time()
    with pytest.raises(ValueError, match=r"weights than there are|not of one model"):
        causal.load(str(file.parent))
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_pickled_weights_bound_a_network_too(run, name):
    export = run / "export"
    tensors = load_file(export / "model.safetensors")
    (export / "model.safetensors").unlink()
    torch.save(tensors, export / name)
    if "of" in name:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
        (export / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    causal.load(str(export))  # the negative control
    config = json.loads((export / "config.json").read_text()) | {"num_hidden_layers": 10_000}
    config.pop("layer_types", None)
    (export / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="asks for more weights than there are"):
        causal.load(str(export))


@pytest.mark.parametrize("kind", ["missing", "of another kind"])
def test_a_card_of_odd_provenance(run, kind):
    file = run / "provenance.json"
    story = json.loads(file.read_text())
    if kind == "missing":
        del story["git_dirty"]
    else:
        story["packages"] = 3
    file.write_text(json.dumps(story))
    one_line(run, "cannot load the facts of a run")


@pytest.mark.parametrize("kind", ["up", "absolute", "below", "no text"])
def test_an_index_names_files_beside_it(run, kind, tmp_path):
    export = run / "export"
    tensors = load_file(export / "model.safetensors")
    (export / "model.safetensors").rename(export / "a.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    file = export / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    causal.load(str(export))  # the negative control
    (export / "sub").mkdir()
    for folder in (tmp_path, export / "sub"):
        save_file(tensors, folder / "secret.safetensors", {"format": "pt"})
    secret = tmp_path / "secret.safetensors"
    named = {"up": "../../secret.safetensors", "absolute": str(secret),
             "below": "sub/secret.safetensors", "no text": 5}[kind]  # fmt: skip
    index["weight_map"][next(iter(tensors))] = named
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="cannot load a model from") as error:
        causal.load(str(export))
    assert "\n" not in str(error.value)
    if kind != "no text":
        assert "only files beside it" in str(error.value)


def test_attention_names_no_repository(run):
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    path = str(run / "export")
    config["network"] = {"_target_": "models.causal.pretrained", "path": path, "attention": "sdpa"}
    file.write_text(yaml.safe_dump(config))
    assert export_checkpoint(run, last(run)).is_dir()
    config["network"]["attention"] = "someone/kernel"
    file.write_text(yaml.safe_dump(config))
    one_line(run, r"unknown network\.attention 'someone/kernel'")

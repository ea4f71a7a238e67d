import json
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM

from data.text.tokenizer import train_tokenizer
from decoding import loading
from decoding.generate import run
from decoding.loading import load, load_newer, target_fingerprint
from models.packed import stored_in
from tests.support import tiny
from tests.support.commands import refusal

pytestmark = pytest.mark.usefixtures("forked")


def test_method_and_target_come_from_the_export(lab):
    assert type(load(str(lab.runs / "deer_stage2" / "export"))).__name__ == "DeerSampler"
    assert type(load(str(lab.runs / "ar_target" / "export"))).__name__ == "PlainSampler"


def test_a_target_folder_is_looked_for_beside_the_export(lab, tmp_path, monkeypatch):
    export = tmp_path / "drafter"
    shutil.copytree(lab.runs / "deer_stage2" / "export", export)
    shutil.copytree(lab.runs / "ar_target" / "export", export / "target")
    config = json.loads((export / "config.json").read_text())
    config["parade"]["target"] = "./target"
    (export / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert load(str(export)).target.name_or_path == str(export / "./target")


class TestAnotherTarget:
    """An export says whose weights it was trained for; another target is one line, no error."""

    def loaded(self, export, target, capsys):
        load(str(export), target=target and str(target))
        return [line for line in capsys.readouterr().err.splitlines() if "weights than" in line]

    def copied(self, lab, folder, change=0.0, **saved):
        shutil.copytree(lab.runs / "ar_target" / "export", folder)
        network = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        with torch.no_grad():
            network.model.layers[-1].self_attn.v_proj.weight += change
        network.save_pretrained(folder, **saved)
        return folder

    def test_it_is_told(self, lab, tmp_path, capsys):
        tuned = self.copied(lab, tmp_path / "tuned", 1e-3)
        (line,) = self.loaded(lab.runs / "deer_stage2" / "export", tuned, capsys)
        assert line.startswith("warning: ")
        assert f"was trained for a target with other weights than '{tmp_path / 'tuned'}'" in line

    def test_a_copy_with_other_files_is_the_same(self, lab, tmp_path, capsys):
        copy = self.copied(lab, tmp_path / "copy", max_shard_size=50_000)
        assert len([*copy.glob("*.safetensors")]) > 1
        for target in (copy, None):
            assert self.loaded(lab.runs / "deer_stage2" / "export", target, capsys) == []

    def test_an_older_export_says_nothing(self, lab, tmp_path, capsys):
        shutil.copytree(lab.runs / "deer_stage2" / "export", tmp_path / "old")
        config = json.loads((tmp_path / "old" / "config.json").read_text())
        del config["parade"]["target_fingerprint"]
        (tmp_path / "old" / "config.json").write_text(json.dumps(config))
        tuned = self.copied(lab, tmp_path / "tuned", 1e-3)
        assert self.loaded(tmp_path / "old", tuned, capsys) == []

    def test_what_is_not_on_this_machine_has_none(self, tmp_path, monkeypatch):
        monkeypatch.setattr("socket.socket.connect", None)  # nothing is asked for
        assert loading.target_fingerprint("org/none") is None
        assert loading.target_fingerprint(str(tmp_path / "none")) is None


class TestNewer:
    """A newer drafter shares the target that is in memory, or is one line."""

    def newer(self, lab, path, fingerprint=None, **options):
        target = lab.runs / "ar_target" / "export"
        old = load(str(lab.runs / "deer_stage1" / "export"))
        fingerprint = fingerprint or target_fingerprint(str(target))
        return old, load_newer(str(path), old, fingerprint, **options)

    def test_the_target_is_not_loaded_again(self, lab, monkeypatch):
        old, new = self.newer(lab, lab.runs / "deer_stage2" / "export")
        assert (new.target, new.tokenizer) == (old.target, old.tokenizer)
        assert new.drafter is not old.drafter

    def test_a_copy_of_the_target_is_the_same(self, lab, tmp_path):
        shutil.copytree(lab.runs / "ar_target" / "export", tmp_path / "copy")
        export = lab.runs / "deer_stage2" / "export"
        old, new = self.newer(lab, export, target=str(tmp_path / "copy"))
        assert new.target is old.target

    def test_what_is_no_drafter_of_the_target_is_one_line(self, lab, tmp_path):
        export = lab.runs / "deer_stage2" / "export"
        with pytest.raises(ValueError, match="has not the weights of the one that is served"):
            self.newer(lab, export, "0" * 16)
        with pytest.raises(ValueError, match="has no drafter"):
            self.newer(lab, lab.runs / "ar_target" / "export")
        with pytest.raises(ValueError, match="has no drafter"):
            self.newer(lab, export, sampler=["method=plain"])
        copy = tmp_path / "export"
        shutil.copytree(export, copy)
        config = json.loads((copy / "config.json").read_text())
        config["parade"]["tokenizer_fingerprint"] = "0" * 16
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="different tokenizers"):
            self.newer(lab, copy)


def test_an_unknown_method_lists_those_that_exist(lab, tmp_path):
    shutil.copytree(lab.runs / "ar_target" / "export", tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    config["parade"] = {"method": "deeer"}
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unknown method 'deeer'. Did you mean 'deer'"):
        load(str(tmp_path / "x"))


def test_a_target_with_another_tokenizer_is_refused(lab, tmp_path):
    tiny.causal_lm(320).save_pretrained(tmp_path / "other")
    train_tokenizer(["another text, other merges"], 280).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="different tokenizers"):
        load(str(lab.runs / "deer_stage2" / "export"), target=str(tmp_path / "other"))


def test_the_hub_out_of_reach_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = []

    def download(path, name):
        asked.append(name)
        return hf_hub_download(path, name)

    monkeypatch.setattr(loading, "hf_hub_download", download)
    with pytest.raises(ValueError, match="cannot reach 'org/name' on the Hub") as error:
        load("org/name")
    assert "\n" not in str(error.value)
    assert len(asked) == 1  # each would be tried for half a minute


def generate(*arguments):
    command = [sys.executable, "-m", "decoding.generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_unknown_type_of_weights(lab):
    with pytest.raises(ValueError, match="dtype='float33' is no type of weights"):
        load(str(lab.runs / "ar_target" / "export"), dtype="float33")


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "bfloat16"), ("float32", "float32")])
def test_a_drafter_has_the_type_of_its_target(dtype, expected, lab, tmp_path):
    """It is stored in float32, as it was trained, and read in every cycle."""
    export, folder = lab.runs / "deer_stage2" / "export", tmp_path / "target"
    shutil.copytree(lab.runs / "ar_target" / "export", folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").save_pretrained(folder)
    assert json.loads((export / "config.json").read_text())["dtype"] == "float32"
    sampler = load(str(export), target=str(folder), dtype=dtype)
    stored = {str(stored_in(model)) for model in (sampler.target, sampler.drafter)}
    assert stored == {f"torch.{expected}"}


def test_a_pickle_that_asks_for_more_than_tensors(lab, tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(lab.runs / "ar_target" / "export", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="its weights are a pickle that asks for more than tensor"):
        load(str(folder))


@pytest.mark.processes
def test_generate_prints_the_text_and_its_cost(lab):
    model = f"model={lab.runs / 'deer_stage2' / 'export'}"
    done = generate(model, "prompt=def key", "max_new_tokens=8", "temperature=0.7", "seed=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def key")
    assert "8 tokens in" in done.stdout
    assert "tokens per target pass" in done.stdout
    again = generate(model, "prompt=def key", "max_new_tokens=8", "temperature=0.7", "seed=1")
    assert again.stdout.split("\n\n")[0] == done.stdout.split("\n\n")[0]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("max_new_tokens=0", "from 1 to"),
        ("temperature=-1", "temperature=-1.0 is not allowed"),
        ("top_p=1.5", "in (0, 1]"),
        ("verify=three", "['block', 'coupled', 'rejection', 'tree']"),
        ("max_new_tokens=9999", "context of 256"),
        ("temprature=1", "Did you mean 'temperature'"),
    ],
)
def test_mistakes_are_one_line(lab, argument, message, monkeypatch, capsys):
    model = f"model={lab.runs / 'deer_stage2' / 'export'}"
    assert message in refusal(run, [model, "prompt=def", argument], monkeypatch, capsys)

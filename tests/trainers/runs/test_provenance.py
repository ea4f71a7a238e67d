"""What a run keeps of where it came from, and what its card says of it."""

import json
import re
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from data.corpora import fingerprints
from data.corpora.fingerprints import commit, input_fingerprint
from data.corpora.stdlib import is_held_out
from tests.support.refused import refused
from tests.support.spoil import nan, spoil
from trainers.ar import Autoregressive
from trainers.diffusion import MaskedDiffusion
from trainers.publishing.private import public
from trainers.runs.provenance import inputs


def story(lab, recipe, name=""):
    return json.loads((lab.runs / recipe / name / "provenance.json").read_text())


def test_data_inputs_and_machine_are_recorded(lab):
    found = story(lab, "deer_stage2")
    for split in ("train", "validation"):
        rows = found["data"][split]
        manifest = json.loads(
            (lab.runs / "data" / rows["fingerprint"] / "manifest.json").read_text()
        )
        assert (rows["rows"], rows["tokens"]) == (manifest["rows"], manifest["tokens"])
    made_from = [lab.corpus, lab.runs / "deer_answers"]
    made_from += [lab.runs / recipe / "export" for recipe in ("ar_target", "deer_stage1")]
    assert found["inputs"] == {str(path): input_fingerprint(path) for path in made_from}
    assert found["trainer"] == {
        "world_size": 1, "num_nodes": 1, "devices": 1, "accelerator": "CPUAccelerator",
        "strategy": "SingleDeviceStrategy", "precision": "32-true",
    }  # fmt: skip
    assert found["hardware"]["gpus"] == []
    assert found["step"] == 0


def test_it_goes_with_the_weights_and_into_the_card(lab):
    export = lab.runs / "deer_stage2" / "export"
    found = story(lab, "deer_stage2")
    assert json.loads((export / "parade_provenance.json").read_text()) == public(found)
    card = (export / "README.md").read_text()
    for split, rows in found["data"].items():
        assert f"{rows['fingerprint']} ({split})" in card
    for path, digest in public(found["inputs"]).items():
        assert f"`{path}` ({digest})" in card
    assert "SingleDeviceStrategy in 32-true" in card
    assert "resumed" not in card


def test_a_resumed_run_appends_its_start(lab, monkeypatch):
    with monkeypatch.context() as patch:
        spoil(patch, Autoregressive, 3, nan)
        with pytest.raises(ValueError, match="nan"):
            lab.fit("ar_target", "name=twice")
    first = story(lab, "ar_target", "twice")
    export = lab.fit("ar_target", "name=twice")
    both = story(lab, "ar_target", "twice")
    (second,) = both.pop("resumed")
    assert both == first
    assert second["step"] == 2
    assert second["data"] == first["data"]
    assert second.keys() == first.keys()
    assert f"resumed at step 2 ({second['time']})" in (export / "README.md").read_text()
    lab.fit("ar_target", "name=twice", "resume=never")
    assert "resumed" not in story(lab, "ar_target", "twice")


class TestOtherInputs:
    """A run goes on over the inputs that it began with, or says in one line what has changed."""

    def stopped(self, lab, recipe, kind, own):
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, kind, 3, nan)
            with pytest.raises(ValueError, match="nan"):
                lab.fit(recipe, *own)

    @pytest.fixture
    def own(self, lab, tmp_path, request):
        """A corpus, and the arguments of a run on it that has stopped after step 2."""
        corpus = shutil.copytree(lab.corpus, tmp_path / "corpus")
        own = [f"data.{split}.source={corpus}" for split in ("train", "validation")]
        own += [f"name={request.node.name}"]
        self.stopped(lab, "ar_target", Autoregressive, own)
        return corpus, own

    def test_the_same_go_on(self, lab, own):
        corpus, own = own
        (corpus / "notes.bin").write_text("not read")
        assert lab.fit("ar_target", *own).is_dir()

    def test_another_content_is_refused_and_named(self, lab, own, capsys):
        corpus, own = own
        file = next(f for f in sorted(corpus.iterdir()) if not is_held_out(f.name))
        file.write_text(file.read_text().swapcase())
        with pytest.raises(ValueError, match=r"other inputs .*content of data\.train") as caught:
            lab.fit("ar_target", *own)
        message = str(caught.value)
        assert {"name=...,", "resume=never"} <= {*message.split()}
        assert "\n" not in message
        resume = next(word for word in message.split() if word.startswith("resume=/"))
        capsys.readouterr()
        lab.fit("ar_target", *own, resume)  # chosen by the user
        assert "other inputs" in capsys.readouterr().out

    def test_a_finished_run_is_refused_too(self, lab, own, capsys):
        corpus, own = own
        capsys.readouterr()
        lab.fit("ar_target", *own)
        assert "goes on at step 2 of 4 steps" in capsys.readouterr().out
        (corpus / "notes.bin").write_text("not read")
        export = lab.fit("ar_target", *own)  # as it was: nothing is trained
        assert "is there already" in capsys.readouterr().out
        before = (export / "model.safetensors").stat().st_mtime_ns
        file = next(f for f in sorted(corpus.iterdir()) if not is_held_out(f.name))
        content = file.read_text()
        file.write_text(content.swapcase())
        message = refused(lab.fit, "ar_target", *own)
        assert re.search(r"finished run of other inputs .*content of data\.train", message)
        assert "optimization.lr" in refused(lab.fit, "ar_target", *own, "optimization.lr=0.5")
        assert "lora.merge" in refused(
            lab.fit, "ar_target", *own, "lora.rank=0", "lora.merge=false"
        )
        assert (export / "model.safetensors").stat().st_mtime_ns == before
        file.write_text(content)
        lab.fit("ar_target", *own)
        shutil.rmtree(corpus)  # what is gone tells nothing
        capsys.readouterr()
        lab.fit("ar_target", *own)
        assert "is there already" in capsys.readouterr().out

    def test_another_model_is_refused_and_named(self, lab, tmp_path):
        """With one bit of its weights changed; the rows are the same."""
        model = shutil.copytree(lab.fit("ar_target"), tmp_path / "model")
        own = [f"target={model}", "name=of_another_model", "acceptance.prompts=0"]
        self.stopped(lab, "diffusion_adapt", MaskedDiffusion, own)
        file = model / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"other inputs \({model}: v2-\w+, now v2-\w+\)"):
            lab.fit("diffusion_adapt", *own)


class TestInputs:
    @pytest.fixture
    def model(self, lab, tmp_path):
        return shutil.copytree(lab.runs / "ar_target" / "export", tmp_path / "model")

    def test_a_model_is_its_config_and_weights(self, lab, model):
        before = input_fingerprint(model)
        assert before == input_fingerprint(lab.runs / "ar_target" / "export")
        (model / "README.md").write_text("with a bench")
        assert input_fingerprint(model) == before
        weights = load_file(model / "model.safetensors")
        first = min(weights)
        weights[first] = weights[first] + 1e-3  # trained a little more: the same shapes and sizes
        size = (model / "model.safetensors").stat().st_size
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        assert (model / "model.safetensors").stat().st_size == size
        trained = input_fingerprint(model)
        assert trained != before
        (model / "modeling_own.py").write_text("# code that the model brings")
        coded = input_fingerprint(model)
        assert coded not in (before, trained)
        (model / "config.json").write_text("{}")
        assert input_fingerprint(model) not in (before, trained, coded)

    def test_big_weights_are_told_apart_by_blocks(self, tmp_path):
        file = tmp_path / "big.safetensors"
        found = set()
        for seed in (0, 1):
            torch.manual_seed(seed)
            save_file({"w": torch.randn(1_000_000)}, file)
            found.add(input_fingerprint(file))
            found.add(input_fingerprint(file))
        assert len(found) == 2

    def test_a_corpus_is_all_of_its_files(self, tmp_path):
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "a.py").write_text("a = 1")
        found = [input_fingerprint(tmp_path)]
        (tmp_path / "deep" / "a.py").write_text("a = 2")
        found.append(input_fingerprint(tmp_path))
        (tmp_path / "deep" / "a.py").rename(tmp_path / "deep" / "b.py")
        found.append(input_fingerprint(tmp_path))
        assert len(set(found)) == 3

    def test_a_collection_is_not_those_in_its_folder(self, tmp_path):
        for name in ("manifest.json", "shards/0.parquet"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        found = [input_fingerprint(tmp_path)]
        (tmp_path / "another" / "shards").mkdir(parents=True)
        (tmp_path / "another" / "shards" / "0.parquet").write_text("b")
        found.append(input_fingerprint(tmp_path))
        (tmp_path / "shards" / "1.parquet").write_text("c")
        found.append(input_fingerprint(tmp_path))
        assert found[0] == found[1] != found[2]

    def test_hub_ids_have_the_commit_that_the_cache_knows(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fingerprints, "HF_HUB_CACHE", str(tmp_path))
        for folder, hash in (("models--org--net", "c0ffee"), ("datasets--org--text", "beef")):
            (tmp_path / folder / "refs").mkdir(parents=True)
            (tmp_path / folder / "refs" / "main").write_text(f"{hash}\n")
        assert [commit(n) for n in ("org/net", "org/text", "org/other")] == ["c0ffee", "beef", None]
        assert commit("python -m trainers.fit runs=runs/lab") is None  # one slash, but no id
        config = {
            "runs": str(tmp_path), "scale": "lab", "trainer": {}, "target": "org/net",
            "data": {"folder": str(tmp_path), "train": {"source": "org/text", "split": "train"}},
            "network": {"sources": [{"path": "org/other"}]},
            "needs": [{"path": str(tmp_path / "models--org--net" / "refs")},
                      {"path": str(tmp_path / "models--org--net" / "refs" / "main")}],
        }  # fmt: skip
        needed = str(tmp_path / "models--org--net" / "refs")
        assert inputs(OmegaConf.create(config)) == {
            "org/net": "c0ffee",
            "org/text": "beef",
            needed: input_fingerprint(needed),
        }

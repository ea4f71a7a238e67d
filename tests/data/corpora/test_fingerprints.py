"""A fingerprint is that of every byte, also where it is remembered."""

import os

import pytest
import torch
from safetensors.torch import save_file

from data.corpora import fingerprints, sources
from data.corpora.fingerprints import (
    VERSION,
    commit,
    input_fingerprint,
    model_fingerprint,
    same_model,
    weights_fingerprint,
)
from data.corpora.sources import content_fingerprint


def edit(file, at):
    """Change one byte, and leave size and date as they were."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def big(tmp_path):
    file = tmp_path / "w.safetensors"
    file.write_bytes(bytes(range(256)) * 4096)
    return file


def test_one_byte_anywhere_is_another_fingerprint(big):
    found = {input_fingerprint(big)}
    for at in (0, 500_000, 555_555, big.stat().st_size - 1):
        edit(big, at)
        found.add(input_fingerprint(big))
    assert len(found) == 5
    assert all(x.startswith(VERSION) for x in found)


def test_a_remembered_one_is_forgotten_with_any_change(big, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fingerprints, "REMEMBERED", 1000)
    first = input_fingerprint(big)
    assert not (tmp_path / "home").exists()  # a file of just now may change in the same instant
    monkeypatch.setattr(fingerprints, "SETTLED", -(10**12))
    assert input_fingerprint(big) == first
    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "_digest", None)
        assert input_fingerprint(big) == first
    edit(big, 555_555)
    second = input_fingerprint(big)
    edit(big, 555_555)  # back again: known by its content, not by its date
    assert second != first == input_fingerprint(big)


def test_old_fingerprints_of_models_are_compared_as_they_were_made(big):
    old = fingerprints._digest([(str(big.relative_to(big)), big)], sampled=True)
    assert same_model(str(big), old)
    assert same_model(str(big), model_fingerprint(str(big)))
    edit(big, 555_555)
    assert same_model(str(big), old)  # the samples of before did not see it
    edit(big, 0)
    assert not same_model(str(big), old)
    assert same_model("org/none", "org/none")
    assert not same_model("org/none", None)


def test_only_what_is_read_of_a_corpus_counts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    first = content_fingerprint(str(tmp_path), tmp_path / "cache")
    (tmp_path / "notes.bin").write_text("x")
    (tmp_path / "b.md").write_text("not read beside .jsonl")
    assert content_fingerprint(str(tmp_path), tmp_path / "cache") == first
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    assert content_fingerprint(str(tmp_path), tmp_path / "cache") != first


def test_a_hub_data_set_is_its_commit_also_without_network(tmp_path, monkeypatch):
    class Hub:
        answers = ["c0ffee", "beef"]

        def dataset_info(self, name, timeout):
            if not self.answers:
                raise OSError("no network")
            return type("Info", (), {"sha": self.answers.pop(0)})

    monkeypatch.setattr(sources, "HfApi", Hub)
    monkeypatch.setattr(fingerprints, "HF_HUB_CACHE", str(tmp_path))
    found = [content_fingerprint("org/text", tmp_path / "rows") for _ in range(3)]
    assert found == ["org/text@c0ffee", "org/text@beef", "org/text@beef"]
    assert content_fingerprint("org/other", tmp_path / "rows") == "org/other@None"
    assert commit("org/text") is None


class TestWeights:
    """Fingerprints of weights see every tensor, whatever the files, and read little."""

    def saved(self, file, tensors, **options):
        save_file(tensors, file, **options)
        return weights_fingerprint([file])

    def test_a_change_of_any_tensor_is_seen(self, tmp_path):
        tensors = {f"layers.{i}": torch.randn(3, 1500) for i in range(20)}
        tensors |= {"empty": torch.zeros(0, 3), "one": torch.ones(())}
        first = self.saved(tmp_path / "a.safetensors", tensors)
        assert first == self.saved(tmp_path / "b.safetensors", tensors, metadata={"made": "by"})
        found = {first}
        for name in ("layers.0", "layers.13", "layers.19", "one"):
            found.add(self.saved(tmp_path / "c.safetensors", {**tensors, name: tensors[name] + 1}))
        as_half = {name: x.half() for name, x in tensors.items()}
        found.add(self.saved(tmp_path / "c.safetensors", as_half))
        renamed = {f"x.{name}": x for name, x in tensors.items()}
        found.add(self.saved(tmp_path / "c.safetensors", renamed))
        assert len(found) == 7

    def test_how_tensors_are_spread_over_files_is_not(self, tmp_path):
        tensors = {name: torch.randn(2, 5) for name in "abc"}
        whole = self.saved(tmp_path / "model.safetensors", tensors)
        parts = [tmp_path / "m-1.safetensors", tmp_path / "m-2.safetensors"]
        save_file({"c": tensors["c"]}, parts[0])
        save_file({name: tensors[name] for name in "ba"}, parts[1])
        assert weights_fingerprint(parts) == whole != weights_fingerprint(parts[:1])

    def test_little_is_read(self, tmp_path, monkeypatch):
        read, sha = [], fingerprints.hashlib.sha256
        monkeypatch.setattr(fingerprints.hashlib, "sha256", lambda x: read.append(len(x)) or sha(x))
        self.saved(tmp_path / "a.safetensors", {"a": torch.zeros(2**20), "b": torch.zeros(9)})
        assert sum(read) < 10_000

    def test_a_pickle_is_read_in_samples(self, tmp_path):
        found = set()
        for value in (1, 2, 2):
            torch.save({"a": torch.full((50_000,), value)}, tmp_path / "pytorch_model.bin")
            found.add(weights_fingerprint([tmp_path / "pytorch_model.bin"]))
        assert len(found) == 2

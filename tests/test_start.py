"""Commands read and check their options before anything heavy is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformers", "pytorch_lightning", "torchmetrics", "scipy", "datasets",
         "deepspeed", "matplotlib", "pandas", "peft", "sklearn"}  # fmt: skip
DECODING = ["audit", "bench", "bench.denoise", "bench.engine", "bench.fid", "bench.heldout_loss",
            "bench.images", "bench.infill", "calibrate", "collect", "fetch", "generate", "images",
            "lm_eval", "serve"]  # fmt: skip
COMMANDS = [f"decoding.{name}" for name in DECODING] + ["trainers.export", "trainers.fit"]

pytestmark = pytest.mark.processes


def started(folder, *command):
    """Run a command in a folder; its process, and the heavy packages that it imported."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-X", "importtime", "-m", *command]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    imported = {x.rpartition("|")[2].strip().partition(".")[0] for x in lines if "import time" in x}
    assert "pydantic" in imported
    done.stderr = "\n".join(x for x in lines if "import time" not in x)
    return done, imported & HEAVY


def test_every_command_is_here():
    """A module that runs as a command has a line `main(run)`."""
    files = [*ROOT.glob("decoding/**/*.py"), *ROOT.glob("trainers/**/*.py")]
    found = {f for f in files if "\n    main(run)\n" in f.read_text() or f.name == "__main__.py"}
    found = {".".join(f.relative_to(ROOT).with_suffix("").parts) for f in found}
    found = {name.removesuffix(".__main__") for name in found} - {"decoding.bench.text"}
    assert found == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command, tmp_path):
    done, heavy = started(tmp_path, command, "--help")
    assert (done.returncode, heavy, done.stderr) == (0, set(), "")
    assert done.stdout.startswith(f"usage: python -m {command} ")


MISTAKES = {
    "a key": ("decoding.generate modle=x", "unknown key 'modle'. Did you mean 'model'?"),
    "a value": ("decoding.serve model=x port=70000", "port=70000 is not allowed"),
    "a device": ("decoding.bench model=x device=tpu", "device='tpu' is no device"),
    "a folder": ("decoding.bench model=./nowhere", "no model at './nowhere'"),
    "an empty folder": ("decoding.generate model=. prompt=x", "no model at '.'"),
    "a prompt": ("decoding.generate model=model prompt=@none", "prompt='@none' cannot be read"),
    "an export": ("decoding.calibrate model=nowhere", "model='nowhere' is no folder of an export"),
    "a run": ("trainers.export run=nowhere", "run=nowhere is not there"),
    "a recipe": ("trainers.fit recipe=dear", "unknown recipe 'dear'"),
    "a scale": ("trainers.fit recipe=deer_stage2 scale=papr", "Did you mean 'paper'?"),
    "a setting": ("trainers.fit recipe=ar_target trainer.max_stps=3", "'trainer.max_steps'?"),
    "an argument": ("trainers.fit recipe=deer_stage2 module.alpa=2", "'module.alpha'?"),
    "its value": ("trainers.fit recipe=deer_stage2 module.alpha=0.5", "module.alpha=0.5 is not"),
    "an input": (
        "trainers.fit recipe=deer_stage2 build_inputs=false",
        "is missing",
    ),
    "a collection": ("decoding.collect recipe=deer_answers prompts.cont=3", "'prompts.count'?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_imports_nothing_heavy(mistake, tmp_path):
    command, line = MISTAKES[mistake]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done, heavy = started(tmp_path, *command.split())
    assert (done.returncode, done.stderr.count("\n"), heavy) == (2, 0, set())
    assert done.stderr.startswith("error: ")
    assert line in done.stderr


@pytest.mark.parametrize(
    "command",
    ["trainers.fit recipe=deer_stage2", "trainers.fit recipe=pcllm_round1 scale=paper",
     "decoding.collect recipe=deer_answers", "decoding.generate model=x"],
)  # fmt: skip
def test_a_config_imports_nothing_heavy(command, tmp_path):
    done, heavy = started(tmp_path, *command.split(), "--cfg", "job")
    assert (done.returncode, heavy) == (0, set())
    assert "model: x" in done.stdout or "recipe: " in done.stdout


def test_what_is_heavy_would_be_seen(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("[]")
    done, heavy = started(tmp_path, "decoding.generate", "model=model", "prompt=x")
    assert done.returncode == 2
    assert "is damaged" in done.stderr
    assert {"torch", "transformers"} <= heavy
    assert "pytorch_lightning" not in heavy


def test_an_answer_needs_torch_and_transformers_alone(tmp_path):
    folder = tmp_path / "model"
    tiny.causal_lm(26).float().save_pretrained(folder)
    tiny.tokenizer(26).save_pretrained(folder)
    done, heavy = started(tmp_path, "decoding.generate", "model=model", "prompt=abc")
    # transformers imports scipy, where it is installed.
    assert (done.returncode, heavy - {"scipy"}) == (0, {"torch", "transformers"})
    assert done.stdout.startswith("abc")

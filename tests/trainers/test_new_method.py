"""CONTRIBUTING's promise: a method is new files only, also one that reads its target's states.

A toy drafter without embeddings, with a reduced vocabulary, that drafts from a hidden state of its
target, is put beside a copy of the packages, trained for two steps, exported, loaded and decoded
with, all by the real commands. No file of parade is edited.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import SMALL, Lab

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "new_method"
PLACES = {
    "loss.py": "trainers/losses/toy.py",
    "module.py": "trainers/toy.py",
    "recipe.yaml": "recipes/recipe/toy.yaml",
    "sampler.py": "decoding/samplers/toy.py",
    "network.py": "models/toy.py",
}
DECODE = """
import json, sys, torch
from decoding import SamplingParams, load
from decoding.samplers.plain import PlainSampler

toy = load(sys.argv[1], dtype="float32")
plain = PlainSampler(toy.target, toy.tokenizer)
prompts = [[5, 6, 7], [9], [3, 1, 4, 1, 5]]
found = {}
for temperature in (0.0, 1.0):
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=7, ignore_eos=True)
    for name, sampler in (("toy", toy), ("plain", plain)):
        results = sampler.generate(prompts, params)
        found[f"{name} {temperature}"] = [r.token_ids for r in results]
rows, params = toy.start(prompts[0])
with torch.inference_mode():
    toy.begin(rows, params)
    draft = toy.draft_pass(rows, 3, params)
    rows.state.hidden = torch.zeros_like(rows.state.hidden)
    blind = toy.draft_pass(rows, 3, params)
drafted = draft[0, 0].isfinite().nonzero().flatten().tolist()
json.dump({**found, "tokens": drafted, "reads": bool((draft != blind).any())}, sys.stdout)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the packages with the toy's files, and a tiny target."""
    root = tmp_path_factory.mktemp("tree")
    for package in ("data", "models", "decoding", "trainers", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, root / package, ignore=ignored)
    for name, place in PLACES.items():
        assert not (root / place).exists()
        shutil.copy(TOY / name, root / place)
    lab = Lab(root / "lab")
    lab.fit("ar_target")
    return root, lab


def run(root, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def fit(tree, *overrides):
    root, lab = tree
    recipe = ["recipe=toy", f"runs={lab.runs}", f"target={lab.runs}/ar_target/export"]
    steps = ["trainer.max_steps=2", "trainer.validate_every=2"]
    source = [f"corpus={lab.corpus}", f"acceptance.source={lab.corpus}"]
    return run(root, "-m", "trainers.fit", *recipe, *SMALL, *steps, *source, *overrides)


def test_it_trains_exports_loads_and_decodes(tree):
    root, lab = tree
    done = fit(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    export = lab.runs / "toy" / "export"
    assert (export / "draft_vocabulary.tensors").is_file()
    metrics = (lab.runs / "toy" / "metrics.csv").read_text()
    assert "acceptance_length_t0" in metrics
    decoded = run(root, "-c", DECODE, str(export))
    assert decoded.returncode == 0, decoded.stderr
    found = json.loads(decoded.stdout)
    for temperature in (0.0, 1.0):  # `coupled`: plain decoding's very text
        assert found[f"toy {temperature}"] == found[f"plain {temperature}"]
    assert found["tokens"] == [*range(0, 200, 2)]  # the reduced vocabulary, in the target's ids
    assert found["reads"]
    shown = run(root, "-m", "decoding.generate", f"model={export}", "prompt=return", "seed=1")
    assert shown.returncode == 0, shown.stderr
    assert "target passes" in shown.stdout


def test_the_teacher_stays_without_an_acceptance_measurement(tree):
    done = fit(tree, "acceptance.prompts=0", "name=unmeasured")
    assert done.returncode == 0, done.stdout + done.stderr


def test_states_that_are_not_declared_are_not_there(tree):
    """The negative control: without the declaration the target is not read."""
    root, _ = tree
    module = root / "trainers" / "toy.py"
    declared = module.read_text()
    module.write_text(declared.replace("target_layers = (1,)", "target_layers = ()"))
    try:
        done = fit(tree, "name=undeclared")
        assert done.returncode != 0
        assert "has no attribute 'hidden_states'" in done.stderr  # and for no other reason
    finally:
        module.write_text(declared)

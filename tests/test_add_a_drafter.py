"""The promise of `docs/how_to/add_a_drafter.md`: a drafter is new files only, and they are there.

The page's files are written into a copy of the packages; there they are trained, exported, loaded
and decoded with by the real commands, and their own tests run. No file of parade is edited.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import SMALL, Lab

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_to" / "add_a_drafter.md"
FILE = re.compile(r'^```\w+ title="(\S+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILES = dict(FILE.findall(PAGE.read_text()))
DECODE = """
import json, sys, torch
from decoding import SamplingParams, load
from decoding.samplers.plain import PlainSampler

heads = load(sys.argv[1], dtype="float32")
plain = PlainSampler(heads.target, heads.tokenizer)
prompts = [[5, 6, 7], [9], [3, 1, 4, 1, 5]]
found = {}
for temperature in (0.0, 1.0):
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=7, ignore_eos=True)
    for name, sampler in (("heads", heads), ("plain", plain)):
        results = sampler.generate(prompts, params)
        found[f"{name} {temperature}"] = [r.token_ids for r in results]
        found[f"{name} passes"] = sum(r.stats.drafter_passes for r in results)
rows, params = heads.start(prompts[0])
with torch.inference_mode():
    heads.begin(rows, params)
    draft = heads.draft_pass(rows, 3, params)
    rows.state.hidden = torch.zeros_like(rows.state.hidden)
    blind = heads.draft_pass(rows, 3, params)
drafted = draft[0, 0].isfinite().nonzero().flatten().tolist()
json.dump({**found, "tokens": drafted, "reads": bool((draft != blind).any())}, sys.stdout)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the packages with the page's files, and a tiny target."""
    root = tmp_path_factory.mktemp("tree")
    for package in ("data", "models", "decoding", "trainers", "recipes", "terminal", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, root / package, ignore=ignored)
    for place, text in FILES.items():
        assert not (root / place).exists()
        (root / place).write_text(text)
    lab = Lab(root / "lab")
    lab.fit("ar_target")
    return root, lab


def run(root, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def fit(tree, *overrides):
    root, lab = tree
    recipe = ["recipe=medusa", f"runs={lab.runs}", f"target={lab.runs}/ar_target/export"]
    steps = ["trainer.max_steps=2", "trainer.validate_every=2", "network.draft_size=295"]
    steps += ["data.train.length=24", "data.validation.length=24", "data.corruption.anchors=4"]
    source = [f"corpus={lab.corpus}", f"acceptance.source={lab.corpus}"]
    return run(root, "-m", "trainers.fit", *recipe, *SMALL, *steps, *source, *overrides)


def test_the_page_is_formatted(tree):
    root, _ = tree
    for command in (("check", "--config"), ("format", "--check", "--config")):
        files = [place for place in FILES if place.endswith(".py")]
        done = run(root, "-m", "ruff", *command, str(ROOT / "pyproject.toml"), *files)
        assert done.returncode == 0, done.stdout


def test_its_own_tests_pass(tree):
    root, _ = tree
    (own,) = [place for place in FILES if place.startswith("tests/")]
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = run(root, "-m", "pytest", *options, "-c", os.devnull, f"--rootdir={root}", own)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_trains_exports_loads_and_decodes(tree):
    root, lab = tree
    done = fit(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    export = lab.runs / "medusa" / "export"
    assert (export / "draft_vocabulary.tensors").is_file()
    assert "mask_id" not in json.loads((export / "config.json").read_text())["parade"]
    metrics = (lab.runs / "medusa" / "metrics.csv").read_text()
    assert "acceptance_length_t0" in metrics
    decoded = run(root, "-c", DECODE, str(export))
    assert decoded.returncode == 0, decoded.stderr
    found = json.loads(decoded.stdout)
    for temperature in (0.0, 1.0):  # `coupled`: plain decoding's very text
        assert found[f"heads {temperature}"] == found[f"plain {temperature}"]
    assert found["tokens"] == [*range(295)]  # the reduced vocabulary, in the target's ids
    assert found["reads"]
    assert found["heads passes"] > 0
    shown = run(root, "-m", "decoding.generate", f"model={export}", "prompt=return", "seed=1")
    assert shown.returncode == 0, shown.stderr
    assert "target passes" in shown.stdout


def test_training_reads_the_states_that_decoding_has(tree):
    """At every position of a row the trained logits are the sampler's, up to rounding."""
    root, lab = tree
    done = run(root, "-c", SAME_STATES, f"{lab.runs}/ar_target/export")
    assert done.returncode == 0, done.stdout + done.stderr


SAME_STATES = """
import sys, torch
from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from decoding.loading import load_tokenizer
from decoding.samplers.medusa import MedusaSampler
from models import causal
from models.medusa import heads
from trainers.base import Optimization
from trainers.medusa import Medusa

path = sys.argv[1]
target, tokenizer = causal.load(path, dtype="float32"), load_tokenizer(path)
network = heads(path, 50, 3, tokenizer)
given = {"method": "medusa", "block_size": 3, "target_name": "x"}
module = Medusa(network, tokenizer, Optimization(1e-3), target, **given)
ids = torch.randint(50, (12,), generator=torch.Generator().manual_seed(0))
document, position = torch.tensor([0] * 5 + [1] * 7), torch.tensor([*range(5), *range(7)])
row = {"input_ids": ids, "document": document, "position": position, "trained": ids * 0 + 1}
blocks = DraftBlocks(9, 3, SuffixNoise(3), tokenizer, layout="none")
anchors = torch.tensor([1, 2, 3, 4, 6, 7, 8, 9, 10])
noise = blocks.schedule(9, 3, torch.Generator())
batch = {k: v[None] for k, v in blocks.lay_out(row, anchors, noise).items()}
with torch.inference_mode():
    logits, _, _ = module.forward_pass(module.in_draft_vocabulary(batch))
    sampler = MedusaSampler(target, tokenizer, network, block_size=3, draft_ids=module.draft_ids)
    for a, n in enumerate(anchors.tolist()):
        begin = 0 if n < 5 else 5
        rows, params = sampler.start(ids[begin:n].tolist())
        sampler.begin(rows, params)
        torch.testing.assert_close(sampler.draft_logits(rows, 3)[0, :, :50], logits[0, a])
"""


def test_states_that_are_not_declared_are_not_there(tree):
    """The negative control: without the declaration the target is not read."""
    root, _ = tree
    module = root / "trainers" / "medusa.py"
    declared = module.read_text()
    assert "(network.config.target_layer,)" in declared
    module.write_text(declared.replace("(network.config.target_layer,)", "()"))
    try:
        done = fit(tree, "name=undeclared")
        assert done.returncode != 0
        assert "has no attribute 'hidden_states'" in done.stderr  # and for no other reason
    finally:
        module.write_text(declared)


def test_a_module_that_overrides_the_weights_is_refused():
    from trainers.drafter import DrafterModule

    with pytest.raises(TypeError, match="Foo overrides `weight`: override `block_weight`"):
        type("Foo", (DrafterModule,), {"weight": lambda self, batch: None})

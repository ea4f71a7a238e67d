"""The sampler bundled with an export is self-contained, with the same text and distribution."""

import configparser
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.engine.params import SamplingParams
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.drafters import PROMPTS, V, target, write_drafter
from tests.support.enumerating import output_distribution
from trainers.publishing import bundle

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "some-org/a-drafter.v1"  # names that Python modules cannot have


def required(*packages):
    """The installed distributions that these need, themselves included."""
    found, left = set(), list(packages)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # needed elsewhere only, or by another platform
        found.add(name)
        needs = [Requirement(text) for text in needs]
        left += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return found


def clean_environment(folder):
    """A virtual environment with a bundle's requirements alone, as links; its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in required(*(Requirement(r).name for r in bundle.REQUIREMENTS.split())):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    return folder / "bin" / "python"


def hub_cache(home, export):
    """The export in the Hub's cache, as a download of REPOSITORY would leave it."""
    repository = home / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(export, repository / "snapshots" / COMMIT)


SCRIPT = """
import importlib.util, json, sys

import torch
from transformers import AutoModelForCausalLM

target_folder, export, repository, prompts = json.loads(sys.argv[1])
unwanted = ["decoding", "models", "data", "trainers", "tests", "hydra", "datasets"]
unwanted += ["pytorch_lightning", "accelerate", "omegaconf", "pytest"]
found = [name for name in unwanted if importlib.util.find_spec(name)]
torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(target_folder)
width = max(map(len, prompts))
inputs = {
    "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
    "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
}
passes = []
target.register_forward_hook(lambda *_: passes.append(1))

def generate(drafter=None, **arguments):
    more = {"custom_generate": drafter, "trust_remote_code": True} if drafter else {}
    passes.clear()
    out = target.generate(**inputs, **more, max_new_tokens=16, **arguments)
    return out.tolist(), len(passes)

sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}
answers = {
    "plain": generate(),
    "greedy": generate(export),
    "sampled": generate(export, **sampled),
    "by rejection": generate(export, **sampled, verify="rejection"),
    "hub": generate(repository, revision="main"),
    "hub sampled": generate(repository, **sampled),
}
parade = [name for name in sys.modules if name.partition(".")[0] in unwanted]
print(json.dumps({"found": found + parade, "answers": answers}))
"""


def run_clean(folder, target_folder, export, prompts):
    """Run SCRIPT where only its requirements can be imported; return its output."""
    home = folder / "home"
    hub_cache(home, export)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = json.dumps([str(target_folder), str(export), REPOSITORY, prompts])
    python = clean_environment(folder / "environment")
    done = subprocess.run(
        [python, "-I", "-B", "-c", SCRIPT, arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected_rows(sampler, prompts, params, pad):
    """What `generate` returns for the sampler's answers: padded on both sides."""
    answers = [r.token_ids for r in sampler.generate(prompts, params)]
    left, right = max(map(len, prompts)), max(map(len, answers))
    return [
        [0] * (left - len(p)) + p + a + [pad] * (right - len(a)) for p, a in zip(prompts, answers)
    ]


@pytest.mark.parametrize("trained", [False, True])
def test_transformers_alone_decodes_with_it(trained, tmp_path, request):
    """A folder, and a repository; `trained`: the lab's export, made by `write_export`."""
    if trained:
        lab = request.getfixturevalue("lab")
        targets, export = (lab.runs / r / "export" for r in ("ar_target", "deer_stage2"))
        prompts = [AutoTokenizer.from_pretrained(export)(t)["input_ids"] for t in ("self", "in a")]
    else:
        targets, export, prompts = tmp_path / "target", tmp_path / "export", PROMPTS[:2]
        target(eos_token_id=10).save_pretrained(targets)
        tiny.tokenizer(V).save_pretrained(targets)
        write_drafter(export, target())
    assert len({len(p) for p in prompts}) == 2
    told = run_clean(tmp_path, targets, export, prompts)
    assert told["found"] == []
    answers = {name: rows for name, (rows, _) in told["answers"].items()}
    passes = {name: count for name, (_, count) in told["answers"].items()}
    assert answers["greedy"] == answers["hub"] == answers["plain"]
    assert passes["greedy"] == passes["hub"]
    assert trained or passes["greedy"] < passes["plain"]  # four steps of training are none
    network = AutoModelForCausalLM.from_pretrained(targets)
    sampler = PlainSampler(network, AutoTokenizer.from_pretrained(targets))
    params = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, top_k=50, seed=5)
    eos = network.generation_config.eos_token_id
    expected = expected_rows(sampler, prompts, params, eos)
    assert answers["sampled"] == answers["hub sampled"] == expected
    assert len(answers["by rejection"]) == 2


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The modules of a bundle, imported from its folder."""
    folder = tmp_path_factory.mktemp("bundle")
    bundle.write_bundle(folder, "deer")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        names = [p.stem for p in (folder / "custom_generate").glob("*.py")]
        yield {name: importlib.import_module(f"custom_generate.{name}") for name in names}
    for name in [name for name in sys.modules if name.partition(".")[0] == "custom_generate"]:
        del sys.modules[name]


def distance(modules, rule, eos=2, **values):
    """Total variation between the distributions of the bundled sampler and of plain decoding."""
    model, vocabulary = tiny.causal_lm(3, seed=0, eos_token_id=eos), 5
    sampler = modules["decoding_samplers_deer"].DeerSampler(
        model,
        tiny.tokenizer(3),
        tiny.causal_lm(vocabulary, seed=1),
        block_size=2,
        mask_id=3,
        sep_id=4,
    )
    params = modules["decoding_engine_params"].SamplingParams(verify=rule, **values)
    distribution = output_distribution(sampler, [0, 1, 1], params)
    return tiny.total_variation(
        distribution, tiny.plain_distribution(model, [0, 1, 1], params, {eos})
    )


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 3},
        {"max_new_tokens": 2, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
    ],
)
def test_the_bundled_sampler_has_the_plain_distribution(bundled, rule, values):
    assert distance(bundled, rule, **values) <= 1e-9


def test_a_wrong_bundled_rule_fails_the_same_test(bundled, monkeypatch):
    """It is the bundle's own `verify` that is proved, not the repository's."""
    module = bundled["decoding_engine_verify"]
    assert module.__name__ == "custom_generate.decoding_engine_verify"

    def take_the_target(draft, q, p, randomness):
        accepted, _ = rejection(draft, q, p, randomness)
        return accepted, randomness.categorical(module._at(p, accepted))

    rejection = module.rejection
    assert distance(bundled, "rejection", max_new_tokens=2) <= 1e-9
    monkeypatch.setattr(module, "rejection", take_the_target)
    assert distance(bundled, "rejection", max_new_tokens=2) > 1e-3


def test_nothing_of_parade_is_left_to_import(bundled):
    """Every bundled module was loaded from the bundle, and none of them names a package."""
    for name, module in bundled.items():
        assert module.__name__ == f"custom_generate.{name}"
        for line in Path(module.__file__).read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]) and len(words) > 1:
                assert words[1].partition(".")[0] not in {"trainers", "decoding", "models", "data"}


def test_the_closure_is_what_a_sampler_needs():
    modules = bundle.closure(["decoding.samplers.plain"])
    assert "decoding.engine.sampler" in modules
    assert "models.masks" in modules
    assert not {"decoding.drafting.tree", "decoding.samplers.deer", "decoding.loading"} & {*modules}


@pytest.fixture
def tree_of(tmp_path, monkeypatch):
    """A small tree of modules instead of parade's."""

    def build(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(bundle, "ROOT", tmp_path)

    return build


def test_every_form_of_import_is_made_relative(tree_of):
    tree_of(
        decoding__engine__verify="",
        decoding__engine__params="X = Y = 1",
        models__masks="import torch\n",
        decoding__a="""\
from decoding.engine import params
from decoding.engine import verify as v
from decoding.engine.params import (
    X,
    Y as Z,
)

def f():
    from models.masks import causal
    return "from decoding import verify"
""",
    )
    assert bundle.closure(["decoding.a"]) == [
        "decoding.a",
        "decoding.engine.params",
        "decoding.engine.verify",
        "models.masks",
    ]
    assert (
        bundle.flattened("decoding.a")
        == """\
from . import decoding_engine_params as params
from . import decoding_engine_verify as v
from .decoding_engine_params import X, Y as Z

def f():
    from .models_masks import causal
    return "from decoding import verify"
"""
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import decoding.engine.verify", "`import decoding.engine.verify` cannot be bundled"),
        ("from decoding import samplers", "there is no .*decoding/samplers.py"),
        ("from decoding.nothing import x", "cannot bundle decoding.nothing.x"),
    ],
)
def test_an_import_that_cannot_be_flattened_is_an_error(tree_of, text, message):
    tree_of(decoding__a=text)
    with pytest.raises(ValueError, match=message):
        bundle.closure(["decoding.a"])


def test_an_unknown_method_has_no_bundle(tmp_path):
    with pytest.raises(ValueError, match=r"cannot bundle decoding\.samplers\.nothing"):
        bundle.write_bundle(tmp_path, "nothing")


def test_the_requirements_are_those_of_parade():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    installs = setup["options"]["install_requires"].split()
    assert set(bundle.REQUIREMENTS.split()) <= set(installs)


def test_only_drafters_carry_a_bundle(lab):
    exports = {recipe: lab.runs / recipe / "export" for recipe in ("ar_target", "deer_stage2")}
    assert [r for r, e in exports.items() if (e / "custom_generate").exists()] == ["deer_stage2"]
    cards = {recipe: (export / "README.md").read_text() for recipe, export in exports.items()}
    assert [r for r, card in cards.items() if "target.generate(" in card] == ["deer_stage2"]

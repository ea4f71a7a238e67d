"""A config builds what the recipes name, and nothing else."""

import re
import subprocess
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from recipes.compose import RECIPES, SETTINGS, _takes, build, compose, names, run_folder, targets
from recipes.settings import Fit


def test_what_recipes_name_is_there():
    assert "trainers.deer.Refinement" in targets()
    assert all(t.split(".")[0] in ("trainers", "decoding", "models", "data") for t in targets())


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.run",
        "shutil.copy",
        "torch.load",
        "data.files.delete",
        "antigravity",
    ],
)
def test_a_strangers_config_calls_nothing_else(target, tmp_path, monkeypatch):
    def called(*args, **options):
        raise AssertionError("it was called")

    for module, name in ((subprocess, "run"), (torch, "load")):
        monkeypatch.setattr(module, name, called)
    for node in (
        {"_target_": target},
        {"_target_": "models.causal.load", "path": {"_target_": target}},
        {"_target_": "models.causal.load", "path": [{"a": {"_target_": target}}]},
    ):
        with pytest.raises(ValueError, match=rf"unknown \S*_target_ '{target}'.*Choose from"):
            build(OmegaConf.create(node))


def test_not_by_a_reference_either():
    config = OmegaConf.create({"network": "${other}", "other": {"_target_": "os.system"}})
    with pytest.raises(ValueError, match=r"_target_ 'os\.system'"):
        build(config.network)
    config = OmegaConf.create({"network": {"a": "${other}"}, "other": {"_target_": "os.system"}})
    with pytest.raises(ValueError, match=r"a\._target_ 'os\.system'"):
        build(config.network)


@pytest.mark.parametrize("key", ["module", "network", "data.train", "tokenizer"])
def test_by_the_command_line(key):
    recipe = ["recipe=deer_stage2", "scale=lab"]
    with pytest.raises(ValueError, match=rf"unknown {key}\._target_ 'trainers\.ar\.Nope'"):
        compose([*recipe, f"{key}._target_=trainers.ar.Nope"], "fit")


@pytest.mark.parametrize("recipe", ["deer_stage2", "deer_answers"])
@pytest.mark.parametrize(
    "key", ["name=..", "name=/abs", "name=a/b", "name=.", "name=shards", "runs="]
)
def test_a_folder_outside_of_the_runs(recipe, key):
    command = OmegaConf.load(RECIPES / "recipe" / f"{recipe}.yaml").command
    config = compose([f"recipe={recipe}", key], command)
    with pytest.raises(ValueError, match=f"^{key} is (not allowed|a folder of)"):
        run_folder(config)


@pytest.mark.parametrize(
    ("given", "source"),
    [("[runs/a,runs/b]", ["runs/a", "runs/b"]), ("runs/a", "runs/a"), ("[runs/a", "[runs/a")],
)
def test_a_source_may_be_several(given, source):
    config = compose(["recipe=deer_stage2", f"data.train.source={given}"], "fit")
    assert config.data.train.source == source


@pytest.mark.parametrize("name", ["2", "-1", "a b", "null"])
def test_any_other_name_is_a_folder(name):
    config = compose(["recipe=deer_answers", "runs=r", f"name={name}"], "collect")
    assert str(run_folder(config)) == f"r/deer_answers/{name}".removesuffix("/null")


def unlimited(node, hint, key=""):
    """The dotted paths of the numbers for which no limit is declared."""
    parameters, _ = _takes(node, hint)
    for name, value in node.items():
        kind = parameters[name].annotation if name in parameters else Any
        if isinstance(value, dict):
            yield from unlimited(value, kind, f"{key}{name}.")
        elif {int, float} & {*map(type, value if isinstance(value, list) else [value])}:
            yield from () if re.search(r"\b[gl][et]=", repr(kind)) else (f"{key}{name}",)


@pytest.mark.parametrize("recipe", names("recipe"))
def test_every_number_has_limits(recipe):
    file = OmegaConf.load(RECIPES / "recipe" / f"{recipe}.yaml")
    for scale in file.scales:
        config = compose([f"recipe={recipe}", f"scale={scale}"], file.command)
        node = OmegaConf.to_container(config, resolve=True)
        assert [*unlimited(node, SETTINGS[file.command])] == []


def test_a_number_without_limits_would_be_seen():
    assert [*unlimited({"data": {"x": 1}, "seed": 0, "y": [0.5]}, Fit)] == ["data.x", "y"]


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("trainer.batch_size=0", "greater than or equal to 1"),
        ("trainer.workers=1000000", "less than or equal to 256"),
        ("data.train.length=99999999", "less than or equal to 1048576"),
        ("acceptance.temperatures=[0.5,-1]", "each must be greater than or equal to 0"),
        ("network=null", "a node with keys is needed"),
        ("data.validation=null", "a node with keys is needed"),
    ],
)
def test_a_value_outside_its_limits_is_one_line(given, allowed):
    key, _, _ = given.partition("=")
    with pytest.raises(ValueError, match=f"^{key}=.*{allowed}") as error:
        compose(["recipe=ar_target", given], "fit")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("fit ar_target", ["~optimization.lr"], "every run has this key"),
        ("fit ar_target", ["~data.train._target_"], "names what is built"),
        ("collect deer_answers", ["++prompts=${seed}"], "prompts=0 is of type int, but a node"),
        ("fit ar_target", ["~network.model_type"], "network.model_type is missing"),
        ("fit ar_target", ["trainer=${seed}"], "trainer=0 is of type int, but a node"),
        ("fit ar_target", ["~trainer.max_steps"], "every run has this key"),
        ("fit ar_target", ["needs=abc"], "needs='abc'.*list of a node"),
        ("fit ar_target", ["needs=${seed}"], "needs=0 is of type int, but list of a node"),
        (
            "fit deer_stage1",
            ["drafter={a: 1}"],
            "path=.*is of type a node with keys, but str is needed",
        ),
        (  # what gives lists of numbers is no list of numbers
            "fit dflash",
            ["network.states={_target_: data.corpora.answers.sequences, source: x}"],
            "network.states=.*is of type a node with keys, but list of int or",
        ),
        ("collect deer_answers", ["~collector.seed"], "collector.seed is missing"),
        ("collect deer_answers", ["collector={a: 1}"], "unknown key 'collector.a'"),
        ("fit deer_stage2", ["module={alhpa: 1}"], "unknown key 'module.alhpa'"),
        (
            "collect deer_answers",
            ["teacher=${seed}"],
            "teacher=0 is of type int, but str",
        ),
        (
            "collect deer_answers",
            ["teacher=null"],
            "collector.teacher=null is of type null, but str",
        ),
        ("fit ar_drafter", ["answers=null"], "data.train.source=null is of type null, but str"),
        ("fit deer_stage1", ["data.validation.split=test"], "unknown data.validation.split 'test'"),
    ],
)
def test_what_would_fail_later_fails_at_once(command, given, said):
    command, recipe = command.split()
    with pytest.raises(ValueError, match=said) as error:
        compose([f"recipe={recipe}", *given], command)
    assert "\n" not in str(error.value)


def test_limits_hold_of_a_reference_too():
    with pytest.raises(ValueError, match=r"data\.train\.length=0"):
        compose(["recipe=ar_target", "data.train.length=${seed}"], "fit")


def test_a_network_that_cannot_be_made_is_one_line():
    node = OmegaConf.create({"network": {"_target_": "models.causal.from_config", "x": 1}}).network
    with pytest.raises(ValueError, match=r"^network: models\.causal\.from_config makes none"):
        build(node)

"""Every recipe at every scale composes, its targets exist and bind, and every key is read."""

import ast
import inspect
import re
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from data.text.prompts import prompt_set
from recipes.compose import RECIPES, compose, names
from recipes.settings import Optimization, Trainer
from trainers.lora import add_lora

COMMAND = {r: OmegaConf.load(RECIPES / "recipe" / f"{r}.yaml").command for r in names("recipe")}
SCALES = {r: list(OmegaConf.load(RECIPES / "recipe" / f"{r}.yaml").scales) for r in COMMAND}
CASES = [(recipe, scale) for recipe in COMMAND for scale in SCALES[recipe]]
# What the commands hand to a target beside its own keys.
GIVEN = {"tokenizer", "folder", "network", "optimization", "target"}
# Nodes that are handed on whole, and what takes them.
WHOLE = {"optimization": Optimization, "lora": add_lora, "prompts": prompt_set}
SOURCES = {
    "fit": [
        "trainers/fit.py",
        "trainers/runs/callbacks.py",
        "trainers/runs/resume.py",
        "recipes/inputs.py",
        "recipes/compose.py",
    ],
    "collect": [
        "decoding/collect.py",
        "recipes/inputs.py",
        "recipes/compose.py",
    ],
}
ROOT = Path(__file__).parents[1]


def targets(node, path=""):
    """(path, node) of every node with a `_target_`."""
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield path, node
        for key in node:
            yield from targets(node[key], f"{path}.{key}" if path else str(key))
    elif isinstance(node, ListConfig):
        for i, item in enumerate(node):
            yield from targets(item, f"{path}[{i}]")


def parameters_of(target):
    """The parameters of a function, or of a class and those it hands on to its bases."""
    found = {}
    for owner in inspect.getmro(target) if inspect.isclass(target) else [target]:
        function = owner.__dict__.get("__init__") if inspect.isclass(owner) else owner
        if function is None or function is object.__init__:
            continue
        parameters = inspect.signature(function).parameters.values()
        for p in parameters:
            found.setdefault(p.name, (p, function))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return {n: x for n, x in found.items() if n not in ("self", "args", "kwargs")}


def check_target(node):
    """The keys of a `_target_` node are parameters, none is missing, and each is used."""
    parameters = parameters_of(get_object(node._target_))
    open_ended = any(p.kind is p.VAR_KEYWORD for p, _ in parameters.values())
    for key in node:
        if key in ("_target_", "_partial_") or (open_ended and key not in parameters):
            continue
        assert key in parameters, f"{node._target_} takes no {key}"
        assert is_used(key, parameters[key][1]), f"{node._target_} never reads {key}"
    for name, (p, _) in parameters.items():
        needed = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        assert not needed or name in node or name in GIVEN, f"{node._target_} needs {name}"


def is_used(name, function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(tree))


def unread(config, raw, command):
    """Keys outside `_target_` nodes that no source reads and no other key refers to."""
    attributes = {
        node.attr
        for file in SOURCES[command]
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Attribute)
    } | {"command"}  # of a need, read before its references are filled in
    referred = set(re.findall(r"\$\{([\w.]+)\}", raw))

    def walk(node, path):
        for key in node:
            here = f"{path}.{key}" if path else str(key)
            if here in WHOLE:
                known = inspect.signature(WHOLE[here]).parameters
                yield from (f"{here}.{k}" for k in node[key] if k not in known)
                continue
            if key not in attributes and here not in referred:
                yield here
            if isinstance(node[key], DictConfig) and "_target_" not in node[key]:
                yield from walk(node[key], here)

    return list(walk(config, ""))


@pytest.mark.parametrize(("recipe", "scale"), CASES)
def test_recipe_composes_binds_and_is_read(recipe, scale):
    command = COMMAND[recipe]
    config = compose([f"recipe={recipe}", f"scale={scale}"], command)
    found = dict(targets(config))
    assert found
    for node in found.values():
        check_target(node)
    raw = "${runs}" + (RECIPES / "recipe" / f"{recipe}.yaml").read_text()
    assert unread(config, raw, command) == []


@pytest.mark.parametrize("recipe", COMMAND)
def test_recipe_says_how_it_is_launched(recipe):
    head = (RECIPES / "recipe" / f"{recipe}.yaml").read_text().split("command:")[0]
    assert f"recipe={recipe}" in head


def test_the_checks_can_fail():
    config = compose(["recipe=deer_stage2", "+dead=1"], "fit")
    assert unread(config, "${runs}${target}${drafter}${answers}${layout}", "fit") == ["dead"]
    with pytest.raises(AssertionError, match="takes no"):
        check_target(
            OmegaConf.create({"_target_": "models.causal.pretrained", "path": "x", "pth": 1})
        )
    with pytest.raises(AssertionError, match="needs path"):
        check_target(OmegaConf.create({"_target_": "models.causal.pretrained"}))


class TestMistakes:
    def refused(self, *argv, command="fit"):
        with pytest.raises(ValueError) as error:
            compose(list(argv), command)
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_unknown_recipe_lists_the_recipes(self):
        message = self.refused("recipe=deer_stage3")
        assert "'deer_stage2'" in message
        assert "ar_target" in message

    def test_no_recipe(self):
        assert "deer_stage1" in self.refused("scale=lab")

    def test_misspelt_key_names_the_nearest(self):
        message = self.refused("recipe=deer_stage2", "trainer.max_step=3")
        assert "Did you mean 'trainer.max_steps'" in message
        assert "'module.alpha'" in self.refused("recipe=deer_stage2", "module.alhpa=3")
        assert "'optimization'" in self.refused("recipe=deer_stage2", "optimisation.lr=3")

    @pytest.mark.parametrize(
        "override", ["trainer.max_steps=many", "trainer.max_steps=1.5", "trainer.compile=3",
                     "optimization.lr=[1]", "acceptance.temperatures=warm", "seed=null",
                     "trainer.max_steps={", "data.corruption=[1]"]
    )  # fmt: skip
    def test_wrong_type(self, override):
        message = self.refused("recipe=deer_stage2", override)
        assert override.split("=")[0] in message
        assert "is needed" in message

    def test_not_a_pair(self):
        assert "key=value" in self.refused("recipe=deer_stage2", "resume")

    def test_unknown_scale(self):
        assert "['lab', 'paper', 'quick', 'small']" in self.refused(
            "recipe=deer_stage2", "scale=huge"
        )

    def test_recipe_of_another_command(self):
        assert "python -m decoding.collect" in self.refused("recipe=deer_answers")

    @pytest.mark.parametrize(
        "override", ["optimization.lr=nan", "optimization.lr=inf", "acceptance.temperatures=[]",
                     "acceptance.temperatures=[0,nan]", "module.alpha=nan"]
    )  # fmt: skip
    def test_not_allowed(self, override):
        message = self.refused("recipe=deer_stage2", override)
        assert override.split("=")[0] in message
        assert "is not allowed" in message

    @pytest.mark.parametrize("flag", ["--multirun", "-m", "--config-dir=x", "--cfg=hydra"])
    def test_unknown_flag(self, flag):
        assert flag.partition("=")[0] in self.refused("recipe=deer_stage2", flag)

    def test_broken_reference(self):
        assert "'nothing'" in self.refused("recipe=deer_stage2", "target=${nothing}")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("acceptance.temperatures=0.5", "acceptance.temperatures", [0.5]),
        ("acceptance.temperatures=[0,1]", "acceptance.temperatures", [0.0, 1.0]),
        ("lora.targets=['q_proj','a, b']", "lora.targets", ["q_proj", "a, b"]),
        ("optimization.lr=1e-4", "optimization.lr", 1e-4),
        ("optimization.lr=1", "optimization.lr", 1.0),
        ("trainer.compile=TRUE", "trainer.compile", True),
        ("device_map=null", "device_map", None),
        ("name=2024_11", "name", "2024_11"),
        ("name=7", "name", "7"),
        ("answers=${runs}/other", "answers", "runs/other"),
        ("data.corruption=null", "data.corruption", None),
        ("data.corruption={anchors: 3}", "data.corruption.anchors", 3),
        ("data.corruption={anchors: 3}", "data.corruption.length", 8),
        ("+extra=[1,{a: x}]", "extra", [1, {"a": "x"}]),
        ("~module.soft", "module.soft", None),
    ],
)
def test_values_take_their_defaults_type(override, key, value):
    # lora.targets is read where there are adapters.
    config = compose(["recipe=deer_stage2", "lora.rank=1", override], "fit")
    OmegaConf.set_struct(config, False)
    found = OmegaConf.select(config, key)
    assert found == value
    assert type(found) is type(value) or isinstance(found, ListConfig)


@pytest.mark.parametrize("scale", ["lab", "small"])  # one has a list, the other a number
def test_a_key_of_several_types_takes_each(scale):
    adapt = ["recipe=diffusion_adapt", f"scale={scale}"]
    for given, value in {"[0,2]": [0, 2], "3": 3, "null": None}.items():
        assert compose([*adapt, f"network.layers={given}"], "fit").network.layers == value
    with pytest.raises(ValueError, match="layers"):
        compose([*adapt, "network.layers=[0,first]"], "fit")


def shown(capsys, *argv, command="fit"):
    with pytest.raises(SystemExit) as ended:
        compose(list(argv), command)
    assert ended.value.code == 0
    return capsys.readouterr().out


def comment_of(file, key):
    """The comment after the first line of `key` in a file of recipes/."""
    (comment,) = re.findall(rf"^ *{key}:.*? # ?(.*)$", (RECIPES / file).read_text(), re.M)[:1]
    return comment


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_without_a_recipe_lists_what_there_is(flag, capsys):
    page = shown(capsys, flag)
    for group in ("recipe", "scale", "strategy"):
        for name in names(group):
            assert (f"  {name} " in page) == (group != "recipe" or COMMAND[name] == "fit")
    assert "trainer.max_steps=1000  (int or null)" in page
    assert fields(Trainer)[3].metadata["help"] in " ".join(page.split())
    assert "deer_answers" in shown(capsys, flag, command="collect")


def test_help_of_a_recipe_lists_its_keys(capsys):
    page = shown(capsys, "recipe=deer_stage2", "--help")
    assert "module.soft=0.9  (float)" in page  # the scale's value
    assert comment_of("recipe/deer_stage2.yaml", "soft") in " ".join(page.split())
    assert "network.dtype=float32" in page  # a parameter that the recipe leaves alone
    assert "trainer.max_steps=150" in page


def test_cfg_job_prints_the_config_and_runs_nothing(capsys):
    argv = ["recipe=deer_stage2", "seed=3", "runs=elsewhere"]
    page = shown(capsys, *argv, "--cfg", "job")
    assert OmegaConf.create(page) == OmegaConf.create(
        OmegaConf.to_container(compose(argv, "fit"), resolve=True)
    )
    assert "elsewhere/data" in page


def test_overrides_win_over_scale_and_recipe():
    config = compose(["recipe=deer_stage2", "scale=paper", "module.block_size=7", "seed=3"], "fit")
    assert (config.module.block_size, config.seed, config.module.alpha) == (7, 3, 1.01)


def test_a_scale_that_a_recipe_does_not_have():
    assert {"lab", "paper"} <= {*SCALES["cspd_target"]}
    with pytest.raises(ValueError, match=r"cspd_target.*'small'.*lab"):
        compose(["recipe=cspd_target", "scale=small"], "fit")

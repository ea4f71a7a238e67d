"""Inputs of a recipe: missing folders are built or named; Hub ids are left to their loader."""

import pytest
from omegaconf import OmegaConf

from recipes.compose import compose
from recipes.inputs import prepare_inputs


def needing(path):
    need = {"path": str(path), "command": "python -m trainers.fit recipe=some"}
    return OmegaConf.create({"needs": [need]})


def test_a_missing_folder_is_named_with_its_command(tmp_path):
    prepare_inputs(needing(tmp_path).needs, build=False)
    for path in ("runs/some/export", tmp_path / "missing", "./missing/here", "missing"):
        with pytest.raises(ValueError, match=r"is missing\. It is made by: python -m trainers"):
            prepare_inputs(needing(path).needs, build=False)


def test_a_folder_with_a_space_is_one_argument(tmp_path, monkeypatch, capfd):
    config = needing("${runs}/some/export")
    config.runs = str(tmp_path / "my runs")
    config.needs[0].command = "python -c print(__import__('sys').argv[1:]) runs=${runs} a=b"
    prepare_inputs(config.needs, build=True)
    shown = capfd.readouterr().out
    assert f"'runs={tmp_path}/my runs' a=b" in shown  # as a shell takes it
    assert f"['runs={tmp_path}/my runs', 'a=b']" in shown  # as it was given


def test_what_may_be_a_hub_id_is_not_looked_for():
    prepare_inputs(needing("org/model").needs, build=False)


@pytest.mark.parametrize(
    ("given", "commands"),
    [
        (
            ["strategy=fsdp2", "trainer.devices=8", "optimization.lr=1", "name=x", "target=a/b"],
            [
                "trainers.fit recipe=deer_stage1 layout=separator scale=lab runs=r target=a/b "
                "strategy=fsdp2 trainer.devices=8",
                "decoding.collect recipe=deer_answers scale=lab runs=r target=a/b",
            ],
        ),
        (
            ["scale=paper", "device_map=auto", "trainer.precision=32-true"],
            [
                "trainers.fit recipe=deer_stage1 layout=separator scale=paper runs=r "
                "target=Qwen/Qwen3-30B-A3B device_map=auto trainer.precision=32-true",
                "decoding.collect recipe=deer_answers scale=paper runs=r "
                "target=Qwen/Qwen3-30B-A3B device_map=auto",
            ],
        ),
    ],
)
def test_the_command_of_an_input_keeps_what_belongs_to_it(given, commands):
    config = compose(["recipe=deer_stage2", "runs=r", *given], "fit")
    assert [need.command for need in config.needs] == [f"python -m {c}" for c in commands]


def test_a_target_is_not_carried_to_the_recipe_that_makes_one():
    config = compose(["recipe=deer_answers", "target=x/", "device_map=auto"], "collect")
    assert [n.command for n in config.needs] == [
        "python -m trainers.fit recipe=ar_target runs=runs"  # device_map is of a target alone
    ]

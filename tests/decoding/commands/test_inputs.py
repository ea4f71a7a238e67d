"""What a recipe needs: folders are looked for, Hub ids are left to who loads them."""

import pytest
from omegaconf import OmegaConf

from decoding.commands.inputs import prepare_inputs


def needing(path):
    need = {"path": str(path), "command": "python -m trainers.fit recipe=some"}
    return OmegaConf.create({"needs": [need], "build_inputs": False})


def test_a_missing_folder_is_named_with_its_command(tmp_path):
    prepare_inputs(needing(tmp_path))
    for path in ("runs/some/export", tmp_path / "missing", "./missing/here", "missing"):
        with pytest.raises(ValueError, match=r"is missing\. It is made by: python -m trainers"):
            prepare_inputs(needing(path))


def test_a_folder_with_a_space_is_one_argument(tmp_path, monkeypatch, capfd):
    config = needing("${runs}/some/export")
    config.runs, config.build_inputs = str(tmp_path / "my runs"), True
    config.needs[0].command = "python -c print(__import__('sys').argv[1:]) runs=${runs} a=b"
    prepare_inputs(config)
    shown = capfd.readouterr().out
    assert f"'runs={tmp_path}/my runs' a=b" in shown  # as a shell takes it
    assert f"['runs={tmp_path}/my runs', 'a=b']" in shown  # as it was given


def test_what_may_be_a_hub_id_is_not_looked_for():
    prepare_inputs(needing("org/model"))

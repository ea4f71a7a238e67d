"""Inputs of a recipe: missing folders are built or named; Hub ids are left to their loader."""

import os
import shlex

import pytest
from omegaconf import OmegaConf
from transformers import GPT2Config, GPT2LMHeadModel

from data.corpora.answers import UnfitCollection
from models.causal import looks_local
from recipes.compose import BROUGHT, MODULES, _file, compose, names, scales_of
from recipes.inputs import check_collections, follow_up, named_commands, prepare_inputs
from tests.support.refused import refused


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
                "decoding.collect recipe=deer_answers scale=lab runs=r target=a/b",
                "trainers.fit recipe=deer_stage1 layout=separator scale=lab runs=r target=a/b "
                "strategy=fsdp2 trainer.devices=8",
            ],
        ),
        (
            ["scale=paper", "device_map=auto", "trainer.precision=32-true"],
            [
                "decoding.collect recipe=deer_answers scale=paper runs=r "
                "target=Qwen/Qwen3-30B-A3B device_map=auto",
                "trainers.fit recipe=deer_stage1 layout=separator scale=paper runs=r "
                "target=Qwen/Qwen3-30B-A3B device_map=auto trainer.precision=32-true",
            ],
        ),
        (
            ["minutes=25"],  # shared equally with what is built first
            [
                "decoding.collect recipe=deer_answers scale=lab runs=r target=r/ar_target/export "
                "minutes=8.33",
                "trainers.fit recipe=deer_stage1 layout=separator scale=lab runs=r "
                "target=r/ar_target/export minutes=8.33",
            ],
        ),
        (
            ["minutes=25", "build_inputs=false"],
            [
                "decoding.collect recipe=deer_answers scale=lab runs=r target=r/ar_target/export "
                "build_inputs=false",
                "trainers.fit recipe=deer_stage1 layout=separator scale=lab runs=r "
                "target=r/ar_target/export build_inputs=false",
            ],
        ),
    ],
)
def test_the_command_of_an_input_keeps_what_belongs_to_it(given, commands):
    config = compose(["recipe=deer_stage2", "runs=r", *given], "fit")
    assert [need.command for need in config.needs] == [f"python -m {c}" for c in commands]


def test_a_drafters_attention_is_carried_to_its_other_trainings():
    given = ["module.attention=bidirectional", "module.shifted=true"]
    for stage, before in (("deer_stage2", "deer_stage1"), ("deer_stage1", "diffusion_adapt")):
        config = compose([f"recipe={stage}", *given], "fit")
        (command,) = (n.command for n in config.needs if f"recipe={before} " in n.command)
        assert command.endswith(" ".join(given))
        assert all("module." not in n.command for n in config.needs if n.command != command)


def test_a_target_is_not_carried_to_the_recipe_that_makes_one():
    config = compose(["recipe=deer_answers", "target=x/", "device_map=auto"], "collect")
    assert [n.command for n in config.needs] == [
        "python -m trainers.fit recipe=ar_target runs=runs"  # device_map is of a target alone
    ]


CASES = [(recipe, scale) for recipe in names("recipe") for scale in scales_of(recipe)]


def command_of(recipe):
    return _file(recipe).command


def brought(config):
    return {key: config[key] for key in BROUGHT if config.get(key) is not None}


def printed(config):
    """(recipe, composed config) of every command that a missing input is made by."""
    for need in config.needs:
        if not looks_local(need.path):
            continue
        line = refused(prepare_inputs, [need], build=False).partition("It is made by: ")[2]
        words = shlex.split(line)
        if words[0] != "python":  # of another program
            continue
        recipe = next(w.partition("=")[2] for w in words if w.startswith("recipe="))
        command = command_of(recipe)
        assert words[:3] == ["python", "-m", MODULES[command]]
        yield recipe, compose(words[3:], command)


@pytest.mark.parametrize(("recipe", "scale"), CASES)
def test_printed_commands_have_all_that_was_given(recipe, scale, tmp_path):
    """A foreign model and folder: every printed command composes, and asks that model alone."""
    command, runs = command_of(recipe), tmp_path / "my runs"
    published = brought(compose([f"recipe={recipe}", f"scale={scale}", f"runs={runs}"], command))
    # What another run makes stays: a model of the user's takes the others' place.
    own = [key for key, value in published.items() if not str(value).startswith(str(runs))]
    model = tmp_path / "foreign"
    given = [f"recipe={recipe}", f"scale={scale}", f"runs={runs}", "build_inputs=false"]
    config = compose([*given, *(f"{key}={model}" for key in own)], command)
    for other, made in printed(config):
        assert (made.scale, made.runs) == (scale, str(runs)), other
        assert made.build_inputs is False
        known = {*brought(made).values()}
        if own and other not in ("ar_target", "cspd_target", "dllm_block"):
            assert str(model) in known or all(str(k).startswith(str(runs)) for k in known), other
            asked = made.collector.teacher if command_of(other) == "collect" else None
            assert asked is None or str(asked).startswith((str(model), str(runs)))
        for key in ("layout", "answers", "images"):
            if key in config and key in made:
                assert made[key] == config[key]


def test_a_path_that_its_command_would_not_make_is_not_built(tmp_path):
    for given in (["target=" + str(tmp_path / "no")], ["answers=" + str(tmp_path / "no")]):
        config = compose(["recipe=deer_stage1", f"runs={tmp_path}", *given], "fit")
        if "answers" in given[0]:
            needs = config.needs[1:]
        else:
            needs = compose(["recipe=deer_answers", f"runs={tmp_path}", *given], "collect").needs
        message = refused(prepare_inputs, needs, build=True)
        assert "makes another folder" in message
        assert str(tmp_path / "no") in message


def test_a_collection_that_does_not_fit_is_named_with_the_whole_command(tmp_path):
    model, runs = tmp_path / "model", tmp_path / "runs"
    given = ["recipe=pcllm_round1", "scale=small", f"runs={runs}", f"model={model}"]
    needs = compose(given, "fit").needs
    source = f"{runs}/pcllm_trajectories"

    def fail(source):
        with named_commands(needs):
            raise UnfitCollection(source, "another model")

    line = refused(fail, source)
    assert "another model" in line
    words = shlex.split(line.partition("with: ")[2].partition(", and give")[0])
    made = compose(words[3:], "collect")
    assert (made.scale, made.runs, made.target) == ("small", str(runs), str(model))
    assert line.endswith(f"give {runs}/pcllm_trajectories/again in place of it")
    assert "with:" not in refused(fail, str(tmp_path))  # of no input of this recipe


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        ("pcllm_round1", "target=a/b", "target=a/b is not read .* its model is given with model="),
        ("pcllm_round2", "target=a/b", "its model is given with model= and base="),
        ("dllm_block", "target=a/b", "its model is given with start="),
        ("spiffy_calibrate", "target=a/b", "its model is given with model="),
        ("asarm_joint", "device_map=auto", "device_map=auto is not read .* no target"),
        ("ar_target", "target=a/b", "it begins with no other model"),
        ("deer_stage1", "model=a/b", "unknown key 'model' .* its model is given with target="),
        ("dflash", "start=a/b", "its model is given with target="),
        ("deer_stage1", "lora.alpha=4", "lora.alpha= is not read .* lora.rank=0"),
        (
            "ar_target",
            "acceptance.source=x",
            "acceptance.source= is not read .* acceptance.prompts",
        ),
    ],
)
def test_a_key_that_a_recipe_does_not_read_is_refused_with_the_one_it_reads(recipe, given, said):
    with pytest.raises(ValueError, match=said):
        compose([f"recipe={recipe}", given], "fit")
    taken = {"lora.alpha=4": "lora.rank=2", "acceptance.source=x": "acceptance.prompts=2"}
    if given in taken:
        compose([f"recipe={recipe}", given, taken[given]], "fit")
    key = given.partition("=")[0]
    if key in ("target", "device_map"):
        compose([f"recipe={recipe}", f"{key}=null"], "fit")
        compose(["recipe=deer_stage1", given], "fit")


def test_the_command_of_another_recipe_keeps_the_arguments():
    line = refused(compose, ["recipe=deer_answers", "runs=a b", "scale=small"], "fit")
    assert line.endswith("python -m decoding.collect recipe=deer_answers 'runs=a b' scale=small")


def test_what_follows_an_export_is_run_once(tmp_path, capfd):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model-00001-of-00002.safetensors").touch()
    write = "python -c __import__('pathlib').Path('{0}').touch();print(__import__('sys').argv)"
    made = [tmp_path / name for name in ("first", "second")]
    steps = [{"path": path.name, "command": write.format(path) + " a=${x}"} for path in made]
    config = OmegaConf.create({"then": steps, "x": "two words"})
    follow_up(config.then, tmp_path)
    assert all(path.exists() for path in made)
    shown = capfd.readouterr().out
    assert shown.count("next: ") == 2
    assert shown.count(f"['-c', 'a=two words', 'model={tmp_path / 'export'}']") == 2
    made[1].unlink()
    follow_up(config.then, tmp_path)
    assert capfd.readouterr().out.count("next: ") == 1
    # Of an earlier export.
    later = max(path.stat().st_mtime for path in made) + 1
    os.utime(tmp_path / "export" / "model-00001-of-00002.safetensors", (later, later))
    follow_up(config.then, tmp_path)
    assert capfd.readouterr().out.count("next: ") == 2


def test_what_follows_an_export_and_fails_is_named(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model-00001-of-00002.safetensors").touch()
    step = {"path": "x", "command": "python -c raise(SystemExit(1))"}
    config = OmegaConf.create({"then": [step]})
    with pytest.raises(ValueError, match=r"is exported to .*, and this failed: python -c "):
        follow_up(config.then, tmp_path)
    with pytest.raises(ValueError, match="each has a path and a command"):
        follow_up(OmegaConf.create({"then": [{"path": "x"}]}).then, tmp_path)


def test_what_a_run_could_not_train_with_is_refused_before_an_input_is_built(tmp_path):
    """The check is of the recipe's own, and its input, which may take hours, is not begun."""
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "model")
    for recipe in ("drafter", "dflash", "eagle3"):
        config = compose(
            [f"recipe={recipe}", f"target={tmp_path / 'model'}", f"runs={tmp_path / 'r'}"], "fit"
        )
        with pytest.raises(ValueError, match="such a drafter for a 'gpt2' model"):
            prepare_inputs(config.needs, build=True)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "key", ["data.train.source", "data.validation.source", "network.draft_ids.source"]
)
def test_a_collection_that_nothing_makes_is_missed_before_an_input_is_built(key, tmp_path):
    words = ["recipe=redrafter", "scale=small", f"runs={tmp_path}"]
    check_collections(compose(words, "fit"))  # that of all keys is built first
    both = f"{key}=[{tmp_path}/deer_answers,{tmp_path}/lost]"
    with pytest.raises(ValueError, match=f"no collection at {tmp_path}/lost: "):
        check_collections(compose([*words, both], "fit"))
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "manifest.json").write_text("{}")
    check_collections(compose([*words, both], "fit"))

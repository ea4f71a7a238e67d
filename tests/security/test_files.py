"""Files of strangers: no link is followed to where it may leave, and what is odd gives one line."""

import gzip
import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest

from data.corpora import sources
from data.corpora.answers import read_answers, shard_path
from data.corpora.benchmarks import read_benchmark
from data.corpora.sources import load_documents, read_jsonl
from data.corpora.stdlib import is_held_out
from data.files import DEEPEST, parse_json, read_json, refuse_links
from data.rows.trajectories import CHANGES, rows
from data.text.tokenizer import fingerprint
from decoding.loading import load_tokenizer, parade_config
from tests.support import tiny
from tests.support.commands import refusal
from tests.support.refused import refused
from trainers.export import run as export
from trainers.publishing import hub
from trainers.publishing.speculators import write_speculators
from trainers.runs.set_aside import SET_ASIDE, set_aside

SECRET = "PRIVATE KEY of this machine"
SPLIT = "heldout" if is_held_out("answers to x") else "train"


@pytest.fixture
def secret(tmp_path):
    """A private file outside of every folder that a test loads or pushes."""
    file = tmp_path / "home" / "id_rsa"
    file.parent.mkdir()
    file.write_text(SECRET)
    return file


@pytest.fixture
def folder(tmp_path):
    """An export in a run's folder."""
    run = tmp_path / "theirs"
    (run / "export" / "custom_generate").mkdir(parents=True)
    tiny.causal_lm(5).float().save_pretrained(run / "export")
    tiny.tokenizer(5).save_pretrained(run / "export")
    for name in ("README.md", "LICENSE", "custom_generate/generate.py"):
        (run / "export" / name).write_text("theirs")
    for name in ("config.yaml", "provenance.json", "metrics.csv"):
        (run / name).write_text("{}")
    return run / "export"


@pytest.mark.parametrize(
    "name", ["LICENSE", "parade_x.json", "tokenizer_x.json", "custom_generate/a.py", "README.md"]
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_link_in_an_export_is_not_pushed(folder, secret, name, relative):
    files, _ = hub.uploads(folder)
    assert {"LICENSE", "custom_generate/generate.py"} <= set(files)
    (folder / name).unlink(missing_ok=True)
    up = "/".join([".."] * (2 + name.count("/")))
    (folder / name).symlink_to(f"{up}/home/id_rsa" if relative else secret)
    assert (folder / name).read_text() == SECRET
    assert f"{folder / name} is a link" in refused(hub.uploads, folder)


def test_a_linked_folder_is_not_pushed(folder, secret):
    (secret.parent / "a.py").write_text(SECRET)
    shutil.rmtree(folder / "custom_generate")
    (folder / "custom_generate").symlink_to(secret.parent)
    assert "is a link, or lies in one" in refused(hub.uploads, folder)
    (folder / "custom_generate").unlink()
    hub.uploads(folder)
    whole = folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(whole)
    assert "is a link, or lies in one" in refused(hub.uploads, folder)


def test_a_link_to_itself_is_not_pushed(folder):
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to("LICENSE")
    assert f"{folder / 'LICENSE'} is a link" in refused(hub.uploads, folder)


def test_a_run_below_a_link_is_pushed(folder, tmp_path):
    """A user's runs may lie on another disk."""
    (tmp_path / "runs").symlink_to(folder.parent)
    assert hub.uploads(tmp_path / "runs" / "export") == hub.uploads(folder)


@pytest.mark.parametrize("name", ["export/README.md", "bench/command.txt", "provenance.json"])
def test_what_a_card_is_made_of_is_no_link(folder, secret, name, monkeypatch, capsys):
    file = folder.parent / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(secret)
    line = refusal(
        export, [f"run={folder.parent}", "dry_run=true", "push=a/b"], monkeypatch, capsys
    )
    assert f"{file} is a link" in line
    assert SECRET not in line


@pytest.mark.parametrize("name", ["wandb/latest-run", "other_run/export/README.md"])
def test_a_link_that_a_card_does_not_read_stays(folder, secret, name):
    """wandb links its newest run; a run's folder may hold other runs."""
    file = folder.parent / name
    file.parent.mkdir(parents=True)
    file.symlink_to(secret)
    export([f"run={folder.parent}", "dry_run=true"])


def test_a_link_is_not_set_aside(folder, secret):
    run = folder.parent
    set_aside(run, 0)
    assert (run / SET_ASIDE / "metrics.csv").read_text() == "{}"
    shutil.rmtree(run / SET_ASIDE)
    folder.mkdir()
    (run / "metrics.csv").unlink()
    (run / "metrics.csv").symlink_to(secret)
    assert "metrics.csv is a link" in refused(set_aside, run, 0)
    assert all(SECRET not in f.read_text() for f in (run / SET_ASIDE).rglob("*") if f.is_file())


def test_a_link_is_not_copied_with_an_entry(folder, secret):
    assert "does not fit" in refused(write_speculators, folder)
    (folder / "custom_generate" / "NOTES").symlink_to(secret)
    assert "NOTES is a link" in refused(write_speculators, folder)


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "additional_chat_templates/a.jinja", "tokenizer.model", "config.json"],
)
def test_a_model_with_linked_settings_is_not_loaded(folder, secret, name):
    """They would become part of the exports that are made with it."""
    load_tokenizer(str(folder))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    for load in (load_tokenizer, parade_config):
        assert f"{folder / name} is a link" in refused(load, str(folder))


def test_the_cache_of_the_hub_and_linked_weights_are_loaded(folder, tmp_path, secret):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(f for f in folder.glob("*") if f.is_file())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert load_tokenizer(str(snapshot))("abc") == load_tokenizer(str(folder))("abc")
    assert parade_config(str(snapshot)) == {"method": "plain"}
    (snapshot / "a.txt").symlink_to(secret)
    assert "a.txt is a link" in refused(parade_config, str(snapshot))
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "weights")
    weights.symlink_to(tmp_path / "weights")
    assert parade_config(str(folder)) == {"method": "plain"}


def test_files_of_a_folder_are_no_links(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("")
    refuse_links(tmp_path, tmp_path.rglob("*"))


# Lines.

GOOD = b'{"text": "a"}\n'


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_line_has_a_bound(tmp_path, monkeypatch, name, before):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    pack = gzip.compress if name.endswith(".gz") else bytes
    line = b'{"text": "' + b"a" * 87 + b'"}\n'
    assert len(line) == 100
    (tmp_path / name).write_bytes(pack(GOOD * before + line))
    assert len([*read_jsonl(tmp_path / name)]) == before + 1
    (tmp_path / name).write_bytes(pack(GOOD * before + b"\0" * 10**6))
    said = refused(lambda: [*read_jsonl(tmp_path / name)])
    assert said.startswith(f"{tmp_path / name}, line {before + 1} has over 100 bytes")
    assert "max_line_bytes" in said


ODD = {
    "deep": '{"text": "a", "x": ' + "[" * 100_000,
    "deep and whole": '{"text": "a", "x": ' + "[" * 500 + "]" * 500 + "}",
    "objects": '{"text": "a", "x": ' + '{"a":' * 500 + "1" + "}" * 500 + "}",
    "half a pair": r'{"text": "a\ud800"}',
    "half a pair as a key": r'{"\uDC00": 1, "text": "a"}',
    "a pair the wrong way": r'{"text": "\udc00\ud800"}',
    "long number": '{"text": "a", "x": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("read", [load_documents, read_benchmark])
def test_an_odd_line_gives_one_with_the_file(tmp_path, line, read):
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a", "text": "a"}\n' + line + "\n")
    said = refused(
        lambda: [*read(str(file), "train")] if read is load_documents else read(str(file))
    )
    assert said.startswith(f"{file}, line 2 is not valid JSON")
    assert len(said) < 300
    (tmp_path / "d.json").write_text(line)
    assert refused(read_json, tmp_path / "d.json").startswith(f"{tmp_path / 'd.json'} is damaged")


def test_usual_json_is_read():
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert json.dumps(parse_json(deep)) == deep
    many = [{"a": [1]}] * 1000
    assert parse_json(json.dumps(many)) == many
    assert parse_json(r'"\ud83d\ude00 \ud55c \\ud800"') == "\U0001f600 \ud55c \\ud800"
    assert parse_json("9" * 4000) == int("9" * 4000)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": "hello"},
        {"conversations": {"role": "user"}},
        {"messages": [[["a"]]]},
        {"data": [1]},
        {"text": None},
    ],
)
def test_odd_rows_give_one_line(tmp_path, row):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert f"{file}, line 1" in refused(lambda: [*load_documents(str(file), "train")])


def test_a_condition_on_a_huge_number(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(f'{{"text": "a{i}", "n": 1{"0" * 400}}}\n' for i in range(40)))
    assert "which is not a number" in refused(load_documents, str(file), where="n>1")


def test_odd_columns_of_benchmarks(tmp_path):
    file = tmp_path / "d.jsonl"
    mbpp = {"text": 5, "prompt": "write", "code": "", "test_list": ["assert 1"]}
    file.write_text(json.dumps(mbpp | {"test_setup_code": {"a": 1}}) + "\n")
    assert read_benchmark(str(file))[0].turns == ("write",)
    human = {"task_id": "1", "prompt": "def f(", "test": "", "entry_point": "f"}
    file.write_text(json.dumps(human | {"canonical_solution": [1]}) + "\n")
    assert read_benchmark(str(file))[0].reference is None


# Shards of collections.


def write(folder, *shards):
    for number, table in enumerate(shards):
        shard_path(folder, number).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(table), shard_path(folder, number))


ROW = {"id": ["x"], "prompt_ids": [[1, 2]], "answer_ids": [[3]]}
TOP = {"teacher_ids": [[3, 4]], "teacher_probs": [[0.5, 0.25]]}
DAMAGED = {
    "no id": {k: v for k, v in ROW.items() if k != "id"},
    "no answers": {k: v for k, v in ROW.items() if k != "answer_ids"},
    "null id": ROW | {"id": pyarrow.array([None], pyarrow.string())},
    "numbers as id": ROW | {"id": [5]},
    "null ids": ROW | {"prompt_ids": [[1, None]]},
    "null list": ROW | {"prompt_ids": pyarrow.array([None], pyarrow.list_(pyarrow.int64()))},
    "texts": ROW | {"answer_ids": [["a"]]},
    "no lists": ROW | {"answer_ids": [3]},
    "lists of lists": ROW | {"answer_ids": [[[3]]]},
    "fractions": ROW | {"answer_ids": [[3.5]]},
    "negative": ROW | {"answer_ids": [[-3]]},
    "huge": ROW | {"answer_ids": [[2**40]]},
    "other counts": ROW | TOP | {"answer_ids": [[3, 4, 5]]},
    "one without the other": ROW | {"teacher_ids": [[3, 4]]},
    "two and one": ROW | {"teacher_ids": [[3, 4]], "teacher_probs": [[0.5]]},
    "no numbers": ROW | TOP | {"teacher_probs": [[float("nan"), 0.5]]},
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_shard_gives_one_line(tmp_path, damaged):
    write(tmp_path, damaged)
    assert str(shard_path(tmp_path, 0)) in refused(lambda: [*read_answers(tmp_path, SPLIT)])
    write(tmp_path, ROW | TOP)
    (answer,) = read_answers(tmp_path, SPLIT)
    assert answer.ids == [1, 2, 3]


@pytest.mark.parametrize(
    "other",
    [
        ROW | TOP,
        ROW | {"more": [1]},
        ROW | {"prompt_ids": pyarrow.array([[1]], pyarrow.list_(pyarrow.int32()))},
    ],
)
def test_shards_have_the_same_columns(tmp_path, other):
    write(tmp_path, ROW, ROW)
    assert len([*read_answers(tmp_path, SPLIT)]) == 2
    write(tmp_path, ROW, other)
    said = refused(lambda: [*read_answers(tmp_path, SPLIT)])
    assert f"{shard_path(tmp_path, 1)} has other columns than" in said


STATES = {"start": [[5, 6]], "passes": [[1]], "changes": [[1]], "at": [[1]], "to": [[3]]}


@pytest.mark.parametrize(
    "change",
    [{"passes": [[9]]}, {"at": [[2]]}, {"start": [[5]]}, {"to": [[]]}, {"answer_ids": [[3] * 9]}],
)
def test_trajectories_that_do_not_fit(tmp_path, change):
    tokenizer, source = tiny.tokenizer(9), tmp_path / "source"
    made = {"recipe": "x", "tokenizer": fingerprint(tokenizer), "weights": "a/b"}
    made |= {"block_size": 2, "max_new_tokens": 4, "prompts": {"length": 3}}
    assert STATES.keys() == {*CHANGES}
    write(source, ROW | STATES)

    def read(manifest, name):
        (source / "manifest.json").write_text(json.dumps(manifest))
        return rows(str(source), "a/b", tokenizer, str(tmp_path / name), SPLIT)

    assert read(made, "rows")[0].clean.tolist() == [[3, 0], [0, 0]]
    assert "no integers" in refused(read, made | {"block_size": "2"}, "other")
    kinds = {k: pyarrow.list_(pyarrow.int64()) for k in change}
    write(source, ROW | STATES | {k: pyarrow.array(v, kinds[k]) for k, v in change.items()})
    assert "is damaged" in refused(read, made, "third")
    assert not [*tmp_path.glob("third/*")]

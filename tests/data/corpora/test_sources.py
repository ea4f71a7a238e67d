"""Every kind of source gives the same three shapes, and bad ones one clear line."""

import re
import sys

import datasets
import pytest

from data.corpora.sources import load_documents
from data.corpora.stdlib import is_held_out, stdlib_documents
from tests.support.files import write_jsonl

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_library_is_split_by_the_hash_of_the_path(heldout_library):
    ids = [document["id"] for document in heldout_library]
    assert ids
    assert ids == sorted(ids)
    assert all(is_held_out(id) for id in ids)
    assert not {"test", "tests", "site-packages", "encodings"} & {
        p for i in ids for p in i.split("/")
    }


def test_hash_rule_is_fixed_for_good():
    # File names of Python 3.11. A change here would change the split of existing runs.
    assert [id for id in ("base64.py", "difflib.py", "ast.py", "os.py") if is_held_out(id)] == [
        "base64.py",
        "difflib.py",
    ]


def test_library_refuses_an_unknown_split():
    with pytest.raises(ValueError, match=r"'test'.*'train', 'heldout'"):
        stdlib_documents("test")


def test_stdlib_source(heldout_library):
    documents = list(load_documents("stdlib", "heldout", limit=3))
    assert documents == heldout_library[:3]


def test_folder_of_text_is_split_without_overlap(tmp_path):
    (tmp_path / "sub").mkdir()
    for index in range(200):
        (tmp_path / "sub" / f"{index}.txt").write_text(f"text {index}")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    train, heldout = (
        {d["id"]: d["text"] for d in load_documents(str(tmp_path), split)}
        for split in ("train", "heldout")
    )
    assert not train.keys() & heldout.keys()
    assert train | heldout == {f"sub/{i}.txt": f"text {i}" for i in range(200)}
    assert 0 < len(heldout) < 20


def test_one_text_file(tmp_path):
    (tmp_path / "a.md").write_text("# title")
    assert list(load_documents(str(tmp_path / "a.md"))) == [{"id": "a.md", "text": "# title"}]


@pytest.mark.parametrize(
    ("row", "document"),
    [
        ({"text": "x"}, {"text": "x"}),
        ({"messages": MESSAGES}, {"messages": MESSAGES}),
        ({"data": ["hi", "hello"]}, {"messages": MESSAGES}),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                ]
            },
            {"messages": MESSAGES},
        ),
        ({"prompt": "q", "answer": "a", "text": "x"}, {"prompt": "q", "answer": "a"}),
        ({"question": "q", "answer": "a"}, {"prompt": "q", "answer": "a"}),
        ({"input": "q", "output": "a"}, {"prompt": "q", "answer": "a"}),
        (
            {"instruction": "add", "input": "1 2", "output": "3"},
            {"prompt": "add\n\n1 2", "answer": "3"},
        ),
        ({"instruction": "add", "input": "", "output": "3"}, {"prompt": "add", "answer": "3"}),
    ],
)
def test_columns_become_one_of_three_shapes(tmp_path, row, document):
    source = write_jsonl(tmp_path / "a.jsonl", [{"id": 7, **row}])
    assert list(load_documents(source)) == [{"id": "7", **document}]


def test_named_field_wins_over_other_shapes(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "answer": "a", "code": "x"}])
    assert list(load_documents(source, field="code")) == [{"id": "a.jsonl:1", "text": "x"}]


@pytest.mark.parametrize("as_folder", [True, False])
def test_parquet(tmp_path, as_folder):
    file = tmp_path / "part.parquet"
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(file)
    documents = list(load_documents(str(tmp_path if as_folder else file)))
    assert [d["text"] for d in documents] == ["a", "b"]
    assert [d["id"] for d in documents] == ["part.parquet:0", "part.parquet:1"]


def test_saved_data_set(tmp_path):
    rows = datasets.Dataset.from_dict({"id": ["x", "y"], "messages": [MESSAGES, MESSAGES]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "many")
    datasets.DatasetDict(valid=rows).save_to_disk(tmp_path / "other")
    expected = [{"id": "x", "messages": MESSAGES}, {"id": "y", "messages": MESSAGES}]
    assert list(load_documents(str(tmp_path / "one"))) == expected
    assert list(load_documents(str(tmp_path / "many"))) == expected
    with pytest.raises(ValueError, match=r"'train'.*\['valid'\]"):
        load_documents(str(tmp_path / "other"))


def test_hub_data_set_is_held_out_by_hash(monkeypatch):
    def load_dataset(source, name, split, streaming):
        assert (source, name, split, streaming) == ("org/name", "main", "train", True)
        return ({"text": str(i)} for i in range(200))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = {"subset": "main", "streaming": True}
    train, heldout = (
        {d["id"] for d in load_documents("org/name", split, **options)}
        for split in ("train", "heldout")
    )
    assert heldout
    assert not train & heldout
    assert len(train | heldout) == 200


def test_other_hub_splits_are_used_whole(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **o: [{"text": o["split"]}] * 200)
    documents = list(load_documents("org/name", "test"))
    assert len(documents) == 200
    assert documents[0]["text"] == "test"


def test_hub_failure_is_one_line(monkeypatch):
    def load_dataset(*_, **__):
        raise ValueError("Unknown split.\nShould be one of ['train'].")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"'org/name'.*Should be one of") as caught:
        load_documents("org/name", "tset")
    assert "\n" not in str(caught.value)


def test_datasets_is_asked_for_only_when_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    assert list(load_documents(source))
    with pytest.raises(ValueError, match=r"pip install 'parade\[train\]'"):
        load_documents("org/name")


@pytest.mark.parametrize("source", ["./none", "/none/here", "none.jsonl", "a/b/c", "~/none-here"])
def test_missing_path(source):
    with pytest.raises(ValueError, match=re.escape(f"source={source!r}")):
        load_documents(source)


def test_bad_sources(tmp_path):
    with pytest.raises(ValueError, match=r"\.jsonl.*\.parquet"):
        load_documents(str(tmp_path))
    source = write_jsonl(tmp_path / "a.jsonl", [{"title": "x", "body": "y"}])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1.*'text'.*\['body', 'title'\]"):
        load_documents(source)
    with pytest.raises(ValueError, match="split='heldout'"):
        load_documents(source, "heldout", field="body")
    with pytest.raises(ValueError, match=r"'test'.*'heldout'"):
        load_documents(source, "test")


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"text": ', "line 2.*JSON"), ("[1]", "line 2.*JSON.*list")],
)
def test_broken_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line)
    with pytest.raises(ValueError, match=message):
        list(load_documents(str(tmp_path / "a.jsonl")))


def test_broken_turn_is_named(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": None}]}])
    with pytest.raises(ValueError, match=r"line 1.*'role'.*'content'"):
        load_documents(source)


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a\.txt.*UTF-8.*byte 2"):
        load_documents(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        ".ipynb_checkpoints/0-checkpoint.md",
        ".venv/lib/license.txt",
        ".cache/x.jsonl",
        ".git/x.parquet",
        "._0.md",
        ".hidden.jsonl",
        "~$0.md",
        "__pycache__/x.py",
        "__MACOSX/0.md",
        "web/node_modules/a/readme.md",
        "venv/pyvenv.cfg",
        "build/CACHEDIR.TAG",
    ],
)
def test_files_that_nobody_meant(tmp_path, capsys, name):
    """A hidden file of rows made all visible texts vanish, and copies were read twice."""
    for index in range(9):
        (tmp_path / f"{index}.md").write_text(f"hello {index}")
    before = list(load_documents(str(tmp_path)))
    assert "9 files are read, 0 left out" in capsys.readouterr().out
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\xff")
    (file.parent / ("note.md" if file.parent != tmp_path else ".note.md")).write_text("other")
    (tmp_path / "image.png").write_bytes(b"\xff")
    load_documents.__globals__["_say_what_is_read"].cache_clear()
    assert list(load_documents(str(tmp_path))) == before
    out = capsys.readouterr().out
    assert "9 files are read, 3 left out (2 hidden or of caches, 1 of other kinds)" in out
    assert out.count("\n") == 1


def test_a_hidden_folder_that_was_asked_for_is_read(tmp_path):
    folder = tmp_path / ".notes" / ".mine"
    folder.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("x")
    (folder / ".a.md").write_text("hidden")
    (folder / "a.md").write_text("text")
    assert [d["text"] for d in load_documents(str(folder))] == ["text"]
    assert [d["text"] for d in load_documents(str(folder / ".a.md"))] == ["hidden"]

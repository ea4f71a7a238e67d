"""Documents are told apart by their content: in splits, in ids and among prompts."""

import json
from itertools import chain

import pyarrow
import pyarrow.parquet
import pytest

from data.corpora.answers import in_split, read_answers, shard_path
from data.corpora.benchmarks import read_benchmark
from data.corpora.identity import content_key, text_key
from data.corpora.sources import load_documents
from data.corpora.stdlib import is_held_out
from tests.support.files import write_jsonl


def talk(*texts, roles=("user", "assistant")):
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def split(source, **options):
    return [list(load_documents(str(source), part, **options)) for part in ("train", "heldout")]


@pytest.mark.parametrize("change", ["{}", "{}\n", "  {}\r\n", "\ufeff{}", "{}.", "«{}»", "Ｔhe {}"])
def test_near_equal_texts_have_one_key(change):
    text = "The number, of a note:\nit is 7"
    same = change.format(text).replace("Ｔhe The", "The")
    assert text_key(same) == text_key(text) == text_key(text.upper())
    assert text_key(same) != text_key(change.format("The number of a note: it is 8"))


def test_texts_without_words():
    assert text_key("++") == text_key(" ++\n") != text_key("--")
    assert text_key("一") != text_key("二")


def test_what_is_asked_makes_the_key():
    pair = {"id": "1", "prompt": "Why?", "answer": "x"}
    assert content_key(pair) == content_key({**pair, "id": "2", "answer": "y"})
    assert content_key(pair) == content_key({"messages": talk("Why?", "z")})
    assert content_key({**pair, "prompt": ""}) != content_key({"prompt": "", "answer": "y"})
    first, second = ({"messages": talk("hi", "hello", then)} for then in ("one", "two"))
    assert content_key(first) != content_key(second)
    assert content_key(first) == content_key({"messages": talk("hi", "hey", "one", "x")})
    alone = talk("a", roles=("assistant", "user")), talk("b", roles=("assistant", "user"))
    assert len({content_key({"messages": turns}) for turns in alone}) == 2


@pytest.mark.parametrize("form", ["files", "rows", "pairs", "chats"])
def test_a_copy_under_another_name_is_on_the_same_side(tmp_path, form):
    """By a hash of the id, as before, copies of held-out texts are trained on."""
    texts = [f"note number {n}" for n in range(200)]
    if form == "files":
        for n, text in enumerate(texts):
            (tmp_path / f"{n}.md").write_text(text)
            (tmp_path / f"copy of {n}.md").write_text(f"{text}\r\n")
    else:
        rows = {
            "rows": [{"text": text + end} for text in texts for end in ("", " ")],
            "pairs": [{"prompt": text, "answer": end} for text in texts for end in "ab"],
            "chats": [{"messages": talk(t, end)} for t in texts for end in "ab"],
        }[form]
        write_jsonl(tmp_path / "a.jsonl", rows[::2])
        write_jsonl(tmp_path / "b.jsonl", rows[1::2])
    train, held = split(tmp_path)
    assert len(train) + len(held) == 400
    assert held
    assert not {*map(content_key, train)} & {*map(content_key, held)}
    by_name = [[content_key(d) for d in train + held if is_held_out(d["id"]) == h] for h in (0, 1)]
    assert {*by_name[0]} & {*by_name[1]}


def test_ids_that_several_contents_have(tmp_path):
    for part in "ab":
        rows = [{"id": n, "prompt": f"{part} {n}", "answer": "x"} for n in range(50)]
        write_jsonl(tmp_path / f"{part}.jsonl", rows)
    found = [*chain(*split(tmp_path))]
    ids = {d["prompt"]: d["id"] for d in found}
    assert len({*ids.values()}) == 100
    assert [ids[f"a {n}"] for n in range(50)] == [str(n) for n in range(50)]  # as they are
    assert all(ids[f"b {n}"].startswith(f"{n}:") for n in range(50))
    assert {d["id"] for d in load_documents(str(tmp_path), limit=1000)} < {*ids.values()}
    # Answers to one prompt share its id, as the source says.
    write_jsonl(tmp_path / "b.jsonl", [{"id": 7, "prompt": "a 7", "answer": "another"}])
    assert sum(d["id"] == "7" for d in chain(*split(tmp_path))) == 2


def test_problems_with_one_id(tmp_path):
    rows = [
        {"question_id": n % 5, "category": "math", "turns": [f"what is {n}?"]} for n in range(9)
    ]
    ids = [p.id for p in read_benchmark(write_jsonl(tmp_path / "q.jsonl", rows))]
    assert ids[:5] == ["0", "1", "2", "3", "4"]
    assert len({*ids}) == 9


@pytest.fixture
def collection(tmp_path):
    """A collection of two prompts with one id, and an answer more to the first."""
    name = next(f"p{n}" for n in range(99) if in_split(f"p{n}", "train"))
    rows = [{"id": name, "prompt_ids": [p], "answer_ids": [9]} for p in (1, 2, 1)]
    shard_path(tmp_path, 0).parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shard_path(tmp_path, 0))
    (tmp_path / "manifest.json").write_text(json.dumps({"recipe": "x", "tokenizer": "y"}))
    return tmp_path


def test_prompts_of_an_older_collection_with_one_id(collection):
    first, second, again = (answer.prompt for answer in read_answers(collection, "train"))
    assert first == again != second
    assert second.startswith(f"{first}:")
    assert not [*read_answers(collection, "heldout")]  # its split is that of the stored id


def test_a_hidden_shard_is_not_read(collection):
    shard_path(collection, 0).with_name("._00000.parquet").write_bytes(b"\x00\x05")
    assert len([*read_answers(collection, "train")]) == 3
    shard_path(collection, 0).with_name("x.parquet").write_bytes(b"\x00\x05")
    with pytest.raises(ValueError, match=r"x\.parquet is damaged"):
        [*read_answers(collection, "train")]

"""Rows of teacher answers: all of them, or those to some of the prompts."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from data.corpora.answers import shard_path
from data.corpora.stdlib import is_held_out
from data.rows.documents import answers, packed_windows
from data.text.tokenizer import fingerprint, train_tokenizer
from tests.support.files import write_jsonl


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["ab"], 257)


@pytest.fixture
def collection(tmp_path, tokenizer):
    """Two shards of three prompts with two answers each: a token that names prompt and answer."""
    names = [f"p{i}" for i in range(100) if not is_held_out(f"answers to p{i}")][:6]
    for shard in range(2):
        rows = [
            {"id": name, "answer": j, "prompt_ids": [1], "answer_ids": [10 * names.index(name) + j]}
            for j in range(2)
            for name in names[3 * shard : 3 * shard + 3]
        ]
        file = shard_path(tmp_path / "answers", shard)
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    manifest = {"tokenizer": fingerprint(tokenizer), "recipe": "x"}
    (tmp_path / "answers" / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def taken(folder, tokenizer, prompts=None):
    rows = answers(str(folder / "answers"), 2, tokenizer, str(folder / "rows"), prompts=prompts)
    return [int(row["input_ids"][1]) for row in rows]


def test_some_prompts_with_all_of_their_answers(collection, tokenizer):
    assert taken(collection, tokenizer) == [0, 10, 20, 1, 11, 21, 30, 40, 50, 31, 41, 51]
    assert taken(collection, tokenizer, 2) == [0, 10, 1, 11]
    assert taken(collection, tokenizer, 4) == [0, 10, 20, 1, 11, 21, 30, 31]
    assert taken(collection, tokenizer, 6) == taken(collection, tokenizer)


def test_more_prompts_than_there_are(collection, tokenizer):
    with pytest.raises(ValueError, match=r"6 prompts .* prompts=7"):
        taken(collection, tokenizer, 7)


def test_packed_windows_share_short_documents(tmp_path, tokenizer):
    """As training packs them: every document ends with its end-of-text, and none is left out."""
    source = tmp_path / "lines.jsonl"
    write_jsonl(source, [{"text": t * 3} for t in "abcdefgh"])
    a, b, c = (tokenizer(t)["input_ids"][0] for t in "abc")
    end = tokenizer.eos_token_id
    windows = packed_windows(str(source), tokenizer, 2, 6, split="train")
    assert windows == [[a, a, a, end, b, b], [b, end, c, c, c, end]]
    with pytest.raises(ValueError, match="packed windows"):
        packed_windows(str(source), tokenizer, 99, 6, split="train")


def test_several_collections_take_turns(collection, tokenizer):
    other = collection / "other"
    (collection / "answers").rename(collection / "first")
    rows = [{"id": "p0", "answer": 0, "prompt_ids": [1], "answer_ids": [200], "score": 1.0}]
    name = next(f"q{i}" for i in range(100) if not is_held_out(f"answers to q{i}"))
    rows[0]["id"] = name
    shard_path(other, 0).parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shard_path(other, 0))
    manifest = {"tokenizer": fingerprint(tokenizer), "recipe": "y"}
    (other / "manifest.json").write_text(json.dumps(manifest))

    def tokens(*sources, **options):
        found = answers(sources, 2, tokenizer, str(collection / "rows"), **options)
        return [int(row["input_ids"][1]) for row in found]

    first, other = str(collection / "first"), str(other)
    assert tokens(first, other)[:4] == [0, 200, 10, 20]
    assert sorted(tokens(other, first)) == sorted(tokens(first, other))
    assert tokens(first, other, prompts=2) == [0, 200, 1]
    assert tokens(other, where="score>=1") == [200]
    with pytest.raises(ValueError, match=r"first.*other.*7 prompts.*prompts=8"):
        tokens(first, other, prompts=8)

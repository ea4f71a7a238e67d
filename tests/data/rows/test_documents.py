"""Rows of teacher answers: all of them, or those to some of the prompts."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import processors

from data.corpora.answers import shard_path
from data.corpora.stdlib import is_held_out
from data.rows.documents import answers, documents, packed_windows
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


class TestStaleRows:
    """Rows are made again when their content, or anything that makes ids, has changed."""

    TEMPLATE = (
        "{% for m in messages %}[{{m.role}}] {{m.content}}END\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )

    @pytest.fixture
    def chats(self, tmp_path):
        self.tokenizer = train_tokenizer(["ab"], 257)
        self.tokenizer.chat_template = self.TEMPLATE
        self.source, self.folder = tmp_path / "d.jsonl", tmp_path / "rows"
        self.write("old")

    def write(self, word):
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": word}]
        write_jsonl(self.source, [{"id": f"r{i}", "messages": turns} for i in range(9)])

    def rows(self):
        found = documents(str(self.source), 32, self.tokenizer, str(self.folder))
        return found.fingerprint, self.tokenizer.decode(found[0]["input_ids"])

    def test_the_same_inputs_share_rows(self, chats, monkeypatch):
        first = self.rows()
        monkeypatch.setattr("data.rows.documents.encode_document", None)
        assert self.rows() == first

    def test_another_content_of_the_same_size(self, chats):
        first = self.rows()
        self.write("new")
        second = self.rows()
        assert "old" in first[1]
        assert "new" in second[1]
        self.write("old")
        assert self.rows() == first

    @pytest.mark.parametrize("change", ["template", "eos", "post", "added", "special"])
    def test_another_tokenizer(self, chats, change):
        first, tokenizer = self.rows()[0], self.tokenizer
        if change == "template":
            tokenizer.chat_template = self.TEMPLATE.replace("END", "FIN")
        elif change == "eos":
            tokenizer.eos_token = "a"
        elif change == "post":
            tokenizer.bos_token = "b"
            start = processors.TemplateProcessing(
                "b $A", None, [("b", tokenizer.convert_tokens_to_ids("b"))]
            )
            tokenizer.backend_tokenizer.post_processor = start
        elif change == "added":
            tokenizer.add_tokens(["END"])
        else:  # which templates are given
            tokenizer.add_special_tokens({"sep_token": "b"})
        assert self.rows()[0] != first


def test_a_collection_that_grew_is_packed_again(collection, tokenizer):
    """Its manifest is the same: the fingerprint is of the shards."""
    assert len(taken(collection, tokenizer)) == 12
    shard_path(collection / "answers", 1).unlink()
    assert taken(collection, tokenizer) == [0, 10, 20, 1, 11, 21]


class TestNothingToTrain:
    @pytest.fixture
    def chat(self):
        tokenizer = train_tokenizer(["ab"], 257)
        tokenizer.chat_template = TestStaleRows.TEMPLATE
        return tokenizer

    def packed(self, tmp_path, tokenizer, rows):
        source = write_jsonl(tmp_path / "d.jsonl", [{"id": f"r{i}", **r} for i, r in rows])
        return documents(source, 64, tokenizer, str(tmp_path / "rows"))

    @pytest.mark.parametrize(
        "turn",
        [
            {"role": "user", "content": "and this?"},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": "a", "weight": 0},
        ],
    )
    def test_chats_without_an_answer(self, tmp_path, chat, turn):
        turns = [{"role": "user", "content": "q"}, turn]
        with pytest.raises(ValueError, match="no token to train on") as caught:
            self.packed(tmp_path, chat, [(i, {"messages": turns}) for i in range(9)])
        assert "\n" not in str(caught.value)
        assert not [*(tmp_path / "rows").glob("*")]
        answered = [*turns, {"role": "assistant", "content": "a"}]
        mixed = [(i, {"messages": answered if i == 5 else turns}) for i in range(9)]
        trained = [row["trained"].sum() for row in self.packed(tmp_path, chat, mixed)]
        assert sum(trained) == len("aEND")

    def test_empty_answers_and_texts(self, tmp_path, tokenizer):
        """Only their end would be trained: to say nothing."""
        rows = [(i, {"prompt": "question", "answer": ""}) for i in range(9)]
        with pytest.raises(ValueError, match="no token to train on"):
            self.packed(tmp_path, tokenizer, rows)
        rows[3] = (3, {"prompt": "question", "answer": "x"})
        assert len(self.packed(tmp_path, tokenizer, rows))

    def test_a_filter_that_leaves_nothing(self, collection, tokenizer):
        folder, rows = str(collection / "answers"), str(collection / "rows")
        with pytest.raises(ValueError, match=r"no answer in split='train' with where='answer>5'"):
            answers(folder, 2, tokenizer, rows, where="answer>5")
        assert len(answers(folder, 2, tokenizer, rows, where="answer>0"))

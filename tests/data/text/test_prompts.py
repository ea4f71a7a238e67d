"""Prompt sets: deterministic, spread over documents, of the asked length."""

import json
import subprocess
import sys
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from data.corpora.answers import shard_path
from data.text.prompts import WINDOW, heldout_prompts
from data.text.tokenizer import fingerprint
from tests.support.files import write_jsonl


@pytest.fixture
def folder(tmp_path):
    for index in range(5):
        words = " ".join(f"w{index}x{number}" for number in range(60))
        (tmp_path / f"{index}.txt").write_text(words)
    return str(tmp_path)


def test_windows_have_the_length_and_are_spread(folder, tokenizer):
    prompts = heldout_prompts(folder, tokenizer, 12, 16, split="train")
    assert {len(p["prompt_ids"]) for p in prompts} == {16}
    assert all(p["text"] == tokenizer.decode(p["prompt_ids"]) for p in prompts)
    per_document = Counter(p["id"].split("@")[0] for p in prompts)
    assert sorted(per_document.values()) == [2, 2, 2, 3, 3]
    assert len({p["id"] for p in prompts}) == 12


def test_windows_do_not_overlap(folder, tokenizer):
    prompts = heldout_prompts(folder, tokenizer, 40, 16, split="train")
    offsets = [p["id"].rsplit("@", 1) for p in prompts]
    taken = [(name, int(offset) + i) for name, offset in offsets for i in range(16)]
    assert len(taken) == len(set(taken))


def test_same_prompts_every_time_and_smaller_sets_are_beginnings(folder, tokenizer):
    many = heldout_prompts(folder, tokenizer, 9, 16, split="train")
    assert heldout_prompts(folder, tokenizer, 9, 16, split="train") == many
    assert heldout_prompts(folder, tokenizer, 4, 16, split="train") == many[:4]


def test_library_prompts_are_held_out(tokenizer, heldout_library):
    prompts = heldout_prompts("stdlib", tokenizer, 20, 32)
    ids = {p["id"].split("@")[0] for p in prompts}
    assert ids <= {document["id"] for document in heldout_library}
    assert len(ids) > 5


def test_human_eval_prompts_are_taken_verbatim(tmp_path, tokenizer):
    rows = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "test": ""} for i in range(3)]
    source = write_jsonl(tmp_path / "he.jsonl", rows)
    prompts = heldout_prompts(source, tokenizer, 3, 100)
    assert {p["id"]: p["text"] for p in prompts} == {r["task_id"]: r["prompt"] for r in rows}
    [prompt] = heldout_prompts(source, tokenizer, 1, 2)
    assert len(prompt["prompt_ids"]) == 2
    assert prompt["text"].endswith("\n")


def test_turns_use_the_chat_template_where_there_is_one(tmp_path, tokenizer, chat_tokenizer):
    source = write_jsonl(tmp_path / "mt.jsonl", [{"question_id": 81, "turns": ["add 1", "again"]}])
    [plain] = heldout_prompts(source, tokenizer, 1, 100)
    assert (plain["id"], plain["text"]) == ("81", "add 1")
    [chat] = heldout_prompts(source, chat_tokenizer, 1, 100)
    assert chat["text"] == "<|im_start|>user\nadd 1<|im_end|>\n<|im_start|>assistant\n"


def test_training_rows_give_what_precedes_the_answer(tmp_path, tokenizer, chat_tokenizer):
    turns = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user")]
    rows = [{"id": 1, "messages": turns}, {"id": 2, "prompt": "add", "answer": "done"}]
    source = write_jsonl(tmp_path / "train.jsonl", rows)
    prompts = heldout_prompts(source, chat_tokenizer, 2, 100, split="train")
    assert {p["id"]: p["text"] for p in prompts} == {
        "1": "<|im_start|>system\nsystem<|im_end|>\n<|im_start|>user\nuser<|im_end|>\n"
        "<|im_start|>assistant\n",
        "2": "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n",
    }


def test_jsonl_texts_are_whole_and_keep_their_split(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(100)])
    train = heldout_prompts(source, tokenizer, 50, 100, split="train")
    heldout = heldout_prompts(source, tokenizer, 1, 100)
    assert heldout[0]["text"].startswith("text ")
    assert not {p["id"] for p in train} & {p["id"] for p in heldout}


def test_start_token_counts_in_the_length(folder, tokenizer):
    from tokenizers import processors

    from data.text.tokenizer import with_draft_tokens

    tokenizer = with_draft_tokens(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    prompts = heldout_prompts(folder, tokenizer, 5, 16, split="train")
    for prompt in prompts:
        assert len(prompt["prompt_ids"]) == 16
        assert prompt["prompt_ids"][0] == tokenizer.bos_token_id
        assert prompt["prompt_ids"].count(tokenizer.bos_token_id) == 1


def test_without_a_length_questions_are_whole(tmp_path, tokenizer):
    question = " ".join(map(str, range(200)))
    source = write_jsonl(tmp_path / "q.jsonl", [{"prompt": question}])
    assert [p["text"] for p in heldout_prompts(source, tokenizer, 1)] == [question]
    [cut] = heldout_prompts(source, tokenizer, 1, 9)
    assert (len(cut["prompt_ids"]), question.endswith(cut["text"])) == (9, True)
    texts = write_jsonl(
        tmp_path / "t.jsonl", [{"text": f"{question} {n}", "id": n} for n in range(99)]
    )
    found = heldout_prompts(texts, tokenizer, 2, split="train")
    assert {len(p["prompt_ids"]) for p in found} == {WINDOW}
    windows = heldout_prompts("stdlib", tokenizer, 3)
    assert {len(p["prompt_ids"]) for p in windows} == {WINDOW}


def test_a_chat_or_a_subset_of_what_has_none(folder, tmp_path, tokenizer, chat_tokenizer):
    with pytest.raises(ValueError, match=r"chat=true.*texts"):
        heldout_prompts(folder, chat_tokenizer, 2, 16, split="train", chat=True)
    with pytest.raises(ValueError, match=r"chat=true.*template"):
        heldout_prompts(folder, tokenizer, 2, 16, split="train", chat=True)
    for chat in (None, False):  # windows of text are never in a chat
        found = heldout_prompts(folder, chat_tokenizer, 2, 16, split="train", chat=chat)
        assert not any("<|im_start|>" in p["text"] for p in found)
    for source in (folder, "stdlib"):
        with pytest.raises(ValueError, match="subset='x'"):
            heldout_prompts(source, tokenizer, 2, 16, split="train", subset="x")


def test_bad_inputs(folder, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r" 0 .*length=100000.* 2 are asked"):
        heldout_prompts(folder, tokenizer, 2, 100000, split="train")
    with pytest.raises(ValueError, match=" 0 prompts"):
        heldout_prompts(folder, tokenizer, 0, 8, split="train")
    with pytest.raises(ValueError, match=r"'none\.jsonl'"):
        heldout_prompts("none.jsonl", tokenizer, 1, 8)
    source = write_jsonl(tmp_path / "mixed.jsonl", [{"prompt": "x"}, {"title": "y"}])
    with pytest.raises(ValueError, match=r"line 2.*'turns'.*'prompt'.*\['title'\]"):
        heldout_prompts(source, tokenizer, 2, 8)


def test_fewer_than_are_asked_for_where_that_is_allowed(tmp_path, tokenizer):
    rows = [{"prompt": f"say {n}", "id": n} for n in range(3)]
    source = write_jsonl(tmp_path / "q.jsonl", rows)
    some = heldout_prompts(source, tokenizer, 50, split="train", fewer=True)
    assert 0 < len(some) <= 3
    assert some == heldout_prompts(source=source, tokenizer=tokenizer, count=None, split="train")
    assert len(heldout_prompts(source, tokenizer, 1, split="train", fewer=True)) == 1
    with pytest.raises(ValueError, match="and 50 are asked for"):
        heldout_prompts(source, tokenizer, 50, split="train")
    empty = write_jsonl(tmp_path / "long.jsonl", [{"text": ""}])
    with pytest.raises(ValueError, match=r"asked for|no text"):
        heldout_prompts(empty, tokenizer, 5, split="train", fewer=True)
    with pytest.raises(ValueError, match="and 5 are asked for"):  # no file of the user's
        heldout_prompts("stdlib", tokenizer, 5, length=10**6, limit=3, fewer=True)


def test_prompts_that_lose_their_beginning_are_counted_in_one_line(tmp_path, tokenizer, capsys):
    sizes = [3, 4, 5, 9, 9, 2]
    rows = [{"prompt": " ".join(["x"] * n), "id": n + 10 * i} for i, n in enumerate(sizes)]
    source = write_jsonl(tmp_path / "q.jsonl", rows)

    def read(count, length):
        found = heldout_prompts(source, tokenizer, count, length, split="train")
        return [len(p["prompt_ids"]) for p in found], capsys.readouterr().err

    whole, said = read(None, None)
    assert said == ""
    length = sorted(whole)[1]
    longer = sum(n > length for n in whole)
    assert 0 < longer < len(whole)
    assert read(None, length) == (
        [min(n, length) for n in whole],
        f"{longer} of {len(whole)} prompts were longer than {length} tokens and lost their "
        "beginning\n",
    )
    assert read(None, max(whole))[1] == ""
    few = sum(n > length for n in whole[:2])  # of those that are taken
    assert read(2, length)[1].startswith(f"{few} of 2 prompts" if few else "")


def test_decoding_needs_no_datasets():
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "import data.text.chat, data.rows.packing, data.text.prompts, data.text.tokenizer\n"
        "from data.corpora.sources import load_documents\n"
        "assert next(iter(load_documents('stdlib', 'heldout', limit=1)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def write_collection(folder, tokenizer, fingerprint):
    rows = [
        {"id": f"p{n}", "answer": j, "prompt_ids": [1, n % 50, 3], "answer_ids": [9, 9]}
        for n in range(120)
        for j in range(2)
    ]
    shard_path(folder, 0).parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shard_path(folder, 0))
    manifest = {"tokenizer": fingerprint, "recipe": "x"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder)


def test_the_prompts_of_a_collection_are_those_of_its_split(tmp_path, tokenizer):
    source = write_collection(tmp_path, tokenizer, fingerprint(tokenizer))
    train = heldout_prompts(source, tokenizer, None, split="train")
    heldout = heldout_prompts(source, tokenizer, None)
    assert {p["id"] for p in train} | {p["id"] for p in heldout} == {f"p{n}" for n in range(120)}
    assert len(train) + len(heldout) == 120  # each once, and without its answers
    assert heldout
    assert len(train) > len(heldout)
    assert all(p["prompt_ids"] == [1, int(p["id"][1:]) % 50, 3] for p in train)
    assert [p["id"] for p in train][:5] != [f"p{n}" for n in range(5)]  # a fair sample
    assert heldout_prompts(source, tokenizer, 3, split="train") == train[:3]
    assert heldout_prompts(source, tokenizer, 1, 2)[0]["prompt_ids"][-1] == 3
    with pytest.raises(ValueError, match=r"has 119 prompts.* 500 are asked for"):
        heldout_prompts(source, tokenizer, 500, split="train")
    with pytest.raises(ValueError, match="subset='a'"):
        heldout_prompts(source, tokenizer, 1, subset="a")


def test_a_collection_of_another_tokenizer(tmp_path, tokenizer):
    source = write_collection(tmp_path, tokenizer, "other")
    with pytest.raises(ValueError, match="another tokenizer"):
        heldout_prompts(source, tokenizer, 1)


def test_no_count_takes_all(folder, tokenizer):
    every = heldout_prompts(folder, tokenizer, None, 16, split="train")
    assert heldout_prompts(folder, tokenizer, len(every), 16, split="train") == every
    with pytest.raises(ValueError, match=f" {len(every) + 1} are asked for"):
        heldout_prompts(folder, tokenizer, len(every) + 1, 16, split="train")


def test_a_benchmark_takes_no_condition(tmp_path, tokenizer):
    source = write_jsonl(
        tmp_path / "a.jsonl", [{"question_id": 1, "category": "math", "turns": ["x"]}]
    )
    assert heldout_prompts(source, tokenizer, 1)
    with pytest.raises(ValueError, match=r"where='a==1'.*benchmark"):
        heldout_prompts(source, tokenizer, 1, where="a==1")


def test_a_text_of_two_lines_is_one_document_and_says_so(tmp_path, tokenizer, capsys):
    lines = ["How far is the moon?", "What is a prime number?"]
    text = tmp_path / "prompts.txt"
    text.write_text("\n".join(lines))
    for split in ("train", "heldout"):  # it is in one of the two, and not in the other
        with pytest.raises(ValueError, match=r"A \.txt file is one document") as error:
            heldout_prompts(str(text), tokenizer, 2, 60, split=split)
        assert "give a .jsonl file" in str(error.value)
        assert "\n" not in str(error.value)
    capsys.readouterr()
    for _ in range(2):
        heldout_prompts(str(text), tokenizer, 2, 8)  # it is held out, by its hash
    (line,) = capsys.readouterr().err.splitlines()  # once
    assert line.startswith(f"{text}: its prompts are windows of 8 tokens. A .txt file is one")
    heldout_prompts(str(text), tokenizer, 1, 8)
    rows = [{"text": line} for line in lines]
    with pytest.raises(ValueError, match="prompts") as error:
        heldout_prompts(write_jsonl(tmp_path / "p.jsonl", rows), tokenizer, 3, 8, split="train")
    assert "one document" not in str(error.value) + capsys.readouterr().err

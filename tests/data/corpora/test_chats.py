"""Rows are read with all that changes their training, or refused with the row and the column."""

import json
import re

import pytest

from data.corpora.chats import ROLES
from data.corpora.sources import load_documents
from data.text.prompts import prompt_set
from tests.support.files import write_jsonl

ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def read(tmp_path, row):
    (found,) = load_documents(write_jsonl(tmp_path / "a.jsonl", [{"id": 7, **row}]))
    return {key: value for key, value in found.items() if key != "id"}


@pytest.mark.parametrize(
    ("role", "spelling"), [(r, s) for r, found in ROLES.items() for s in found if r != "system"]
)
def test_every_spelling_of_a_role_is_read(tmp_path, role, spelling):
    for written in (spelling, spelling.upper(), f" {spelling.capitalize()} "):
        turns = [{"from": written, "value": "x"}, {"role": written, "content": "y"}]
        found = read(tmp_path, {"conversations": turns})
        assert found == {"messages": [{"role": role, "content": c} for c in "xy"]}


@pytest.mark.parametrize("spelling", ["critic", "gptt", "", "narrator"])
def test_an_unknown_role_is_one_line_with_file_and_row(tmp_path, spelling):
    good, bad = ([{**ASKED}, {"role": r, "content": "a"}] for r in ("assistant", spelling))
    source = write_jsonl(tmp_path / "a.jsonl", [{"id": i, "messages": good} for i in range(3)])
    documents = load_documents(source, limit=3)
    assert len([*documents]) == 3
    source = write_jsonl(tmp_path / "a.jsonl", [{"id": "1", "messages": bad}])
    with pytest.raises(ValueError, match=rf'a\.jsonl, line 1: .*role "{spelling}".*gpt') as caught:
        load_documents(source)
    assert "\n" not in str(caught.value)


def test_what_stands_beside_the_turns(tmp_path):
    system = {"role": "system", "content": "s"}
    chats = {"messages": [system, ASKED, SAID]}
    for column in ("system", "system_prompt", "system_message"):
        assert read(tmp_path, {column: "s", "messages": [ASKED, SAID]}) == chats
        assert read(tmp_path, {column: "s", "question": "q", "response": "a"}) == chats
        assert read(tmp_path, {column: "s", **chats}) == chats  # said twice
        assert read(tmp_path, {column: "", "messages": [ASKED, SAID]}) == {
            "messages": [ASKED, SAID]
        }
    row = {"instruction": "q", "input": "more", "output": "a", "history": [["q", "a"]]}
    more = {"role": "user", "content": "q\n\nmore"}
    assert read(tmp_path, row) == {"messages": [ASKED, SAID, more, SAID]}
    for tools in (TOOLS, json.dumps(TOOLS)):
        found = read(tmp_path, {"messages": [ASKED, SAID], "tools": tools})
        assert found == {"messages": [ASKED, SAID], "options": {"tools": TOOLS}}
    row = {"messages": [ASKED, SAID], "chat_template_kwargs": {"enable_thinking": False}}
    assert read(tmp_path, row)["options"] == {"enable_thinking": False}
    row = {"messages": [ASKED, SAID], "tools": [], "history": [], "system": None, "images": []}
    assert read(tmp_path, row) == {"messages": [ASKED, SAID]}


def test_prompts_and_completions_that_are_turns(tmp_path):
    """TRL's: only the completion is trained."""
    row = {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}
    first = SAID | {"train": False}
    assert read(tmp_path, row) == {"messages": [ASKED, first, ASKED, SAID]}


@pytest.mark.parametrize("flag", ["weight", "train", "training", "trained", "loss"])
@pytest.mark.parametrize(("value", "trained"), [(0, False), (False, False), (1, True), (1.0, True)])
def test_flags_of_turns(tmp_path, flag, value, trained):
    found = read(tmp_path, {"messages": [ASKED, SAID | {flag: value}]})
    assert found == {"messages": [ASKED, SAID if trained else SAID | {"train": False}]}


def test_calls_and_their_results(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    result = {"role": "tool", "content": "1"}
    written = json.dumps({"name": "f", "arguments": '{"x": 1}'})
    sharegpt = [{"from": "human", "value": "q"}, {"from": "function_call", "value": written},
                {"from": "observation", "value": "1"}, {"from": "gpt", "value": "a"}]  # fmt: skip
    text = {"name": "f", "arguments": '{"x": 1}'}
    asked = {"role": "assistant", "content": None,
             "tool_calls": [{"type": "function", "function": text}]}  # fmt: skip
    expected = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, result, SAID]
    assert read(tmp_path, {"conversations": sharegpt}) == {"messages": expected}
    assert read(tmp_path, {"messages": [ASKED, asked, result, SAID]}) == {"messages": expected}


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"messages": []}, "'messages' is a chat without turns"),
        ({"conversations": []}, "'conversations' is a chat without turns"),
        ({"messages": [ASKED, SAID], "image": "a.png"}, "'image'"),
        ({"prompt": "q", "answer": "a", "images": ["a.png"]}, "'images'"),
        ({"messages": [ASKED, SAID], "functions": [{"name": "f"}]}, "'functions'.*'tools'"),
        ({"messages": [ASKED, SAID], "history": [["a", "b"]]}, "'history'"),
        ({"instruction": "q", "output": "a", "history": [["b"]]}, "'history'"),
        ({"messages": [ASKED, SAID], "tools": "f"}, "'tools'"),
        ({"messages": [ASKED, SAID], "tools": {"name": "f"}}, "'tools'"),
        ({"messages": [ASKED, SAID], "system": ["x"]}, "'system'"),
        ({"messages": [{"role": "system", "content": "x"}, ASKED], "system": "y"}, "'system'"),
        ({"messages": [ASKED, SAID], "weight": 0.5}, "'weight'"),
        ({"prompt": "q", "answer": "a", "train": False}, "'train'"),
        ({"messages": [ASKED, SAID | {"weight": 0.3}]}, "weight=0.3"),
        ({"messages": [ASKED | {"train": True}, SAID]}, "train=true.*'user'"),
        ({"messages": [ASKED, SAID | {"train_detail": [{"train": False}]}]}, "'train_detail'"),
        ({"messages": [ASKED, {"from": "function_call", "value": "f(1)"}]}, "'function_call'"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named_with_its_row(tmp_path, row, names):
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 1: .*{names}") as caught:
        read(tmp_path, row)
    assert "\n" not in str(caught.value)


def test_other_columns_are_no_matter(tmp_path):
    """The negative control: a text with columns of those names, and what is no setting."""
    row = {"text": "t", "system": "s", "tools": TOOLS, "weight": 0.5, "image": "a.png"}
    assert read(tmp_path, row) == {"text": "t"}
    row = {"messages": [ASKED, SAID], "loss": 1.7, "score": 0, "weight": 1, "source": "x"}
    assert read(tmp_path, row) == {"messages": [ASKED, SAID]}


def test_a_problem_with_a_system_prompt_is_refused(tmp_path, tokenizer):
    """A prompt alone is a benchmark's row, whose system prompt nobody would see."""
    for row, ok in (({"prompt": "q", "system": "s"}, False), ({"prompt": "q"}, True)):
        source = write_jsonl(tmp_path / "p.jsonl", [{"id": str(i), **row} for i in range(9)])
        if ok:
            assert len(prompt_set(source, tokenizer, 9)) == 9
            continue
        with pytest.raises(ValueError, match=r"p\.jsonl, line 1: the column 'system'"):
            prompt_set(source, tokenizer, 9)


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    lines = [json.dumps({"id": str(i), "text": f"x{i}"}).encode() for i in range(2)]
    (tmp_path / "a.jsonl").write_bytes(mark + lines[0] + b"\r\n" + mark + lines[1] + b"\n" + mark)
    assert [d["text"] for d in load_documents(str(tmp_path / "a.jsonl"))] == ["x0", "x1"]
    for name in ("t.txt", "t.md", "t.py"):
        (tmp_path / name).write_bytes(mark + b"hello")
        (found,) = load_documents(str(tmp_path / name))
        assert found["text"] == "hello"
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe{\x00}\x00")  # UTF-16
    with pytest.raises(ValueError, match=re.escape("b.jsonl, line 1 is not UTF-8")):
        load_documents(str(tmp_path / "b.jsonl"))

"""Tools, structured answers and thoughts, as OpenAI's client asks for them and reads them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import BadRequestError, OpenAI

from decoding.serving.turns import Thought, Turn, calls_of, thought_of
from tests.support.tokenizers import spelled_bytes
from tests.support.tools import ADD, HERMES, TOOLS, served

pytest.importorskip("llguidance")

SAYING = "{% for m in messages %}{{ m.content }}{% endfor %}"
LLAMA = 'As {"name": f, "parameters": {}} of {{ tools }}' + SAYING
SMOL = "{{ tools }}<tool_call>[ ]</tool_call>" + SAYING
THINKER = (
    "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }}</think>{{ m.content }}"
    "{% endfor %}{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ASK = [{"role": "user", "content": "What is 1 + 2?"}]
LONG = {"model": "m", "max_tokens": 400}


@pytest.fixture(scope="module")
def client():
    with served(HERMES) as http:
        yield OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http)


def asked(client, **more):
    return client.chat.completions.create(**{"messages": ASK, **LONG, **more}).choices[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_needed_is_well_formed(client, choice, seed):
    """A random model calls as its grammar says; with drafts as without."""
    given = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
    drafted, plain = asked(client, **given), asked(client, **given | {"model": "plain"})
    if drafted.finish_reason == "length":  # of a number that does not end
        assert drafted.message.content == plain.message.content
        return
    assert drafted.finish_reason == "tool_calls"
    (call,) = drafted.message.tool_calls
    assert call.function == plain.message.tool_calls[0].function
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        assert isinstance(arguments["a"], int)
        assert arguments["b"] in (1, 20, 300)
    else:
        assert (choice, call.function.name) == ("required", "now")


def test_a_stream_has_the_same_calls(client):
    given = {"tools": TOOLS, "tool_choice": TOOLS[0], "seed": 1}
    given["tool_choice"] = {"type": "function", "function": {"name": "add"}}
    whole = asked(client, **given)
    with client.chat.completions.stream(messages=ASK, **LONG, **given) as stream:
        for _ in stream:
            pass
    pieces = client.chat.completions.create(messages=ASK, stream=True, **LONG, **given)
    for choice in (piece.choices[0] for piece in pieces):  # accepted parts are of the text shown
        length = len(choice.delta.content or "")
        assert all(end <= length for _, end in choice.model_extra["accepted"])
    found = stream.current_completion_snapshot.choices[0]
    assert found.finish_reason == whole.finish_reason == "tool_calls"
    ours, theirs = ([c.function for c in m.message.tool_calls] for m in (found, whole))
    assert [(f.name, f.arguments) for f in ours] == [(f.name, f.arguments) for f in theirs]


def test_an_answer_that_is_cut_off_says_so(client):
    """Also after a call that is whole."""
    for seed in range(100):
        given = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "seed": seed}
        whole = client.chat.completions.create(**LONG, **given)
        calls = whole.choices[0].message.tool_calls or []
        if len(calls) > 1 and whole.choices[0].finish_reason == "tool_calls":
            break
    cut = asked(client, **given, max_tokens=whole.usage.completion_tokens - 8)
    assert (len(cut.message.tool_calls), cut.finish_reason) == (len(calls) - 1, "length")


def test_an_agents_loop(client):
    """A call, its result, and the next answer, as a client sends them back."""
    first = asked(client, tools=TOOLS, tool_choice="required", seed=1)
    call = first.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    again = asked(client, messages=[*ASK, first.message, result], tools=TOOLS, seed=2)
    assert again.message.role == "assistant"


FORMATS = {
    "object": {"response_format": {"type": "json_object"}},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ADD}}
    },
    "regex": {"extra_body": {"structured_outputs": {"regex": "[a-c]{2,5}/(x|y)"}}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes", 'no "é"', "may be"]}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}},
}


@pytest.mark.parametrize("name", FORMATS)
def test_answers_have_the_format_that_is_asked_for(client, name):
    for seed in range(3):
        given = {**FORMATS[name], "seed": seed}
        found, plain = asked(client, **given), asked(client, **given | {"model": "plain"})
        text = found.message.content
        assert text == plain.message.content
        if found.finish_reason == "length":
            assert name in ("object", "schema")
            continue
        if name in ("object", "schema"):
            assert isinstance(json.loads(text), dict)
        else:
            one = {"regex": "[a-c]{2,5}/[xy]", "choice": 'yes|no "é"|may be', "grammar": "ab|ac"}
            assert re.fullmatch(one[name], text)


def test_a_stream_of_both_kinds_at_once(client):
    """Requests with and without grammars are decoded together, each as alone."""
    asks = [{**FORMATS[name], "seed": i} for i, name in enumerate(FORMATS)]
    asks += [{"seed": 7}, {"tools": TOOLS, "tool_choice": "required", "seed": 8}]
    alone = [asked(client, max_tokens=40, **a).message.content for a in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        together = pool.map(lambda a: asked(client, max_tokens=40, **a).message.content, asks)
    assert [*together] == alone


WRONG = {
    "no such tool": {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
    "both": {"response_format": {"type": "json_object"}},
    "a schema": {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
    "a schema's type": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]
    },
    "a call without a function": {
        "messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]
    },
    "no content": {"messages": [{"role": "user"}]},
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told_in_a_line(client, name):
    with pytest.raises(BadRequestError) as caught:
        asked(client, **{"tools": TOOLS, **WRONG[name]})
    assert "\n" not in caught.value.body["message"]
    assert caught.value.param is not None


def test_a_template_without_tools_refuses_them():
    with served(SAYING) as http:
        reply = http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert "chat template has none" in reply.json()["error"]["message"]


CALLS = {"hermes": HERMES, "llama": LLAMA, "smol": SMOL}
SAID = {  # texts, and what they say and call
    "hermes": {
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "</t>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>': (
            "Sure.", [("f", {"a": "</t>"}), ("g", {})]
        ),
        "a <tool_cal>": ("a <tool_cal>", []),
        "<tool_call>\n{broken": ("<tool_call>\n{broken", []),
    },
    "llama": {
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}': (
            "", [("f", {"a": 1}), ("g", {})],
        ),
        '{"a": 1}': ('{"a": 1}', []),
        "Well, {this}": ("Well, {this}", []),
    },
    "smol": {
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
        "</tool_call>": ("", [("f", {"a": 1}), ("g", {})]),
    },
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("kind", CALLS)
def test_a_turn_is_read_alike_in_pieces_of_any_size(kind, size):
    calls = calls_of(spelled_bytes(), CALLS[kind])
    for text, (said, called) in SAID[kind].items():
        turn, parts = Turn(calls, Thought()), []
        for i in range(0, len(text), size):
            parts.append(turn.read(text[i : i + size], i + size >= len(text)))
        assert "".join(p.said for p in parts).strip() == said
        found = [(name, json.loads(given)) for p in parts for name, given in p.calls]
        assert found == called
        assert turn.called == bool(called)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_thought_is_told_from_what_is_said(size):
    texts = {
        (False, "<think>\nhm <b>\n</think>\n\nYes."): ("hm <b>", "Yes."),
        (True, "hm\n</think>\nYes"): ("hm", "Yes"),
        (False, "No <think> here"): ("", "No <think> here"),
        (True, "never closed"): ("never closed", ""),
    }
    for (opened, text), expected in texts.items():
        turn, parts = Turn(None, Thought(True, opened)), []
        for i in range(0, len(text), size):
            parts.append(turn.read(text[i : i + size], i + size >= len(text)))
        found = ("".join(p.thought for p in parts), "".join(p.said for p in parts))
        assert tuple(map(str.strip, found)) == expected


def test_thoughts_come_in_and_out():
    assert thought_of(THINKER, "a <think>\n") == Thought(True, True)
    assert thought_of(THINKER, "a <think></think>\n") == Thought(False, False)
    with served(THINKER) as http:
        ask = {"max_tokens": 60, "temperature": 0}
        post = lambda **more: http.post(  # noqa: E731
            "/v1/chat/completions", json={"messages": ASK, **ask, **more}
        )
        told = [*ASK, {"role": "assistant", "content": "3", "reasoning": "easy"}]
        counts = [
            post(**more).json()["usage"]["prompt_tokens"]
            for more in ({}, {"reasoning_effort": "low"}, {"messages": told})
        ]
        assert counts[1] == counts[0] + len("low")
        assert counts[2] == counts[0] + len("assistant easy</think>3")
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": ADD}}
        found = post(response_format=schema, max_tokens=600).json()["choices"][0]["message"]
        assert "<think>" not in found["content"]
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert post(response_format=schema, **off).status_code == 200
        refused = post(structured_outputs={"regex": "a"}).json()["error"]
        assert "this model thinks" in refused["message"]
        assert post(structured_outputs={"regex": "a"}, **off).status_code == 200

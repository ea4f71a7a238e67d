"""/v1/responses, as OpenAI's client asks and reads it: the answers are those of a chat."""

import json

import pytest
from openai import BadRequestError, OpenAI

from tests.support.tools import ADD, HERMES, TOOLS, served

pytest.importorskip("llguidance")

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASK = {"model": "m", "input": "What is 1 + 2?", "temperature": 0, "max_output_tokens": 300}
SEEDED = {"extra_body": {"seed": 1}}


@pytest.fixture(scope="module")
def client():
    with served(HERMES) as http:
        yield OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http)


def chat(client, **more):
    said = [{"role": "user", "content": ASK["input"]}]
    options = {"model": "m", "temperature": 0, "max_tokens": 300} | more
    return client.chat.completions.create(messages=said, **options)


def test_a_text_is_that_of_a_chat(client):
    found, same = client.responses.create(**ASK), chat(client)
    assert found.output_text == same.choices[0].message.content
    assert (found.status, found.output[0].role) == ("incomplete", "assistant")  # of 300 tokens
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == same.usage.completion_tokens
    assert found.usage.input_tokens == same.usage.prompt_tokens
    told = client.responses.create(**{**ASK, "input": [{"role": "user", "content": ASK["input"]}]})
    assert told.output_text == found.output_text
    system = client.responses.create(**ASK, instructions="Be brief.")
    assert system.usage.input_tokens == found.usage.input_tokens + len("[system] Be brief.")


def test_a_schema_and_a_stream(client):
    given = {"type": "json_schema", "name": "x", "schema": ADD, "strict": True}
    asked = {**ASK, "text": {"format": given}, "temperature": 1, **SEEDED}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert found.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert (kinds[-1], whole.status) == ("response.completed", "completed")
    assert {*json.loads(whole.output_text)} == {"a", "b"}


def test_calls_and_their_results(client):
    """A loop as agents write it: the output's items are a part of the next input."""
    asked = {**ASK, "tools": FLAT, "tool_choice": {"type": "function", "name": "add"}}
    asked |= {"temperature": 1, **SEEDED}
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "add", "completed")
    assert isinstance(json.loads(call.arguments)["a"], int)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
    (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    said = [{"role": "user", "content": ASK["input"]}, call.to_dict(), done]
    again = client.responses.create(**{**ASK, "input": said, "tools": FLAT})
    assert again.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp-1"}, {"input": 3}, {"input": [{"type": "image"}]},
        {"text": {"format": {"type": "xml"}}}, {"tools": [{"type": "web_search"}]}, {"tools": "a"},
        {"input": [{"role": "user", "content": []}]}, {"background": True},
        {"conversation": "c"},
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_told_in_a_line(client, more):
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**{**ASK, **more})
    assert "\n" not in caught.value.body["message"]

"""OpenAI's newer API, /v1/responses: a chat in other words, for texts and tools."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import PrivateAttr

from decoding.engine.params import Result
from decoding.serving.chats import Chat
from decoding.serving.protocol import Mistake, event

# Fields of a request, and the chat's; those of a chat with the same name and sense stay.
RENAMED = {"max_output_tokens": "max_tokens"}
SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "stream", "seed", "verify", "stop",
    "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "ignore_eos", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "structured_outputs", "store", "metadata", "user", "service_tier", "safety_identifier",
    "prompt_cache_key",
)  # fmt: skip
UNREAD = ("include", "truncation")  # they say nothing about a text
INPUT = "input is a text, or a list of messages, function_call and function_call_output"


def chat_fields(given: Any) -> Any:
    """Return a request's fields as those of a chat; a mistake is a ValueError."""
    if not isinstance(given, dict):
        return given
    given = {key: value for key, value in given.items() if value is not None and key not in UNREAD}
    found = {key: given.pop(key) for key in SAME if key in given}
    found |= {new: given.pop(old) for old, new in RENAMED.items() if old in given}
    if "input" not in given:
        raise Mistake("input is missing", "input")
    asked = given.pop("input")
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else _turns(asked)
    if "instructions" in given:
        turns.insert(0, {"role": "system", "content": given.pop("instructions")})
    found["messages"] = turns
    if "tools" in given:
        found["tools"] = [*map(_tool, _listed(given.pop("tools"), "tools"))]
    choice = found.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        found["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    if "text" in given:
        found["response_format"] = _format(given.pop("text"))
    effort = given.pop("reasoning", {})
    if isinstance(effort, dict) and effort.get("effort") is not None:
        found["reasoning_effort"] = effort["effort"]
    if other := next(iter(given), None):
        raise Mistake(
            f"{other}={json.dumps(given[other])[:60]} is not offered: leave it out", other
        )
    return found


def _listed(value: Any, name: str) -> list[dict]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Mistake(INPUT if name == "input" else f"{name} is a list of objects", name)
    return value


def _turns(items: Any) -> list[dict]:
    """Return the messages of a list of input items; calls after each other are one turn."""
    turns: list[dict] = []
    for item in _listed(items, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            content = item.get("content")
            if isinstance(content, list):
                texts: list[Any] = [part.get("text") for part in _listed(content, "input")]
                if not texts or not all(isinstance(text, str) for text in texts):
                    raise Mistake("a message's content has parts with a text", "input")
                content = "".join(texts)
            turns.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            call = {key: item.get(key) for key in ("name", "arguments")}
            made = {"id": item.get("call_id"), "type": "function", "function": call}
            if turns and "tool_calls" in turns[-1]:
                turns[-1]["tool_calls"].append(made)
            else:
                turns.append({"role": "assistant", "content": None, "tool_calls": [made]})
        elif kind == "function_call_output":
            said = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            turns.append({"role": "tool", **said})
        elif kind != "reasoning":
            raise Mistake(f"input has an item of type {str(kind)[:40]!r}: {INPUT}", "input")
    return turns


def _tool(given: dict) -> dict:
    function = {key: value for key, value in given.items() if key != "type"}
    return {"type": given.get("type"), "function": function}


def _format(given: Any) -> dict:
    kind = given.get("format") if isinstance(given, dict) else None
    if kind is None:
        return {"type": "text"}
    if isinstance(kind, dict) and kind.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": kind}
    return kind


class Responses(Chat):
    """A request to /v1/responses, as a chat."""

    ID: ClassVar[str] = "resp"
    KIND: ClassVar[str] = "response"

    @classmethod
    def fields(cls, given: Any) -> Any:
        return chat_fields(given)

    _count: int = PrivateAttr(0)  # events of the stream so far
    _parts: dict[str, str] = PrivateAttr(default_factory=dict)  # texts of a stream, by kind
    _calls_made: list[dict] = PrivateAttr(default_factory=list)
    _reason: str = PrivateAttr("stop")

    def begin(self, number: int) -> list[str]:
        made = self.response(number, "in_progress", [])
        return [
            self._event(f"response.{kind}", response=made) for kind in ("created", "in_progress")
        ]

    def part(self, number: int, choice: dict) -> list[str]:
        found, delta = [], choice["delta"]
        if text := delta.get("reasoning_content"):
            self._parts["thought"] = self._parts.get("thought", "") + text
        if text := delta.get("content"):
            if "said" not in self._parts:
                item = message_item(number, "", "in_progress")
                at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
                found.append(self._event("response.output_item.added", output_index=0, item=item))
                part = {"type": "output_text", "text": "", "annotations": []}
                found.append(self._event("response.content_part.added", **at, part=part))
            at = {"item_id": f"msg-{number}", "output_index": 0, "content_index": 0}
            self._parts["said"] = self._parts.get("said", "") + text
            found.append(self._event("response.output_text.delta", **at, delta=text, logprobs=[]))
        self._calls_made += delta.get("tool_calls", [])
        self._reason = choice["finish_reason"] or self._reason
        return found

    def end(self, number: int, prompts: Sequence, results: list[Result]) -> list[str]:
        found, said = [], self._parts.get("said")
        items = output_items(number, self._parts.get("thought"), said, self._calls_made)
        if said is not None:
            at = {"item_id": f"msg-{number}", "output_index": 0, "content_index": 0}
            part = {"type": "output_text", "text": said, "annotations": []}
            found.append(self._event("response.output_text.done", **at, text=said, logprobs=[]))
            found.append(self._event("response.content_part.done", **at, part=part))
            item = next(item for item in items if item["type"] == "message")
            found.append(self._event("response.output_item.done", output_index=0, item=item))
        shown = int(said is not None)
        for index, item in enumerate((i for i in items if i["type"] == "function_call"), shown):
            at = {"item_id": item["id"], "output_index": index}
            empty = {**item, "arguments": "", "status": "in_progress"}
            given = item["arguments"]
            found += [
                self._event("response.output_item.added", output_index=index, item=empty),
                self._event("response.function_call_arguments.delta", **at, delta=given),
                self._event(
                    "response.function_call_arguments.done",
                    **at, arguments=given, name=item["name"],
                ),
                self._event("response.output_item.done", output_index=index, item=item),
            ]  # fmt: skip
        made = self.ended(number, prompts, results, items)
        return [*found, self._event(f"response.{made['status']}", response=made)]

    def body(
        self, number: int, prompts: Sequence, results: list[Result], choices: list[str]
    ) -> str:
        (choice,) = map(json.loads, choices)
        message, self._reason = choice["message"], choice["finish_reason"]
        said = message["content"] or None
        thought, calls = message.get("reasoning_content"), message.get("tool_calls", [])
        items = output_items(number, thought, said, calls)
        return json.dumps(self.ended(number, prompts, results, items), ensure_ascii=False)

    def ended(
        self, number: int, prompts: Sequence, results: list[Result], items: list[dict]
    ) -> dict:
        """Return the response of an answer that has ended."""
        cut = self._reason == "length"
        usage = self.usage([*prompts], results)
        made = self.response(number, "incomplete" if cut else "completed", items)
        if cut:
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        made["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "target_passes": usage["target_passes"],
            "acceptance_length": usage["acceptance_length"],
        }
        return made

    def response(self, number: int, status: str, items: list[dict]) -> dict:
        """Return a response object."""
        return {
            "id": f"resp-{number}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": items,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "max_output_tokens": self.most,
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else "required",
            "tools": [],
        }

    def _event(self, kind: str, **content) -> str:
        content = {"type": kind, "sequence_number": self._count, **content}
        self._count += 1
        return f"event: {kind}\n{event(content)}"


def message_item(number: int, text: str, status: str = "completed") -> dict:
    """Return what was said, as an item of a response."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": f"msg-{number}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content if status == "completed" else [],
    }


def output_items(
    number: int, thought: str | None, said: str | None, calls: Sequence[dict]
) -> list[dict]:
    """Return the items of a response: a thought, what was said, and calls."""
    items = []
    if thought:
        content = [{"type": "reasoning_text", "text": thought.strip()}]
        items.append({"id": f"rs-{number}", "type": "reasoning", "summary": [], "content": content})
    if said is not None:
        items.append(message_item(number, said))
    for call in calls:
        items.append(
            {
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "type": "function_call",
                "status": "completed",
                **call["function"],
            }
        )
    return items

"""An assistant's turn, read as it comes: its thought, what it says, and the tools that it calls.

A model spells all three in its text. How it spells calls is known from its chat template; a grammar
(`engine.grammar`) holds it to the tools that a request offers, so a call is never malformed.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.engine.grammar import SPACE

THINK, THOUGHT = "<think>", "</think>"  # around a thought
CALL, CALLED = "<tool_call>", "</tool_call>"  # around calls in Hermes' form
ANY = {"type": "object"}  # the arguments of a tool that names no schema


class Tool(NamedTuple):
    """A function that a model may call: its name and the JSON schema of its arguments."""

    name: str
    schema: dict


class Thought(NamedTuple):
    """Whether a turn may begin with a thought, and whether the prompt has opened it."""

    may_come: bool = False
    opened: bool = False

    def rules(self) -> list[str]:
        """Return what a Lark grammar's `start` begins with, and the rules that this needs."""
        if not self.may_come:
            return [""]
        begin, end = "" if self.opened else THINK, THOUGHT.replace("/", "\\/")
        rules = [f"thought[lazy]: /{begin}(.|\\n)*{end}/", "gap: /\\n*/"]
        return ["thought gap" if self.opened else "(thought gap)?", *rules]


@dataclass(frozen=True)
class Calls:
    """How a model spells its calls.

    Attributes:
        key: Of the arguments, beside the function's `name`.
        begin, end: What stands around a call, CALL and CALLED with what follows and precedes them;
            where they are empty calls are the whole turn (Llama 3).
        between: What stands between two calls.
        listed: Whether calls after each other share one `begin` and `end` (SmolLM2).
    """

    key: str
    begin: str = ""
    end: str = ""
    between: str = "; "
    listed: bool = False

    def grammar(self, tools: Sequence[Tool], needed: bool, several: bool, thought: Thought) -> str:
        """Return the Lark grammar of a turn that may call tools, or must where `needed`.

        `several` allows more than one call. What may be said has room for a thought.
        """
        bodies = []
        for tool in tools:
            properties = {"name": {"const": tool.name}, self.key: tool.schema}
            schema = {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
                # What a schema says beyond what a grammar can is left to the tool.
                "x-guidance": {"whitespace_pattern": SPACE, "lenient": True},
            }
            bodies.append(f"%json {json.dumps(schema)}")
        lines = [f"body: {' | '.join(f'b{i}' for i in range(len(bodies)))}"]
        begin = ""
        if needed:
            begin, *rules = thought.rules()
            lines += rules
        lines += [f"b{i}: {body}" for i, body in enumerate(bodies)]
        between, end = json.dumps(self.between), json.dumps(self.end)
        lines.append(f"bodies: body ({between} body)*")
        if not self.begin:
            lines.append(f"calls: {'bodies' if several else 'body'}")
            lines.append("said: /([^ \\n{](.|\\n)*)?/")
            return "\n".join([*lines, f"start: {begin} calls" + ("" if needed else " | said")])
        inner, again = "body", several
        if self.listed:
            inner, again = "bodies" if several else "body", False
        lines.append(f"inner: {json.dumps(self.begin.removeprefix(CALL))} {inner} {end}")
        lines += [f"opened[lazy]: /(.|\\n)*{CALL}/", "said: /(.|\\n)*/"]
        if needed:
            more = f"({between} call)*" if again else ""
            return "\n".join([*lines, f'call: "{CALL}" inner', f"start: {begin} call {more}"])
        rest = "(opened inner)* said" if again else "opened inner | said"
        return "\n".join([*lines, f"start: {rest}"])

    def read(self, text: str) -> list[tuple[str, str]]:
        """Return the calls in a text, each a name and its arguments as JSON; ValueError if none."""
        found, rest = [], text.strip()
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            for call in value if isinstance(value, list) else [value]:
                if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                    raise ValueError("no call")
                given = call.get(self.key, call.get("arguments", {}))
                found.append((call["name"], json.dumps(given, ensure_ascii=False)))
            rest = rest[end:].lstrip("; \n")
        return found


def calls_of(tokenizer: PreTrainedTokenizerBase, template: str) -> Calls:
    """Return how a model spells calls; ValueError where its template shows no known way."""
    if "tools" in template and CALL in template and "<function=" not in template:
        if CALL in tokenizer.all_special_tokens:
            raise ValueError(f"tools need {CALL} in a model's text, and here it is a special token")
        if f"{CALL}[" in template:
            return Calls("arguments", f"{CALL}[", f"]{CALLED}", ", ", listed=True)
        return Calls("arguments", f"{CALL}\n", f"\n{CALLED}", "\n")
    if "tools" in template and '"parameters"' in template:
        return Calls("parameters")
    raise ValueError(
        "tools are not allowed: this model's chat template has none in a form that is known "
        f"({CALL} with JSON, as of Qwen3, Hermes and SmolLM2, or JSON with 'parameters', as of "
        "Llama 3)"
    )


@dataclass
class Part:
    """New text of a turn, by what it is; calls are names and arguments as JSON."""

    thought: str = ""
    said: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


class Turn:
    """Reads a turn's text piece by piece.

    Args:
        calls: How the model spells calls; None: no tools are offered.
        thought: How it begins.
    """

    def __init__(self, calls: Calls | None, thought: Thought):
        self._calls, self._left = calls, ""
        self._state = "said"
        if thought.may_come:
            self._state = "thought" if thought.opened else "start"
        self.count = 0  # calls so far

    @property
    def called(self) -> bool:
        """Return whether there was a call."""
        return self.count > 0

    def read(self, text: str, last: bool = False) -> Part:
        """Return what a piece of text adds; what may become something else waits for more."""
        self._left += text
        part = Part()
        while self._step(part, last):
            pass
        return part

    def _step(self, part: Part, last: bool) -> bool:
        """Read on to the next change of state; return whether there is one."""
        if self._state == "start":
            begins = self._left.lstrip()
            if begins.startswith(THINK):
                self._state, self._left = "thought", begins[len(THINK) :]
                return True
            if not last and THINK.startswith(begins):
                return False
            self._state = "said"
            return True
        if self._state == "thought":
            part.thought += (found := self._until(THOUGHT, last))[0]
            if found[1]:
                self._state = "between"
            return found[1]
        if self._state == "between":  # white space after a thought
            self._left = self._left.lstrip()
            self._state = "said" if self._left or last else "between"
            return self._state == "said"
        if self._state == "call":
            return self._step_call(part, last)
        if self._calls is None:
            part.said, self._left = part.said + self._left, ""
            return False
        if not self._calls.begin:
            return self._step_whole(part, last)
        said, ended = self._until(CALL, last)
        part.said += said
        if ended:
            self._state = "call"
        return ended

    def _step_call(self, part: Part, last: bool) -> bool:
        body, closed, rest = self._left.partition(CALLED)
        if not closed and not last:
            return False
        self._state, self._left = "said", rest
        self._called(body, CALL + body + closed, part)
        return bool(closed)

    def _step_whole(self, part: Part, last: bool) -> bool:
        """Read a turn that is calls as a whole, or none."""
        if self._left.lstrip()[:1] in ("{", ""):
            if last and self._left:
                text, self._left = self._left, ""
                self._called(text, text, part)
            return False
        part.said, self._left, self._calls = part.said + self._left, "", None
        return False

    def _called(self, body: str, text: str, part: Part) -> None:
        """Read calls; a text that is none is said."""
        assert self._calls is not None
        try:
            found = self._calls.read(body)
        except ValueError:
            part.said += text
        else:
            part.calls += found
            self.count += len(found)

    def _until(self, mark: str, last: bool) -> tuple[str, bool]:
        """Take the text before a mark, and whether it is there; a half mark and space wait."""
        text, found, rest = self._left.partition(mark)
        if found:
            self._left = rest
            return text.rstrip(), True
        if last:
            self._left = ""
            return text, False
        half = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        safe = len(text[: len(text) - half].rstrip())
        self._left = text[safe:]
        return text[:safe], False


def entry(index: int | None, call: tuple[str, str]) -> dict:
    """Return a call as the protocol has it; `index` is its number in a stream."""
    name, given = call
    head: dict[str, Any] = {} if index is None else {"index": index}
    made = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
    return head | made | {"function": {"name": name, "arguments": given}}


def thought_of(template: str, prompt: str) -> Thought:
    """Return how a turn begins after a rendered prompt of a chat template."""
    opened = re.search(rf"{THINK}\s*$", prompt) is not None
    closed = re.search(rf"{THOUGHT}\s*$", prompt) is not None
    return Thought(THOUGHT in template and not closed, opened)


def after_thought(grammar: str, thought: Thought) -> str:
    """Return the grammar of an answer after its thought, if any."""
    if not thought.may_come:
        return grammar
    text = grammar.strip()
    if not text.startswith("{"):
        raise ValueError(
            "this model thinks, and after a thought only JSON schemas are followed: turn its "
            'thoughts off (chat_template_kwargs={"enable_thinking": false}), or give a schema'
        )
    options = {"x-guidance": {"whitespace_pattern": SPACE}}
    begin, *rules = thought.rules()
    body = json.dumps({**json.loads(text), **options})
    return "\n".join([f"start: {begin} body", *rules, f"body: %json {body}"])

"""Chats of OpenAI's protocol: messages, tools and thoughts, and how an answer is read."""

import json
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Field, PrivateAttr, with_config
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from data.text.chat import RESERVED, render_prompt, thought_renamed
from data.text.special import encode
from decoding.engine.detokenize import token_bytes, token_text
from decoding.engine.likelihood import TokenScore
from decoding.serving import turns
from decoding.serving.protocol import Asked, Best, Integer, Mistake, Switch
from decoding.serving.turns import ANY, Calls, Thought, Tool, Turn

MESSAGES = "a list of {role, content}, both texts (content also as parts of type text)"
MOST_TOOLS = 128
EFFORT = "reasoning_effort"


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


@with_config(ConfigDict(extra="allow"))
class Message(TypedDict):
    """A turn of a chat; a template may read further keys."""

    role: str
    content: NotRequired[
        str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] | None
    ]


@with_config(ConfigDict(extra="allow"))
class Function(TypedDict):
    """A function that is offered."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]
    parameters: NotRequired[dict[str, Any] | None]


@with_config(ConfigDict(extra="allow"))
class Offered(TypedDict):
    """A tool of a request."""

    type: Literal["function"]
    function: Function


class Named(TypedDict):
    """The name of a tool."""

    name: str


class Chosen(TypedDict):
    """A tool that must be called."""

    type: Literal["function"]
    function: Named


class Chat(Asked):
    """A request to /v1/chat/completions."""

    ID, KIND, PART, USUAL = "chatcmpl", "chat.completion", "chat.completion.chunk", 256

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True, description=MESSAGES)]
    max_completion_tokens: Integer = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="an object")] = {}
    reasoning_effort: Annotated[str | None, Field(max_length=20, description="a word")] = None
    tools: Annotated[
        list[Offered],
        Field(
            max_length=MOST_TOOLS,
            fail_fast=True,
            description="a list of {type: function, function: {name, description, parameters}}",
        ),
    ] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Chosen,
        Field(description="none, auto, required, or {type: function, function: {name}}"),
    ] = "auto"
    parallel_tool_calls: Switch = True
    logprobs: Switch = False
    top_logprobs: Best = None
    echo: ClassVar[bool] = False
    suffix: ClassVar[None] = None
    _calls: Calls | None = PrivateAttr(None)  # how the model spells those that it may make
    _thought: Thought = PrivateAttr(Thought())  # how an answer begins
    _turns: dict[int, Turn] = PrivateAttr(default_factory=dict)  # of a stream's answers

    @property
    def most(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    @property
    def best(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def count(self) -> int:
        return 1

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the one prompt as the chat template renders it."""
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template: ask /v1/completions")
        if self.top_logprobs is not None and not self.logprobs:
            raise Mistake("top_logprobs is for answers with logprobs=true", "top_logprobs")
        options = {**self.chat_template_kwargs}
        for name in (RESERVED | {"tools"} | tokenizer.special_tokens_map.keys()) & options.keys():
            raise Mistake(
                f"chat_template_kwargs has {name!r}, which is not a client's to set: leave it out",
                "chat_template_kwargs",
            )
        if self.tools and self.tool_choice != "none":
            options["tools"] = self.tools
        template = tokenizer.get_chat_template(tools=options.get("tools"))
        if self.reasoning_effort is not None:
            if EFFORT not in template:
                raise Mistake(
                    f"{EFFORT} is not read by this model's chat template: leave it out", EFFORT
                )
            options[EFFORT] = self.reasoning_effort
        if "tools" in options:
            try:
                self._calls = turns.calls_of(tokenizer, template)
            except ValueError as error:
                raise Mistake(str(error), "tools") from None
        text = render_prompt(tokenizer, [joined(m, template) for m in self.messages], options)
        self._thought = turns.thought_of(template, text)
        return [text]

    def grammar(self) -> str | None:
        """Return the grammar of an answer, after `texts`; None: any text."""
        wanted = super().grammar()
        if self._calls is None:
            if isinstance(self.tool_choice, dict) or self.tool_choice == "required":
                raise Mistake(
                    f"tool_choice={json.dumps(self.tool_choice)[:60]} needs tools", "tool_choice"
                )
            return wanted and turns.after_thought(wanted, self._thought)
        if wanted:
            raise Mistake(
                "response_format and tools exclude each other: leave out one of them",
                "response_format",
            )
        functions = [tool["function"] for tool in self.tools]
        offered = [Tool(f["name"], f.get("parameters") or ANY) for f in functions]
        if isinstance(self.tool_choice, dict):
            name = self.tool_choice["function"]["name"]
            offered = [tool for tool in offered if tool.name == name]
            if not offered:
                raise Mistake(f"tool_choice names {name[:60]!r}, which is no tool", "tool_choice")
        needed, several = self.tool_choice != "auto", self.parallel_tool_calls
        return self._calls.grammar(offered, needed, several, self._thought)

    def encoded(self, text: str | list[int], tokenizer: PreTrainedTokenizerBase) -> str | list[int]:
        assert isinstance(text, str)
        return encode(tokenizer, text)  # the template has written the special tokens

    def said(self, text: str) -> tuple[dict[str, dict], bool]:
        turn = Turn(self._calls, self._thought)
        part = turn.read(text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": part.said}
        if part.calls:
            message["content"] = part.said.strip() or None
            message["tool_calls"] = [turns.entry(None, call) for call in part.calls]
        if part.thought:
            message["reasoning_content"] = part.thought.strip()
        return {"message": message}, turn.called

    def piece(self, index: int, text: str, first: bool, last: bool) -> tuple[dict[str, dict], bool]:
        turn = self._turns.setdefault(index, Turn(self._calls, self._thought))
        before = turn.count
        part = turn.read(text, last)
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if part.thought:
            delta["reasoning_content"] = part.thought
        if part.said or not (part.thought or part.calls):
            delta["content"] = part.said
        if part.calls:
            numbered = enumerate(part.calls, before)
            delta["tool_calls"] = [turns.entry(i, call) for i, call in numbered]
        return {"delta": delta}, turn.called

    def scored(
        self,
        before: list[int],
        ids: list[int],
        scores: list[TokenScore],
        tokenizer: PreTrainedTokenizerBase,
    ) -> dict[str, list]:
        def one(token: int, log_prob: float) -> dict:
            said = [*token_bytes(tokenizer, token)]
            return {"token": token_text(tokenizer, token), "logprob": log_prob, "bytes": said}

        content = [
            one(token, score.log_prob) | {"top_logprobs": [one(*other) for other in score.best]}
            for token, score in zip(ids, scores)
        ]
        return {"content": content}


def joined(message: Message, template: str) -> dict[str, Any]:
    """Return a message as a template reads it: one text, calls with arguments as objects.

    A thought has the name that the template reads.
    """
    content, found = message.get("content"), dict(message)
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = found.get("tool_calls")
    if content is None and not calls:
        raise Mistake(
            f"messages has a turn of {message['role'][:20]!r} without content", "messages"
        )
    if calls:
        if "tool_calls" not in template:
            raise Mistake(
                "messages has tool_calls, which this model's template does not read", "messages"
            )
        found["tool_calls"] = _read_calls(calls)
    return thought_renamed({**found, "content": content or ""}, template)


def _read_calls(calls: Any) -> list[dict]:
    """Return a message's calls with their arguments as objects."""
    try:
        found = []
        for call in calls:
            function = {**call["function"]}
            if isinstance(given := function["arguments"], str):
                function["arguments"] = json.loads(given or "{}")
            found.append({**call, "function": function})
        return found
    except (KeyError, TypeError, ValueError):
        raise Mistake(
            "messages has tool_calls that are no list of {id, type, function: {name, arguments}}, "
            "arguments as a text of JSON",
            "messages",
        ) from None

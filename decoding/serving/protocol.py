"""OpenAI's protocol: the fields of a request, and the format of its answers."""

import json
import re
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from data.text.chat import render_prompt
from data.text.special import encode
from decoding.engine.detokenize import Detokenizer, text_after, token_bytes, token_text
from decoding.engine.likelihood import TokenScore
from decoding.engine.params import Chunk, Result, SamplingParams
from decoding.engine.randomness import fresh_seed

MOST_CHOICES, MOST_STOPS, MOST_BEST = 64, 16, 20
LONGEST_STOP = 1000  # characters
# Lists are checked up to their first mistake: an error for each item would take all memory.
# An error about a field says that its value must be the field's description.
Text = Annotated[str | None, Field(description="a text")]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Integer = Annotated[Int64 | None, Field(description="an integer of 64 bits")]
Number = Annotated[
    Annotated[int | float, Field(ge=-1e30, le=1e30)] | None,
    Field(description="a number of at most 1e30"),
]
Switch = Annotated[bool, Field(description="true or false")]
Best = Annotated[
    int | None, Field(ge=0, le=MOST_BEST, description=f"an integer from 0 to {MOST_BEST}")
]
Choices = Annotated[
    int, Field(ge=1, le=MOST_CHOICES, description=f"an integer from 1 to {MOST_CHOICES}")
]
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Stops = Annotated[
    Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)],
    Field(
        description=f"a text of at most {LONGEST_STOP} characters, or a list of at most "
        f"{MOST_STOPS}"
    ),
]
MESSAGES = "a list of {role, content}, both texts (content also as parts of type text)"
Ids = Annotated[list[Int64], Field(min_length=1, fail_fast=True)]
# Fields of the protocol that are not offered, and the values with which they ask for nothing.
NOT_OFFERED = {
    "best_of": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos", "verify"}


class Part(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


@with_config(ConfigDict(extra="allow"))
class Message(TypedDict):
    """A turn of a chat; a template may read further keys."""

    role: str
    content: str | Annotated[list[Part], Field(min_length=1, fail_fast=True)]


class Asked(BaseModel):
    """A request with the fields of both routes; `Completion` and `Chat` write their own answers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ID: ClassVar[str]
    KIND: ClassVar[str]
    PART: ClassVar[str]
    ROOM: ClassVar[int]  # tokens of an answer, where a request does not say

    model: Annotated[str, Field(description="a text")] = ""
    max_tokens: Integer = None
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    repetition_penalty: Number = None
    stop: Stops = []
    seed: Annotated[Int64, Field(description="an integer of 64 bits")] = Field(
        default_factory=fresh_seed
    )
    n: Choices = 1
    stream: Switch = False
    stream_options: Annotated[dict, Field(description="an object")] = {}
    ignore_eos: Switch = False
    verify: Text = None
    user: Text = None

    if TYPE_CHECKING:  # fields of `Completion`, constants of `Chat`

        @property
        def echo(self) -> bool: ...

        @property
        def suffix(self) -> str | None: ...

    @property
    @abstractmethod
    def best(self) -> int | None:
        """Return how many tokens with their scores come at each position; None: no scores."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Return the number of prompts."""

    @abstractmethod
    def texts(self, tokenizer: PreTrainedTokenizerBase) -> Sequence[str | list[int]]:
        """Return the prompts, as texts or token ids."""

    def encoded(self, text: str | list[int], tokenizer: PreTrainedTokenizerBase) -> str | list[int]:
        """Return one of the texts as a sampler encodes it."""
        return text

    @abstractmethod
    def said(self, text: str, part: bool = False) -> dict[str, Any]:
        """Return the fields of a text."""

    @abstractmethod
    def scored(
        self, before: list[int], ids: list[int], scores: list, tokenizer: PreTrainedTokenizerBase
    ) -> dict:
        """Return the tokens after `before` with their scores; a text's first may have none."""

    @property
    def room(self) -> int:
        """Return the most tokens of an answer."""
        return self.ROOM if self.max_tokens is None else self.max_tokens

    @cached_property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of all answers."""
        given = self.model_dump(include=SAMPLING, exclude_none=True)
        given["top_k"] = max(0, given.get("top_k", 0))  # -1 is vLLM's word for off
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(max_new_tokens=self.room, stop=tuple(stop), **given)

    def head(self, number: int, part: bool) -> dict:
        """Return the first fields of every answer; `part`: of a stream."""
        kind = self.PART if part else self.KIND
        head = {"id": f"{self.ID}-{number}", "object": kind, "created": int(time.time())}
        return head | {"model": self.model}

    def answer_scores(
        self,
        prompt: list[int],
        result: Result,
        scores: list[TokenScore] | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> dict | None:
        """Return the field `logprobs`; `scores` are of all tokens but the prompt's first."""
        if scores is None:
            return None
        start = 0 if self.echo else len(prompt)
        ids, all_scores = prompt + result.token_ids, [None, *scores]
        return self.scored(ids[:start], ids[start:], all_scores[start:], tokenizer)

    def choice(self, index: int, prompt: Any, result: Result, scores, tokenizer) -> dict[str, Any]:
        """Return an answer as it is sent whole; arguments as of `answer_scores`."""
        text = result.text
        if self.suffix:  # the result's text is the whole one
            text = text_after(tokenizer, prompt.before, result.token_ids)
        if self.echo:
            given = self.texts(tokenizer)[index // self.n]
            text = (given if isinstance(given, str) else text_after(tokenizer, (), given)) + text
        found = self.answer_scores(prompt, result, scores, tokenizer)
        reason = finish(result.finish_reason)
        return {"index": index, **self.said(text), "logprobs": found, "finish_reason": reason}

    def delta(
        self, index: int, chunk: Chunk, accepted: list[list[int]] | None, scores: dict | None
    ) -> dict[str, Any]:
        """Return a piece of an answer; the number of its tokens and its drafts are our own fields.

        `accepted` are its accepted drafts, None for a model of masked tokens. The last piece has
        the `scores` of the whole answer.
        """
        reason = None if chunk.result is None else finish(chunk.result.finish_reason)
        ours = {"tokens": len(chunk.token_ids), "accepted": accepted}
        said = self.said(chunk.text, part=True)
        return {"index": index, **said, "logprobs": scores, "finish_reason": reason, **ours}

    def usage(self, prompts: list[list[int]], results: list[Result]) -> dict:
        """Return the answers' cost; target passes and acceptance length are our own fields."""
        prompt = sum(map(len, prompts[:: self.n]))
        tokens = sum(len(r.token_ids) for r in results)
        passes = sum(len(r.stats.emitted) for r in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "target_passes": passes,
            "acceptance_length": round(tokens / max(1, passes), 3),
        }


class Completion(Asked):
    """A request to /v1/completions."""

    ID, KIND, PART, ROOM = "cmpl", "text_completion", "text_completion", 16

    prompt: Annotated[
        str | Ids | Annotated[list[str | Ids], Field(min_length=1, fail_fast=True)],
        Field(description="a text, token ids, or a list of these"),
    ]
    suffix: Text = None
    logprobs: Best = None
    echo: Switch = False

    @property
    def best(self) -> int | None:
        return self.logprobs

    @property
    def count(self) -> int:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return 1 if one else len(self.prompt)

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str | list[int]]:
        if self.stream and self.echo:
            raise ValueError("a stream has no echo: leave out one of them")
        if self.stream and self.suffix:
            raise ValueError("what stands before a suffix comes whole: leave out stream")
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # no list of lists
        return self.prompt  # type: ignore[return-value]  # a list of prompts

    def said(self, text: str, part: bool = False) -> dict[str, str]:
        return {"text": text}

    def scored(
        self,
        before: list[int],
        ids: list[int],
        scores: list[TokenScore | None],
        tokenizer: PreTrainedTokenizerBase,
    ) -> dict[str, list]:
        words, offsets = [token_text(tokenizer, i) for i in ids], []
        text = Detokenizer(tokenizer, before)
        for i in ids:
            offsets.append(len(text.text))
            text.extend([i])
        best = [
            # The token itself is always there; of two that read alike the first is the best.
            s and {word: s.log_prob} | {token_text(tokenizer, i): p for i, p in s.best[::-1]}
            for word, s in zip(words, scores)
        ]
        own = [s and s.log_prob for s in scores]
        found: dict[str, list] = {"tokens": words, "token_logprobs": own}
        return found | {"top_logprobs": best, "text_offset": offsets}


class Chat(Asked):
    """A request to /v1/chat/completions."""

    ID, KIND, PART, ROOM = "chatcmpl", "chat.completion", "chat.completion.chunk", 256

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True, description=MESSAGES)]
    max_completion_tokens: Integer = None
    logprobs: Switch = False
    top_logprobs: Best = None
    echo: ClassVar[bool] = False
    suffix: ClassVar[None] = None

    @property
    def room(self) -> int:
        given = self.max_completion_tokens
        return super().room if given is None else given

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
            raise ValueError("top_logprobs is for answers with logprobs=true")
        return [render_prompt(tokenizer, [joined(message) for message in self.messages])]

    def encoded(self, text: str | list[int], tokenizer: PreTrainedTokenizerBase) -> str | list[int]:
        assert isinstance(text, str)
        return encode(tokenizer, text)  # the template has written the special tokens

    def said(self, text: str, part: bool = False) -> dict[str, dict]:
        if part:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text}}

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


def joined(message: Message) -> dict[str, str]:
    """Return a message with its parts, if any, joined into one text."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}  # type: ignore[dict-item]  # all are texts now


def read(body: bytes | bytearray, kind: type[Asked], models: list[str]) -> Asked:
    """Return a body's request, for the first model if it names none; a mistake is a ValueError."""
    try:
        text = body.decode()
        given = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text and SURROGATE.search(text):  # alone it is JSON, and no text
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ValueError(f"the body is no JSON: {str(error)[:200]}") from error
    return _checked(given, kind, models)


def _checked(given: Any, kind: type[Asked], models: list[str]) -> Asked:
    if not isinstance(given, dict):
        raise ValueError(f"the body is no object but a {type(given).__name__}")
    for key in NOT_OFFERED.keys() & given.keys():
        value = given.pop(key)
        if isinstance(value, bool) or value not in NOT_OFFERED[key]:  # false is no 0
            raise ValueError(f"{key}={json.dumps(value)[:60]} is not offered: leave {key} out")
    fields = kind.model_fields
    given = {key: x for key, x in given.items() if x is not None or key not in fields}
    if unknown := next((key for key in given if key not in fields), None):
        known = ", ".join(sorted(fields))
        raise ValueError(f"unknown field {unknown[:60]!r}. Known are {known}")
    try:
        asked = kind.model_validate(given)
    except ValidationError as error:
        key = str(error.errors(include_url=False, include_input=False)[0]["loc"][0])
        if key not in given:
            raise ValueError(f"{key} is missing") from error
        value, words = json.dumps(given[key])[:60], fields[key].description
        raise ValueError(f"{key}={value} is not allowed: it must be {words}") from error
    asked.model = asked.model or models[0]
    if asked.model not in models:
        raise ValueError(f"unknown model {asked.model[:100]!r}. Served are {', '.join(models)}")
    return asked


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not finite")


def finish(reason: str) -> str:
    """Return the protocol's word for why an answer ended."""
    return "length" if reason == "length" else "stop"


def failure(message: str, kind: str, code: int) -> dict:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

"""OpenAI's protocol: the fields of a request, and the format of its answers."""

import json
import re
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)
from transformers import PreTrainedTokenizerBase

from decoding.engine.detokenize import Detokenizer, text_after, token_text
from decoding.engine.likelihood import TokenScore
from decoding.engine.params import Chunk, Result, SamplingParams
from decoding.engine.randomness import fresh_seed
from decoding.serving import structured
from decoding.serving.accepted import Accepted

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
Biases = Annotated[
    dict[str, Annotated[int | float, Field(ge=-100, le=100)]],
    Field(max_length=1024, description="an object {token id: a number from -100 to 100}"),
]
Ids = Annotated[list[Int64], Field(min_length=1, fail_fast=True)]
# Fields that are not offered, and the values with which they ask for nothing: OpenAI's, and then
# those of vLLM and llama.cpp that front ends send. Null is such a value of every field.
NOT_OFFERED: dict[str, tuple] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "prompt_logprobs": (),
    "return_token_strs": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "tfs_z": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
# Fields that say nothing about an answer, whatever they hold.
UNREAD = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "user",
)  # fmt: skip
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "ignore_eos", "verify",
}  # fmt: skip
# Fields of a chat alone; elsewhere they may ask for nothing.
OF_CHATS: dict[str, tuple] = {
    "reasoning_effort": (),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


class Mistake(ValueError):
    """A client's mistake in one field, `param`."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


class UnknownModel(Mistake):
    """A request for a model that is not served."""


class Asked(BaseModel):
    """A request with the fields of both routes; `Completion` and `Chat` write their own answers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ID: ClassVar[str]
    KIND: ClassVar[str]
    PART: ClassVar[str]
    USUAL: ClassVar[int]  # tokens of an answer at the most, where a request does not say

    model: Annotated[str, Field(description="a text")] = ""
    max_tokens: Integer = None
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    repetition_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: Biases = {}
    min_tokens: Integer = None
    response_format: Annotated[dict, Field(description="an object with a type")] = {}
    structured_outputs: Annotated[dict, Field(description="an object")] = {}
    stop: Stops = []
    seed: Annotated[Int64, Field(description="an integer of 64 bits")] = Field(
        default_factory=fresh_seed
    )
    n: Choices = 1
    stream: Switch = False
    stream_options: Annotated[dict, Field(description="an object")] = {}
    ignore_eos: Switch = False
    verify: Text = None
    _defaults: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    if TYPE_CHECKING:  # fields of `Completion`, constants of `Chat`

        @property
        def echo(self) -> bool: ...

        @property
        def suffix(self) -> str | None: ...

    @classmethod
    def fields(cls, given: Any) -> Any:
        """Return the fields of a body's request, by their names here."""
        return given

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
    def said(self, text: str) -> tuple[dict[str, Any], bool]:
        """Return the fields of a whole text, and whether it calls tools."""

    @abstractmethod
    def piece(self, index: int, text: str, first: bool, last: bool) -> tuple[dict[str, Any], bool]:
        """Return the fields of a piece of a stream, and whether its answer has called tools.

        `index` is its answer's, of which it is the `first` piece or the `last`.
        """

    @abstractmethod
    def scored(
        self, before: list[int], ids: list[int], scores: list, tokenizer: PreTrainedTokenizerBase
    ) -> dict:
        """Return the tokens after `before` with their scores; a text's first may have none."""

    @property
    def most(self) -> int | None:
        """Return the most tokens of an answer; None: `USUAL`, or the room that there is."""
        return self.max_tokens

    @property
    def answers(self) -> bool:
        """Return whether anything is decoded, and not the prompt alone echoed and scored."""
        return not (self.echo and self.most == 0)

    @cached_property
    def created(self) -> int:
        """Return the time of the request, in seconds since 1970."""
        return int(time.time())

    @cached_property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of all answers."""
        given = {**self._defaults, **self.model_dump(include=SAMPLING, exclude_none=True)}
        given["top_k"] = max(0, given.get("top_k", 0))  # -1 is vLLM's word for off
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.logit_bias:
            given["logit_bias"] = tuple((_token(key), x) for key, x in self.logit_bias.items())
        given["grammar"] = self.grammar()
        most = self.most if self.answers else None
        return SamplingParams(max_new_tokens=most, stop=tuple(stop), **given)

    def grammar(self) -> str | None:
        """Return the grammar of an answer; None: any text."""
        return structured.wanted(self.response_format, self.structured_outputs)

    def head(self, number: int, part: bool) -> dict:
        """Return the first fields of every answer; `part`: of a stream."""
        kind = self.PART if part else self.KIND
        head = {"id": f"{self.ID}-{number}", "object": kind, "created": self.created}
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
        said, called = self.said(text)
        reason = finish(result.finish_reason, called)
        return {"index": index, **said, "logprobs": found, "finish_reason": reason}

    def delta(
        self,
        index: int,
        chunk: Chunk,
        accepted: Accepted | None,
        scores: dict | None,
        first: bool,
    ) -> dict[str, Any]:
        """Return a piece of an answer; the number of its tokens and its drafts are our own fields.

        `accepted` are its accepted drafts, None for a model of masked tokens; a piece that is not
        one text has no accepted parts. The last piece has the `scores` of the whole answer; `first`
        is its answer's first.
        """
        last = chunk.result is not None
        said, called = self.piece(index, chunk.text, first, last)
        reason = None if chunk.result is None else finish(chunk.result.finish_reason, called)
        parts, counts = accepted or (None, None)
        if parts and chunk.text not in (said.get("text"), said.get("delta", {}).get("content")):
            parts = []  # its text is told in parts: a thought, calls
        ours = {"tokens": len(chunk.token_ids), "accepted": parts, "accepted_per_pass": counts}
        return {"index": index, **said, "logprobs": scores, "finish_reason": reason, **ours}

    def begin(self, number: int) -> list[str]:
        """Return the events with which a stream begins."""
        return []

    def part(self, number: int, choice: dict) -> list[str]:
        """Return the events of a piece of an answer (`delta`)."""
        return [event(self.head(number, part=True) | {"choices": [choice]})]

    def end(self, number: int, prompts: Sequence, results: list[Result]) -> list[str]:
        """Return the events with which a stream ends."""
        found = ["data: [DONE]\n\n"]
        if self.stream_options.get("include_usage"):
            usage = {"choices": [], "usage": self.usage([*prompts], results)}
            found.insert(0, event(self.head(number, part=True) | usage))
        return found

    def body(
        self, number: int, prompts: Sequence, results: list[Result], choices: list[str]
    ) -> str:
        """Return the answers as one body; `choices` are JSON (`choice`)."""
        head = self.head(number, part=False) | {"usage": self.usage([*prompts], results)}
        return f'{json.dumps(head)[:-1]}, "choices": [{", ".join(choices)}]}}'

    def usage(self, prompts: list[list[int]], results: list[Result]) -> dict:
        """Return the answers' cost; target passes and acceptance length are our own fields."""
        prompt = sum(map(len, prompts[:: self.n]))
        tokens = sum(len(r.token_ids) for r in results)
        passes = sum(len(r.stats.emitted) for r in results)
        reused = sum(r.stats.reused for r in results[:: self.n])
        return {
            "prompt_tokens": prompt,
            "prompt_tokens_details": {"cached_tokens": reused},
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "target_passes": passes,
            "acceptance_length": round(tokens / max(1, passes), 3),
        }


class Completion(Asked):
    """A request to /v1/completions."""

    ID, KIND, PART, USUAL = "cmpl", "text_completion", "text_completion", 16

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

    def said(self, text: str) -> tuple[dict[str, str], bool]:
        return {"text": text}, False

    def piece(self, index: int, text: str, first: bool, last: bool) -> tuple[dict[str, str], bool]:
        return self.said(text)

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


class Detokenize(BaseModel):
    """A request to /detokenize."""

    @classmethod
    def fields(cls, given: Any) -> Any:
        """Return the fields of a body's request."""
        return given

    model_config = Asked.model_config

    model: Annotated[str, Field(description="a text")] = ""
    tokens: Annotated[list[Int64], Field(fail_fast=True, description="a list of token ids")]


Kind = TypeVar("Kind", Asked, Detokenize)


def read(
    body: bytes | bytearray,
    kind: type[Kind],
    models: list[str],
    defaults: Mapping[str, Any] | None = None,
) -> Kind:
    """Return a body's request, for the first model if it names none; a mistake is a ValueError.

    `defaults` are the sampling parameters that it has where it names none.
    """
    asked = _checked(kind.fields(parsed(body)), kind, models)
    if isinstance(asked, Asked):
        asked._defaults = defaults or {}
    return asked


def parsed(body: bytes | bytearray) -> Any:
    """Return what a body's JSON says; ValueError for one that is none."""
    try:
        text = body.decode()
        given = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text and SURROGATE.search(text):  # alone it is JSON, and no text
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ValueError(f"the body is no JSON: {str(error)[:200]}") from error
    return given


def _token(key: str) -> int:
    """Return the token that a key of `logit_bias` names."""
    if not key.isdecimal() or len(key) > 9:
        raise Mistake(f"logit_bias has the key {key[:60]!r}, which is no token id", "logit_bias")
    return int(key)


def _checked(given: Any, kind: type[Kind], models: list[str]) -> Kind:
    if not isinstance(given, dict):
        raise ValueError(f"the body is no object but a {type(given).__name__}")
    fields = kind.model_fields
    given = {key: x for key, x in given.items() if x is not None and key not in UNREAD}
    neutral = NOT_OFFERED | OF_CHATS
    for key in (neutral.keys() & given.keys()) - fields.keys():
        value = given.pop(key)
        # In Python false is 0.
        if not any(value == x and (type(value) is bool) == (type(x) is bool) for x in neutral[key]):
            raise Mistake(f"{key}={json.dumps(value)[:60]} is not offered: leave {key} out", key)
    if unknown := next((key for key in given if key not in fields), None):
        near = get_close_matches(unknown, fields, 1)
        hint = f". Did you mean {near[0]!r}?" if near else ": leave it out"
        raise Mistake(f"unknown field {unknown[:60]!r}{hint}", unknown[:60])
    try:
        asked = kind.model_validate(given)
    except ValidationError as error:
        key = str(error.errors(include_url=False, include_input=False)[0]["loc"][0])
        if key not in given:
            raise Mistake(f"{key} is missing", key) from error
        value, words = json.dumps(given[key])[:60], fields[key].description
        raise Mistake(f"{key}={value} is not allowed: it must be {words}", key) from error
    asked.model = asked.model or models[0]
    check_model(asked.model, models)
    return asked


def check_model(model: str, models: Sequence[str]) -> None:
    """Raise UnknownModel for one that is not among those that are served."""
    if model not in models:
        served = ", ".join(models)
        raise UnknownModel(f"unknown model {model[:100]!r}. Served are {served}", "model")


def param_of(error: Exception, kind: type[Asked]) -> str | None:
    """Return the field of a request that an error is about, where it says which."""
    if isinstance(error, Mistake):
        return error.param
    message = str(error).replace("max_new_tokens", "max_tokens")
    named = (word for word in re.findall(r"\b(\w+)=", message) if word in kind.model_fields)
    prompt = "prompt" if kind is Completion else "messages"
    if message.startswith("the grammar"):
        return "response_format"
    return next(named, prompt if message.startswith("the prompt") else None)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not finite")


def finish(reason: str, called: bool) -> str:
    """Return the protocol's word for why an answer ended, which may have `called` tools."""
    return "length" if reason == "length" else "tool_calls" if called else "stop"


def event(content: dict) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def failure(message: str, kind: str, code: int | str, param: str | None = None) -> dict:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

"""OpenAI's protocol: what a request may say, and how answers are written."""

import json
import math
import time
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.text.chat import encode_prompt
from decoding.engine.detokenize import Detokenizer
from decoding.engine.likelihood import TokenScore
from decoding.engine.params import Chunk, Result, SamplingParams
from decoding.engine.randomness import fresh_seed, request_seeds

MOST_CHOICES, MOST_STOPS, MOST_BEST = 64, 16, 20


def _is(kind: type | tuple[type, ...]):
    """Whether a value is of a type; true and false are no numbers."""
    return lambda x: isinstance(x, kind) and (kind is bool or not isinstance(x, bool))


def _best(x: Any) -> bool:
    return _is(int)(x) and 0 <= x <= MOST_BEST


def _texts(x: Any) -> bool:
    some = [x] if isinstance(x, str) else x
    return (
        isinstance(some, list) and len(some) <= MOST_STOPS and all(isinstance(s, str) for s in some)
    )


def _ids(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(map(_is(int), x))


def _prompts(x: Any) -> bool:
    if isinstance(x, str):
        return True
    if not isinstance(x, list) or not x:
        return False
    return _ids(x) or all(isinstance(p, str) or _ids(p) for p in x)


def _messages(x: Any) -> bool:
    return (
        bool(x)
        and isinstance(x, list)
        and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and (isinstance(m.get("content"), str) or _parts(m.get("content")))
            for m in x
        )
    )


def _parts(x: Any) -> bool:
    return (
        isinstance(x, list)
        and bool(x)
        and all(
            isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
            for p in x
        )
    )


def _joined(message: dict) -> dict:
    """A message whose content is one text, where it came in parts."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


NUMBER = (int, float)
# Of every field that has a meaning here: what it must be, in words and as a check.
COMMON = {
    "model": ("a text", _is(str)),
    "max_tokens": ("an integer", _is(int)),
    "temperature": ("a number", _is(NUMBER)),
    "top_p": ("a number", _is(NUMBER)),
    "top_k": ("an integer", _is(int)),
    "min_p": ("a number", _is(NUMBER)),
    "repetition_penalty": ("a number", _is(NUMBER)),
    "stop": (f"a text, or a list of at most {MOST_STOPS}", _texts),
    "seed": ("an integer", _is(int)),
    "n": (f"an integer from 1 to {MOST_CHOICES}", lambda x: _is(int)(x) and 1 <= x <= MOST_CHOICES),
    "stream": ("true or false", _is(bool)),
    "stream_options": ("an object", _is(dict)),
    "ignore_eos": ("true or false", _is(bool)),
    "verify": ("a text", _is(str)),
    "user": ("a text", _is(str)),
}
COMPLETION = {
    **COMMON,
    "prompt": ("a text, token ids, or a list of these", _prompts),
    "suffix": ("a text", _is(str)),
    "logprobs": (f"an integer from 0 to {MOST_BEST}", _best),
    "echo": ("true or false", _is(bool)),
}
CHAT = {
    **COMMON,
    "messages": (
        "a list of {role, content}, both texts (content also as parts of type text)",
        _messages,
    ),
    "max_completion_tokens": ("an integer", _is(int)),
    "logprobs": ("true or false", _is(bool)),
    "top_logprobs": (f"an integer from 0 to {MOST_BEST}", _best),
}
# Fields of the protocol that are not there, and the values with which they ask for nothing.
NOT_THERE = {
    "best_of": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}


@dataclass
class Asked:
    """What a request asks for.

    Attributes:
        model: The name of the model.
        prompts: Texts or token ids, one for each answer; n of each prompt, one after the other.
        n: Answers to each prompt.
        seeds: One for each answer.
        params: Of all answers.
        stream: Whether answers are sent as they come.
        usage: Whether the last event of a stream has the usage.
        chat: Whether it is a chat.
        echo: Whether the prompt comes before its answer.
        suffix: What comes after the answer; None: nothing.
        best: How many of the most probable tokens come with each token's log probability; None:
            no log probabilities.
    """

    model: str
    prompts: list[str | list[int]]
    n: int
    seeds: list[int]
    params: SamplingParams
    stream: bool
    usage: bool
    chat: bool
    echo: bool
    suffix: str | None
    best: int | None


def read(body: bytes) -> dict:
    """The object that a request's body holds.

    Raises:
        ValueError: It is no object in JSON; one line.
    """
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False).encode()  # a lone surrogate is JSON, and no text
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ValueError(f"the body is no JSON: {str(error)[:200]}") from error
    if not isinstance(asked, dict):
        raise ValueError(f"the body is no object but a {type(asked).__name__}")
    return asked


def check(asked: dict, fields: dict) -> dict:
    """A request's fields, without those that are null.

    Raises:
        ValueError: A field is not of its type, or is not offered; one line that names it.
    """
    found = {}
    for key, value in asked.items():
        if key in NOT_THERE:
            # false is no 0: `logprobs: 0` asks for something
            same = (
                value == x and isinstance(value, bool) == isinstance(x, bool)
                for x in NOT_THERE[key]
            )
            if not any(same):
                raise ValueError(f"{key}={json.dumps(value)[:60]} is not offered: leave {key} out")
            continue
        if key not in fields:
            raise ValueError(f"unknown field {key[:60]!r}. Known are {', '.join(sorted(fields))}")
        words, fits = fields[key]
        if value is None:
            continue
        if not fits(value):
            raise ValueError(f"{key}={json.dumps(value)[:60]} is not allowed: it must be {words}")
        found[key] = value
    return found


def asked(body: bytes, chat: bool, tokenizer: PreTrainedTokenizerBase, models: list[str]) -> Asked:
    """What the body of a request asks for.

    Args:
        body: As it came.
        chat: Whether it was sent to /v1/chat/completions.
        tokenizer: The models' own.
        models: The names of those that are served; the first where none is named.

    Raises:
        ValueError: The body, a field or its value is wrong; one line.
    """
    fields = check(read(body), CHAT if chat else COMPLETION)
    name = fields.get("model", models[0])
    if name not in models:
        raise ValueError(f"unknown model {name[:100]!r}. Served are {', '.join(models)}")
    if chat:
        if "messages" not in fields:
            raise ValueError("messages is missing")
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template: ask /v1/completions")
        prompts = [encode_prompt(tokenizer, [_joined(m) for m in fields["messages"]])]
    else:
        if "prompt" not in fields:
            raise ValueError("prompt is missing")
        prompts = listed(fields["prompt"])
    best = fields.get("logprobs")
    if chat:
        if fields.get("top_logprobs") is not None and not best:
            raise ValueError("top_logprobs is for answers with logprobs=true")
        best = fields.get("top_logprobs", 0) if best else None
    stream, echo = fields.get("stream", False), fields.get("echo", False)
    if stream and echo:
        raise ValueError("a stream has no echo: leave out one of them")
    most = fields.get("max_completion_tokens", fields.get("max_tokens"))
    stop = fields.get("stop", ())
    room = 16 if most is None and not chat else 256 if most is None else most
    suffix = fields.get("suffix") or None
    if stream and suffix:
        raise ValueError("what stands before a suffix comes whole: leave out stream")
    given = {
        key: fields[key]
        for key in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "ignore_eos",
            "verify",
        )
        if key in fields
    }
    if any(isinstance(x, float) and not math.isfinite(x) for x in given.values()):
        raise ValueError("a number is not finite")
    given["top_k"] = max(0, given.get("top_k", 0))  # -1 is vLLM's word for off
    params = SamplingParams(
        max_new_tokens=room,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        **given,
    )
    n = fields.get("n", 1)
    seed = fields.get("seed", fresh_seed())
    prompts = [p for p in prompts for _ in range(n)]
    return Asked(
        model=name,
        prompts=prompts,
        n=n,
        seeds=request_seeds(seed, len(prompts)),
        params=params,
        stream=stream,
        usage=bool(fields.get("stream_options", {}).get("include_usage")),
        chat=chat,
        echo=echo,
        suffix=suffix,
        best=best,
    )


def listed(prompt: str | list) -> list[str | list[int]]:
    """The prompts of a completion's field `prompt`: one, or a list of them."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt


def head(asked: Asked, number: int, part: bool) -> dict:
    """What every answer begins with; part: of a stream."""
    kind = ("chat.completion" + (".chunk" if part else "")) if asked.chat else "text_completion"
    prefix = "chatcmpl" if asked.chat else "cmpl"
    return {
        "id": f"{prefix}-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
    }


def choice(
    asked: Asked,
    index: int,
    prompt: list[int],
    result: Result,
    scores: list[TokenScore] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> dict:
    """A whole answer.

    Args:
        asked: What was asked for.
        index: The answer's number.
        prompt: Token ids.
        result: The answer.
        scores: Of all tokens of prompt and answer but the first; None where none are wanted.
        tokenizer: The models' own.
    """
    before, text = "", result.text
    if asked.suffix is not None:  # the result's text is the whole one
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True)
    if asked.echo:
        given = asked.prompts[index]
        before = given if isinstance(given, str) else tokenizer.decode(given)
    found = logprobs(asked, prompt, result, scores, tokenizer)
    if asked.chat:
        said = {"message": {"role": "assistant", "content": text}}
    else:
        said = {"text": before + text}
    reason = finish(result.finish_reason)
    return {"index": index, **said, "logprobs": found, "finish_reason": reason}


def logprobs(
    asked: Asked,
    prompt: list[int],
    result: Result,
    scores: list[TokenScore] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> dict | None:
    """The field `logprobs` of an answer; see `choice`."""
    if scores is None:
        return None
    ids, scores = prompt + result.token_ids, [None, *scores]
    shown = slice(0 if asked.echo else len(prompt), None)
    as_asked = chat_scores if asked.chat else text_scores
    return as_asked(ids[shown], scores[shown], tokenizer)


def text_scores(
    ids: list[int], scores: list[TokenScore | None], tokenizer: PreTrainedTokenizerBase
) -> dict:
    """The field `logprobs` of a completion; the first token of a text has no score."""
    words, text, offsets = [tokenizer.decode([i]) for i in ids], Detokenizer(tokenizer), []
    for i in ids:
        offsets.append(len(text.text))
        text.extend([i])
    best = [
        # The token itself is always among them; of two that read alike the first is the best.
        score and {word: score.log_prob} | {tokenizer.decode([i]): p for i, p in score.best[::-1]}
        for word, score in zip(words, scores)
    ]
    own = [score and score.log_prob for score in scores]
    return {"tokens": words, "token_logprobs": own, "top_logprobs": best, "text_offset": offsets}


def chat_scores(
    ids: list[int], scores: list[TokenScore], tokenizer: PreTrainedTokenizerBase
) -> dict:
    """The field `logprobs` of a chat's answer."""

    def one(token: int, log_prob: float) -> dict:
        word = tokenizer.decode([token])
        return {"token": word, "logprob": log_prob, "bytes": [*word.encode()]}

    content = [
        one(token, score.log_prob) | {"top_logprobs": [one(*other) for other in score.best]}
        for token, score in zip(ids, scores)
    ]
    return {"content": content}


def delta(
    asked: Asked, index: int, chunk: Chunk, accepted: list[list[int]] | None, scores: dict | None
) -> dict:
    """A piece of an answer; how many tokens it has and which of its text was drafted are ours.

    The last piece has the `logprobs` of the whole answer, which are computed when it has ended.

    Args:
        asked: What was asked for.
        index: The answer's number.
        chunk: The piece.
        accepted: Its accepted drafts (`AcceptedText`); None of a model that predicts masked tokens.
        scores: The field `logprobs`.
    """
    said = {"delta": {"content": chunk.text}} if asked.chat else {"text": chunk.text}
    reason = None if chunk.result is None else finish(chunk.result.finish_reason)
    ours = {"tokens": len(chunk.token_ids), "accepted": accepted}
    return {"index": index, **said, "logprobs": scores, "finish_reason": reason, **ours}


def finish(reason: str) -> str:
    """The protocol's word for why an answer ended."""
    return "length" if reason == "length" else "stop"


def usage(asked: Asked, prompts: list[list[int]], results: list[Result]) -> dict:
    """What answers cost; target passes and acceptance length are ours."""
    prompt = sum(map(len, prompts[:: asked.n]))
    tokens = sum(len(r.token_ids) for r in results)
    passes = sum(len(r.stats.emitted) for r in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "target_passes": passes,
        "acceptance_length": round(tokens / max(1, passes), 3),
    }


def failure(message: str, kind: str, code: int) -> dict:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

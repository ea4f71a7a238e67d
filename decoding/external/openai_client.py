"""A client of any OpenAI-compatible server (vLLM, SGLang, others), spoken with in token ids.

Requests go to `/v1/completions` with the prompt as token ids, which these servers take. Where a
server returns the ids of what it generated (vLLM, with `return_token_ids`), these are used, and
must be the returned text. Where it returns text only, the text is tokenised again, and the answer
is left out if other than as many tokens come out as the server counted: it was written otherwise.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath

from transformers import PreTrainedTokenizerBase

from decoding.engine.params import SamplingParams
from decoding.external.reply import Reply, first_line, request_options

TOKEN = "token_id:"  # how a server that is asked for it writes a token that has a log-probability


class OpenAIClient:
    """A client of one model on an OpenAI-compatible server.

    Args:
        url: Of the server's API, such as http://localhost:8000/v1. The key is OPENAI_API_KEY.
        tokenizer: The model's.
        model: Its name on the server; None: the only one that it serves.
        target: The model whose answers are wanted, a path or Hub id. Without `model`, what is
            served must have its name (its last part); None: any name.
        concurrency: Requests that are under way at once, at the most.
        retries: How often a request is sent again after an answer that says the server is not well
            (408, 409, 429, 5xx), a cut one or none; the waits grow from half a second to eight.
        timeout: Seconds that one request may take.

    Raises:
        ValueError: The server is not there, refuses the key, or serves other models.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        model: str | None = None,
        target: str | None = None,
        concurrency: int = 16,
        retries: int = 5,
        timeout: float = 600,
    ):
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise ValueError(
                f"concurrency={concurrency}, retries={retries} and timeout={timeout} are not "
                "allowed: at least 1, at least 0, and above 0"
            )
        self.url, self.tokenizer = url, tokenizer
        self.concurrency, self.retries = concurrency, retries
        self._options = {
            "base_url": url,
            "api_key": os.environ.get("OPENAI_API_KEY") or "none",
            "max_retries": retries,
            "timeout": timeout,
        }
        served = asyncio.run(self._served())
        if model is None and len(served) != 1:
            raise ValueError(
                f"{url} serves {[*served]}: name one, collector.options={{model: ...}}"
            )
        if model is not None and model not in served:
            raise ValueError(f"{url} does not serve {model!r}. Choose from {[*served]}")
        self.model = model or next(iter(served))
        named = {_last_part(name) for name in (self.model, served[self.model])}
        if model is None and target is not None and _last_part(target) not in named:
            raise ValueError(
                f"{url} serves {self.model!r}, and the target is {target!r}: if that is the same "
                f"model, say so, collector.options={{model: {self.model}}}"
            )

    def _client(self):
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise ValueError(
                f"{self.url} needs the package openai: pip install 'parade[serve]'"
            ) from None
        return AsyncOpenAI(**self._options)

    async def _served(self) -> dict[str, str]:
        """The path of each model that is served (vLLM says it, as `root`), or its name."""
        async with self._client() as client:
            with one_line(self.url):
                models = [model async for model in client.models.list()]
        return {model.id: getattr(model, "root", None) or model.id for model in models}

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        eos: Sequence[int] = (),
        seeds: Sequence[int] | None = None,
        logprobs: int = 0,
    ) -> Reply:
        """Answers to prompts, `concurrency` requests at a time; arguments as of `Vllm.generate`.

        Raises:
            ValueError: The server refuses, ends its answers early however often it is asked, or
                has another tokenizer; one line.
        """
        each = request_options(len(prompts), params, eos, seeds)
        return asyncio.run(self._generate(prompts, each, [*eos], logprobs))

    async def _generate(self, prompts, each: list[dict], eos: list[int], logprobs: int) -> Reply:
        room = asyncio.Semaphore(self.concurrency)
        async with self._client() as client:

            async def one(prompt: list[int], options: dict):
                async with room:
                    return await self._one(client, prompt, options, eos, logprobs)

            found = await asyncio.gather(*map(one, prompts, each))
        ids, reasons, top = zip(*found)
        return Reply([*ids], [*reasons], top=[t for t in top if t])

    async def _one(self, client, prompt: list[int], options: dict, eos: list[int], logprobs: int):
        extra = options | {
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        for _ in range(1 + self.retries):
            with one_line(self.url):
                found = await client.completions.create(
                    model=self.model,
                    prompt=prompt,
                    logprobs=logprobs or None,
                    extra_body=extra,
                )
            ids, top = self._ids(found, eos), _top(found, logprobs)
            problem = _problem(found, ids, top if logprobs else None, options["max_tokens"])
            if not problem:
                break
        else:
            raise ValueError(f"{self.url} gives answers of wrong length, {problem}")
        if ids is not None:
            self._check_text(ids, found.choices[0].text, eos)
        return ids, "eos" if found.choices[0].finish_reason == "stop" else "length", top

    def _ids(self, found, eos: list[int]) -> list[int] | None:
        """Token ids of a completion; None where they cannot be known."""
        choice = found.choices[0]
        ended = choice.finish_reason == "stop"
        ids = getattr(choice, "token_ids", None)
        if ids is None:
            if "\ufffd" in choice.text:
                return None  # it stands for any bytes that are no character
            ids = self.tokenizer(choice.text, add_special_tokens=False).input_ids
            # Servers differ in whether they count the end of the text.
            if found.usage is None or found.usage.completion_tokens - len(ids) not in (0, ended):
                return None
            return [*ids, eos[0]] if ended and eos else ids
        return ids

    def _check_text(self, ids: list[int], text: str, eos: list[int]) -> None:
        """Check that returned token ids are the returned text.

        Only up to bytes that are no character: from there on servers that decode token by token
        write U+FFFD as often as they like, or nothing more at all.
        """
        said = ids[:-1] if ids and ids[-1] in eos else ids
        here = self.tokenizer.decode(said, clean_up_tokenization_spaces=False)
        sure, cut, _ = here.partition("\ufffd")
        agrees = sure.startswith(text[: len(sure)]) if cut else here == text
        if not agrees:
            shorter = min(len(here), len(text))
            same = next((i for i in range(shorter) if here[i] != text[i]), shorter)
            shown = slice(max(same - 20, 0), same + 20)
            raise ValueError(
                f"{self.url} returns token ids {said[:8]}, here {here[shown]!r}, as "
                f"{text[shown]!r}: it has another tokenizer. Give target= the model that it serves"
            )


def _top(found, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most probable tokens of each token of a completion, with log-probabilities.

    Raises:
        ValueError: The server has none, or names tokens by their text.
    """
    if not count:
        return []
    offered = found.choices[0].logprobs
    steps = (offered and offered.top_logprobs) or []
    if not steps or not all(name.startswith(TOKEN) for step in steps for name in step):
        raise ValueError(
            f"the server gives no log-probabilities by token id, which collector.top_k={count} "
            "needs (vLLM does): give collector.top_k=0, and module.teacher=target in training"
        )
    pairs = ([(int(n.removeprefix(TOKEN)), p) for n, p in step.items()] for step in steps)
    return [sorted(step, key=lambda pair: -pair[1])[:count] for step in pairs]


def _problem(found, ids: list[int] | None, top: list | None, most: int) -> str:
    """What is wrong with the length of an answer, '' for nothing."""
    reason = found.choices[0].finish_reason
    if ids is not None and len(ids) > most:
        return f"{len(ids)} tokens where {most} were asked for"
    if ids is not None and reason == "length" and len(ids) < most:
        return f"{len(ids)} tokens, cut before the {most} that were asked for"
    if ids is not None and top is not None and len(top) != len(ids):
        return f"{len(ids)} tokens and {len(top)} distributions"
    return ""


def _last_part(name: str) -> str:
    """'smollm2' of 'HuggingFaceTB/SmolLM2' and of '/models/SmolLM2/'."""
    return PurePath(name).name.lower()


@contextmanager
def one_line(url: str) -> Iterator[None]:
    """A context that turns the client's errors into ValueErrors of one line."""
    import openai

    try:
        yield
    except (openai.AuthenticationError, openai.PermissionDeniedError):
        raise ValueError(f"{url} refuses the key: set OPENAI_API_KEY to another") from None
    except openai.APITimeoutError:
        raise ValueError(
            f"{url} did not answer in time: raise collector.options={{timeout: ...}}"
        ) from None
    except openai.APIConnectionError as error:
        why = first_line(str(error.__cause__ or error))
        raise ValueError(f"{url} cannot be reached: {why}") from None
    except openai.APIStatusError as error:
        told = first_line(error.message)
        raise ValueError(f"{url} answered {error.status_code}: {told}") from None

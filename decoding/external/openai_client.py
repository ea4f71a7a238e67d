"""A client of any OpenAI-compatible server (vLLM, SGLang, others) that works with token ids.

Requests go to `/v1/completions` with the prompt as token ids, which these servers take. If a
server returns the ids that it generated (vLLM, with `return_token_ids`), these are used, and must
match the returned text. If it returns only text, the text is tokenised again; the answer is left
out if the number of tokens differs from the server's count, because its tokens were others.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import PurePath

from transformers import PreTrainedTokenizerBase

from decoding.engine.detokenize import CONTEXT, HALF, text_after
from decoding.external.reply import Engine, Refused, Reply, first_line

PROMPT = (400, 413, 422)  # statuses with which a server refuses one request: it cannot be answered
TOKEN = "token_id:"  # how a server that is asked for it writes a token that has a log-probability


class OpenAIClient(Engine):
    """A client of one model on an OpenAI-compatible server; its API key is OPENAI_API_KEY.

    Args:
        url: Of the server's API, such as http://localhost:8000/v1.
        tokenizer: The model's.
        model: Its name on the server; None: the only one that it serves.
        target: The model whose answers are wanted, a path or Hub id. Without `model`, the served
            model must have its name (its last part); None: any name.
        concurrency: The most requests in flight.
        retries: How often a request is sent again after an error of the server (408, 409, 429,
            5xx), a cut answer or none; the waits grow from half a second to eight.
        timeout: Seconds that one request may take.
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
        self.concurrency, self.retries, self.timeout = concurrency, retries, timeout
        served = asyncio.run(self._served())
        if model is None and len(served) != 1:
            raise ValueError(
                f"{url} serves {[*served]}: name one, collector.options={{model: ...}}"
            )
        if model is not None and model not in served:
            raise ValueError(f"{url} does not serve {model!r}. Choose from {[*served]}")
        self.model = model or next(iter(served))
        # 'smollm2' is the name of 'HuggingFaceTB/SmolLM2' and of '/models/SmolLM2/'.
        wanted, *names = (
            PurePath(name or "").name.lower() for name in (target, self.model, served[self.model])
        )
        if model is None and target is not None and wanted not in names:
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
        key = os.environ.get("OPENAI_API_KEY") or "none"
        limits = {"max_retries": self.retries, "timeout": self.timeout}
        return AsyncOpenAI(base_url=self.url, api_key=key, **limits)

    async def _served(self) -> dict[str, str]:
        """Return the path of each served model (vLLM gives it as `root`), or its name."""
        async with self._client() as client:
            with one_line(self.url):
                models = [model async for model in client.models.list()]
        return {model.id: getattr(model, "root", None) or model.id for model in models}

    def _decode(self, prompts, each: list[dict], eos: list[int], logprobs: int) -> Reply:
        return asyncio.run(self._generate(prompts, each, eos, logprobs))

    async def _generate(self, prompts, each: list[dict], eos: list[int], logprobs: int) -> Reply:
        room = asyncio.Semaphore(self.concurrency)
        async with self._client() as client:

            async def one(number: int, prompt: list[int], options: dict):
                async with room:
                    try:
                        return await self._one(client, prompt, options, eos, logprobs)
                    except Refused as error:
                        refused[number] = str(error)
                        return None, "length", []

            refused: dict[int, str] = {}
            found = await asyncio.gather(*map(one, count(), prompts, each))
        ids, reasons, top = zip(*found)
        return Reply([*ids], [*reasons], top=[*top] if any(top) else [], refused=refused)

    async def _one(self, client, prompt: list[int], options: dict, eos: list[int], logprobs: int):
        tokens = ("return_token_ids", "return_tokens_as_token_ids")
        extra = options | dict.fromkeys(tokens, True) | {"skip_special_tokens": False}
        asked = {"prompt": prompt, "logprobs": logprobs or None, "extra_body": extra}
        for _ in range(1 + self.retries):
            with one_line(self.url):
                found = await client.completions.create(model=self.model, **asked)
            [choice] = found.choices
            ids, top = self._ids(prompt, choice, found.usage, eos), _top(choice, logprobs)
            problem = _problem(choice, ids, top if logprobs else None, options["max_tokens"])
            if not problem:
                break
        else:
            raise ValueError(f"{self.url} gives answers of wrong length, {problem}")
        if ids is not None:
            self._check_text(prompt, ids, choice.text, eos)
        return ids, "eos" if choice.finish_reason == "stop" else "length", top

    def _ids(self, prompt: list[int], choice, usage, eos: list[int]) -> list[int] | None:
        """Return the token ids of a completion; None if they cannot be known."""
        if getattr(choice, "token_ids", None) is not None:
            return choice.token_ids
        if HALF in choice.text:
            return None  # it stands for any bytes that are no character
        ended = choice.finish_reason == "stop"
        ids = self._goes_on(prompt, choice.text)
        if ids is None:
            return None
        # Servers differ in whether they count the end of the text.
        if usage is None or usage.completion_tokens - len(ids) not in (0, ended):
            return None
        return [*ids, eos[0]] if ended and eos else ids

    def _goes_on(self, prompt: list[int], text: str) -> list[int] | None:
        """Return the tokens of a text after a prompt; None if it changes the prompt's own."""
        before = self.tokenizer.decode(prompt[-CONTEXT:], clean_up_tokenization_spaces=False)
        start, whole = (
            self.tokenizer(x, add_special_tokens=False).input_ids for x in (before, before + text)
        )
        return whole[len(start) :] if whole[: len(start)] == start else None

    def _check_text(self, prompt: list[int], ids: list[int], text: str, eos: list[int]) -> None:
        """Check that token ids match the returned text, up to bytes that are no character.

        For these, servers that decode token by token write any number of U+FFFD, or nothing.
        """
        said = ids[:-1] if ids and ids[-1] in eos else ids
        # A server that decodes an answer as a whole text loses its first space.
        for context in ([], prompt):
            here = text_after(self.tokenizer, context, said, skip_special_tokens=False)
            sure, cut, _ = here.partition(HALF)
            if sure.startswith(text[: len(sure)]) if cut else here == text:
                break
        else:
            shorter = min(len(here), len(text))
            same = next((i for i in range(shorter) if here[i] != text[i]), shorter)
            shown = slice(max(same - 20, 0), same + 20)
            raise ValueError(
                f"{self.url} returns token ids {said[:8]}, here {here[shown]!r}, as "
                f"{text[shown]!r}: it has another tokenizer. Give target= the model that it serves"
            )


def _top(choice, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` most probable tokens at each token, with log-probabilities."""
    if not count:
        return []
    steps = (choice.logprobs and choice.logprobs.top_logprobs) or []
    if not steps or not all(name.startswith(TOKEN) for step in steps for name in step):
        raise ValueError(
            f"the server gives no log-probabilities by token id, which collector.top_k={count} "
            "needs (vLLM does): give collector.top_k=0, and module.teacher=target in training"
        )
    pairs = ([(int(n.removeprefix(TOKEN)), p) for n, p in step.items()] for step in steps)
    return [sorted(step, key=lambda pair: -pair[1])[:count] for step in pairs]


def _problem(choice, ids: list[int] | None, top: list | None, most: int) -> str:
    """Describe what is wrong with an answer's length, '' if nothing is."""
    count = most if ids is None else len(ids)
    if count > most:
        return f"{count} tokens, more than max_tokens={most}"
    if choice.finish_reason == "length" and count < most:
        return f"{count} tokens, cut before max_tokens={most}"
    if ids is not None and top is not None and len(top) != count:
        return f"{count} tokens and {len(top)} distributions"
    return ""


@contextmanager
def one_line(url: str) -> Iterator[None]:
    """Turn the client's errors into ValueErrors with a message of one line."""
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
        # It may repeat the whole prompt.
        told = first_line(error.message)[:200]
        kind = Refused if error.status_code in PROMPT else ValueError
        raise kind(f"{url} answered {error.status_code}: {told}") from None

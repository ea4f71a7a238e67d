"""The HTTP side: OpenAI's routes, health, metrics and a page, over a `Scheduler`."""

import asyncio
import copy
import hmac
import json
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import metadata, resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from data.text.chat import encode_text
from decoding.engine.params import Chunk, SamplingParams
from decoding.engine.randomness import request_seeds
from decoding.serving import protocol
from decoding.serving.accepted import AcceptedText
from decoding.serving.chats import Chat
from decoding.serving.connections import HURRY, PATIENCE
from decoding.serving.metrics import Now, exposition
from decoding.serving.protocol import Asked
from decoding.serving.responses import Responses
from decoding.serving.scheduler import Full, Job, Scheduler

RETRY_AFTER = 1  # seconds
HELD = 2**26  # bytes of all bodies together that are not read yet
LARGE = 2**16  # bytes of a body that is read after others as large, and keeps no other waiting
SPELLED = 64  # characters that a token may have where the vocabulary has no longer ones
log = logging.getLogger(__name__)
T = TypeVar("T")


class Refused(Exception):
    """An error as an answer: a line, HTTP's status and OpenAI's word for it."""

    def __init__(
        self,
        message: str,
        code: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        word: str | None = None,
    ):
        super().__init__(message)
        self.code, self.body = code, protocol.failure(message, kind, word or code, param)


def not_found(error: protocol.UnknownModel) -> Refused:
    """Return OpenAI's answer to a request for a model that is not served."""
    return Refused(str(error), 404, param="model", word="model_not_found")


async def refusal(request: Request, error: Refused) -> JSONResponse:
    """Answer a refused request."""
    # After 408 and 413 the rest of the body is read for a while, and forgotten: a connection that
    # is closed at once loses the answer on its way.
    headers = {"Retry-After": str(RETRY_AFTER)} if error.code in (429, 503) else None
    return JSONResponse(error.body, error.code, headers=headers)


async def no_route(request: Request, error: HTTPException) -> JSONResponse:
    """Answer a request for another path, or with another method than the path's."""
    message = f"{error.detail}: {request.method} {request.url.path[:100]}"
    body = protocol.failure(message, "invalid_request_error", error.status_code)
    return JSONResponse(body, error.status_code, headers=error.headers)


async def broken(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that has met a fault of the server."""
    return JSONResponse(protocol.failure("the server has failed", "server_error", 500), 500)


async def hung_up(request: Request, error: ClientDisconnect) -> PlainTextResponse:
    """Answer a client that has disconnected."""
    return PlainTextResponse("", 499)


class Server:
    """The routes of the server and their answers.

    Args:
        scheduler: Decodes the requests.
        tokenizer: The models' own.
        key: The API key that clients must send; None: none.
        most: The most bytes of a body.
        seconds: The most seconds for a request, waiting included.
        defaults: Sampling parameters of requests that name none (`engine.defaults`).

    Bodies are read in threads of their own, large ones apart from others, and chats from
    completions: who sends what takes long to read keeps only the like waiting.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str | None,
        most: int,
        seconds: float,
        defaults: dict[str, Any] | None = None,
    ):
        self.scheduler, self.tokenizer, self.key = scheduler, tokenizer, key
        self.most, self.seconds, self.defaults = most, seconds, defaults or {}
        self.models = [*scheduler.samplers]
        vocabulary = map(len, tokenizer.get_vocab())
        self.characters = scheduler.longest * max(SPELLED, *vocabulary)
        self._coming: dict[asyncio.Timeout, bytearray] = {}  # bodies
        self._held = 0  # bytes of bodies that have come and are not read yet
        self._timeouts: set[asyncio.Timeout] = set()
        self._ends = math.inf  # when all requests end
        self._lanes: dict[tuple, tuple] = {}
        for large in (False, True):
            own = copy.deepcopy(tokenizer)  # a tokenizer is for one thread at a time
            own.name_or_path = self.models[0]  # a path is nothing for clients
            lock = threading.Lock()
            for kind in (Chat, protocol.Completion):
                self._lanes[kind, large] = ThreadPoolExecutor(1), own, lock
            self._lanes[Responses, large] = self._lanes[Chat, large]

    def app(self) -> Starlette:
        """Return the application that a server such as uvicorn runs."""

        @asynccontextmanager
        async def lifespan(_):
            yield
            # What was taken has been answered, or given up.
            await asyncio.to_thread(self.scheduler.close, HURRY)

        kinds = Chat, protocol.Completion, Responses
        chat, text, response = (partial(self.answer, kind=kind) for kind in kinds)
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model:path}", self.show_model),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/responses", response, methods=["POST"]),
        ]
        handlers: dict = {Refused: refusal, ClientDisconnect: hung_up}
        handlers |= {HTTPException: no_route, Exception: broken}
        # Pages of any origin may ask, as of other servers of models: a key keeps others out.
        anyone: dict[str, Any] = {"allow_origins": ["*"], "allow_headers": ["*"]}
        cors = Middleware(CORSMiddleware, **anyone, allow_methods=["GET", "POST"])
        return Starlette(
            routes=routes,
            lifespan=lifespan,
            exception_handlers=handlers,
            middleware=[cors],
        )

    async def page(self, request: Request) -> HTMLResponse:
        """Answer with a page to try the model on."""
        return HTMLResponse(resources.files(__package__).joinpath("page.html").read_text("utf-8"))

    async def health(self, request: Request) -> JSONResponse:
        """Answer 'ok' with the numbers of running and waiting requests."""
        s = self.scheduler
        return JSONResponse({"status": "ok", "running": s.running, "waiting": s.waiting})

    async def metrics(self, request: Request) -> PlainTextResponse:
        """Answer in Prometheus' text format, with vLLM's names."""
        s = self.scheduler
        kept = next(iter(s.samplers.values())).prefixes
        now = Now(
            running=s.running,
            waiting=s.waiting,
            cache_bytes=s.cache_bytes,
            cache_used=s.slots / (s.at_once * s.longest),
            loaded=s.loaded,
            prefix_bytes=None if kept is None else kept.size,
        )
        text = exposition(s.counts, now)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def version(self, request: Request) -> JSONResponse:
        """Answer with parade's version."""
        return JSONResponse({"version": metadata.version("parade")})

    async def tokenize(self, request: Request) -> JSONResponse:
        """Answer with the token ids of a prompt, or of messages in the chat template."""
        self.check_key(request)
        async with self.body(request) as body:
            kind = Chat if b'"messages"' in body else protocol.Completion
            ids = await self.read(body, kind, self.ids_in_thread)
        limits = {"count": len(ids), "max_model_len": self.scheduler.longest}
        return JSONResponse({**limits, "tokens": ids, "token_strs": None})

    def ids_in_thread(
        self,
        body: bytearray,
        kind: type[Asked],
        tokenizer: PreTrainedTokenizerBase,
        lock: threading.Lock,
    ) -> list[int]:
        """Return the token ids of a body's one prompt, as its answer would have them."""
        asked = protocol.read(body, kind, self.models)
        if asked.count > 1:
            raise protocol.Mistake("several prompts are given: give one", "prompt")
        (text,) = asked.texts(tokenizer)
        self.check_characters([text])
        with lock:
            ids = asked.encoded(text, tokenizer)
            return encode_text(tokenizer, ids) if isinstance(ids, str) else ids

    async def detokenize(self, request: Request) -> JSONResponse:
        """Answer with the text of token ids, special tokens included."""
        self.check_key(request)
        async with self.body(request) as body:
            text = await self.read(body, protocol.Completion, self.text_in_thread)
        return JSONResponse({"prompt": text})

    def text_in_thread(
        self, body: bytearray, _, tokenizer: PreTrainedTokenizerBase, lock: threading.Lock
    ) -> str:
        """Return the text of a body's token ids."""
        asked = protocol.read(body, protocol.Detokenize, self.models)
        if len(asked.tokens) > self.scheduler.longest:
            raise protocol.Mistake(
                f"tokens has {len(asked.tokens)}, more than the {self.scheduler.longest} of a text",
                "tokens",
            )
        most = self.scheduler.samplers[asked.model].vocabulary
        if bad := [token for token in asked.tokens if not 0 <= token < most]:
            raise protocol.Mistake(f"tokens has {bad[0]}, and they are 0 to {most - 1}", "tokens")
        with lock:
            return tokenizer.decode(asked.tokens, skip_special_tokens=False)

    async def list_models(self, request: Request) -> JSONResponse:
        """Answer with the models that a request may name."""
        self.check_key(request)
        models = [self.about(model) for model in self.models]
        return JSONResponse({"object": "list", "data": models})

    async def show_model(self, request: Request) -> JSONResponse:
        """Answer with one of the models that a request may name."""
        self.check_key(request)
        model = request.path_params["model"]
        try:
            protocol.check_model(model, self.models)
        except protocol.UnknownModel as error:
            raise not_found(error) from error
        return JSONResponse(self.about(model))

    def about(self, model: str) -> dict:
        """Return what clients are told of a model."""
        limits = {"max_model_len": self.scheduler.longest}
        return {"id": model, "object": "model", "created": 0, "owned_by": "parade", **limits}

    async def answer(self, request: Request, kind: type[Asked]):
        """Answer a request as one body or as a stream."""
        self.check_key(request)
        deadline = asyncio.get_running_loop().time() + self.seconds
        async with self.until(deadline), self.body(request) as body:
            asked, prompts, params = await self.read(body, kind, self.read_in_thread)
        answers = Answers(self, request, asked, prompts, params, deadline)
        if asked.stream:
            return StreamingResponse(self.events(answers), media_type="text/event-stream")
        return Response(await self.whole(answers), media_type="application/json")

    def end_within(self, seconds: float) -> None:
        """Give up the requests that have not ended after so many seconds."""
        self._ends = asyncio.get_running_loop().time() + seconds
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(min(timeout.when() or 0.0, self._ends))

    @asynccontextmanager
    async def until(self, deadline: float) -> AsyncIterator[None]:
        """Do what follows before a deadline, or the server's end."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline, self._ends)) as timeout:
                if loop.time() >= deadline:  # what is there at once would still be taken
                    raise TimeoutError
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError:
            if self._ends < deadline:
                message = "the server is ending: ask again when it is back"
                raise Refused(message, 503, "server_error") from None
            message = f"not ended within {self.seconds:g} seconds"
            raise Refused(message, 504, "timeout_error") from None

    def check_key(self, request: Request) -> None:
        """Refuse a client without the key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key is not None and not hmac.compare_digest(given, self.key.encode()):
            raise Refused("a wrong API key, or none", 401, "authentication_error")

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """Take in a request's body and hold it; refuse one that is too long or too slow."""
        if int(request.headers.get("content-length", 0)) > self.most:
            raise self.too_long()
        found = bytearray()
        try:
            async with asyncio.timeout(PATIENCE) as timeout:
                self._coming[timeout] = found
                try:
                    async for part in request.stream():
                        found += part
                        if len(found) > self.most:
                            raise self.too_long()
                        self.make_room()
                finally:
                    del self._coming[timeout]
        except TimeoutError:
            message = f"the body has not come within {PATIENCE:g} seconds, or had to make room"
            raise Refused(message, 408, "timeout_error") from None
        self._held += len(found)
        try:
            yield found
        finally:
            self._held -= len(found)

    def too_long(self) -> Refused:
        """Return the error of a body that is too long."""
        return Refused(f"the body has more than {self.most} bytes", 413)

    def make_room(self) -> None:
        """Give up the largest bodies that are coming in while all have too many bytes."""
        while self._held + sum(map(len, self._coming.values())) > max(HELD, 4 * self.most):
            timeout, largest = max(self._coming.items(), key=lambda item: len(item[1]))
            if not largest:
                return
            largest.clear()
            if not timeout.expired():
                timeout.reschedule(0)

    async def read(self, body: bytearray, kind: type[Asked], do: Callable[..., T]) -> T:
        """Return what `do` makes of a body of a kind, in a thread and with a tokenizer of its own.

        `do` is given the body, its kind, the tokenizer and the tokenizer's lock.
        """
        thread, *own = self._lanes[kind, len(body) > LARGE]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(thread, self.guarded, do, body, kind, *own)
        except protocol.UnknownModel as error:
            raise not_found(error) from error
        except ValueError as error:
            message = flat(error).replace("max_new_tokens", "max_tokens")
            raise Refused(message[:400], param=protocol.param_of(error, kind)) from error
        except RuntimeError as error:
            raise Refused(str(error), 500, "server_error") from error

    def guarded(self, do: Callable[..., T], *given) -> T:
        """Call a function that reads a body; RuntimeError where it fails by no client's mistake."""
        try:
            return do(*given)
        except ValueError:
            raise
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        except BaseException as error:  # a panic of tokenizers is no Exception
            log.error("a request could not be read", exc_info=error)
            raise RuntimeError("the request could not be read") from None

    def read_in_thread(
        self,
        body: bytearray,
        kind: type[Asked],
        tokenizer: PreTrainedTokenizerBase,
        lock: threading.Lock,
    ) -> tuple[Asked, list, list[SamplingParams]]:
        """Return a body's request, and the prompts and the parameters of its answers.

        Everything is counted before it is done.
        """
        scheduler, most = self.scheduler, self.scheduler.at_once + self.scheduler.most
        asked = protocol.read(body, kind, self.models, self.defaults)
        if (count := asked.count * asked.n) > most:
            raise ValueError(f"{count} answers are asked for, and this server takes {most}")
        if asked.best is not None and not self.predicts_next(asked):
            raise ValueError(
                f"{asked.model} predicts masked tokens and not the next one, so it has no "
                "logprobs: leave them out"
            )
        if not asked.answers and not self.predicts_next(asked):
            raise ValueError(
                f"max_tokens=0 is for models that score a prompt, and {asked.model} does not"
            )
        texts, suffix = asked.texts(tokenizer), asked.suffix or None
        params = asked.params  # the chat template says how tools are called
        self.check_characters([*texts, suffix or ""])
        with lock:
            found = [
                scheduler.prepared(
                    asked.model,
                    asked.encoded(text, tokenizer),
                    params,
                    suffix,
                    tokenizer,
                    asked.USUAL,
                )
                for text in texts
            ]
        each = [pair for pair in found for _ in range(asked.n)]
        return asked, [prompt for prompt, _ in each], [own for _, own in each]

    def check_characters(self, texts: Sequence[str | list[int]]) -> None:
        """Raise ValueError for a text that is longer than any prompt that fits."""
        longest = max((len(x) for x in texts if isinstance(x, str)), default=0)
        if longest > self.characters:
            raise ValueError(
                f"the prompt has {longest} characters, more than the {self.scheduler.longest} "
                f"tokens of this server can have ({self.characters}): shorten it"
            )

    def predicts_next(self, asked: Asked) -> bool:
        """Return whether the model's tokens have scores."""
        return self.scheduler.samplers[asked.model].predicts_next

    async def whole(self, answers: "Answers") -> str:
        """Return the answers, as JSON, once all have ended."""
        asked, prompts, found = answers.asked, answers.prompts, {}
        try:
            async for index, chunk in answers:
                if chunk.result is not None:
                    found[index] = chunk.result
        finally:
            answers.give_up()
        results = [found[i] for i in range(len(prompts))]
        columns = range(len(prompts)), prompts, results, [job.scores for job in answers.jobs]
        choices = await asyncio.to_thread(self.written, asked.choice, *columns)
        return asked.body(answers.number, prompts, results, choices)

    def written(self, write: Callable[..., Any], *columns) -> list[str]:
        """Write each row of the columns as JSON, one by one: others have their turn between."""
        rows = (write(*row, self.tokenizer) for row in zip(*columns))
        return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]

    async def events(self, answers: "Answers") -> AsyncIterator[str]:
        """Yield server-sent events of answers as they come."""
        asked, prompts, results = answers.asked, answers.prompts, []
        drafted, begun = prompts if self.predicts_next(asked) else [], set[int]()
        texts = [AcceptedText(self.tokenizer, prompt) for prompt in drafted]
        try:
            for begin in asked.begin(answers.number):
                yield begin
            async for index, chunk in answers:
                scores, accepted, job = None, None, answers.jobs[index]
                if chunk.result is not None:
                    results.append(chunk.result)
                    if job.scores is not None:
                        row = job.prompt, chunk.result, job.scores, self.tokenizer
                        scores = await asyncio.to_thread(asked.answer_scores, *row)
                if drafted:
                    accepted = texts[index].of(chunk, job.stats)
                part = asked.delta(index, chunk, accepted, scores, index not in begun)
                begun.add(index)
                yield "".join(asked.part(answers.number, part))
            yield "".join(asked.end(answers.number, prompts, results))
        except ClientDisconnect:
            pass
        except Refused as error:
            yield protocol.event(error.body)
        finally:  # also where the client has hung up
            answers.give_up()


class Answers:
    """The chunks of one request's answers, as they come: (which answer, chunk).

    The client's `request` is watched, because it may disconnect before anything is sent. Reading
    the chunks raises Refused if decoding fails or is not done by the `deadline` (a time of the
    event loop), and ClientDisconnect.
    """

    def __init__(
        self,
        server: Server,
        request: Request,
        asked: Asked,
        prompts: list,
        params: list[SamplingParams],
        deadline: float,
    ):
        self.server, self.scheduler, self.request = server, server.scheduler, request
        self.asked, self.prompts, self.deadline = asked, prompts, deadline
        queue: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        self.queue, loop = queue, asyncio.get_running_loop()

        def show(index: int, chunk: Chunk | Exception) -> None:  # in the thread that decodes
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, (index, chunk))

        seeds = request_seeds(asked.seed, len(prompts))
        jobs = [
            (asked.model, prompt, own, seed, partial(show, i), asked.best, asked.answers)
            for i, (prompt, own, seed) in enumerate(zip(prompts, params, seeds))
        ]
        try:
            self.jobs: list[Job] = self.scheduler.submit(jobs)
        except Full:
            message = "the server has as many requests as it takes: try again later"
            raise Refused(message, 429, "rate_limit_error") from None
        self.left = len(self.jobs)
        self.number = self.jobs[0].number
        self.watch = asyncio.create_task(self._until_hung_up())

    async def _until_hung_up(self) -> None:
        try:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            return  # kept by the task, its traceback would be a cycle with this object
        self.give_up()  # nobody else watches while a whole answer, or a place, is waited for
        self.queue.put_nowait((0, ClientDisconnect()))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        while self.left:
            async with self.server.until(self.deadline):
                index, chunk = await self.queue.get()
            if isinstance(chunk, ClientDisconnect):
                raise chunk
            if isinstance(chunk, Exception):
                # What it says is for who runs the server: it may name files.
                log.error("decoding failed", exc_info=chunk)
                raise Refused("decoding failed", 500, "server_error")
            self.left -= chunk.result is not None
            yield index, chunk

    def give_up(self) -> None:
        """Cancel the answers that have not ended."""
        if asyncio.current_task() is not self.watch:
            self.watch.cancel()
        for job in self.jobs:
            self.scheduler.cancel(job)


def flat(error: Exception) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())

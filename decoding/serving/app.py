"""The HTTP side: OpenAI's routes, health, metrics and a page, over a `Scheduler`."""

import asyncio
import hmac
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from decoding.engine.params import Chunk
from decoding.engine.randomness import request_seeds
from decoding.serving import protocol
from decoding.serving.accepted import AcceptedText
from decoding.serving.protocol import Asked
from decoding.serving.scheduler import Full, Job, Scheduler

RETRY_AFTER = 1  # seconds


class Refused(Exception):
    """An error as an answer: a line, HTTP's status and OpenAI's word for it."""

    def __init__(self, message: str, code: int = 400, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.code, self.body = code, protocol.failure(message, kind, code)


async def refusal(request: Request, error: Refused) -> JSONResponse:
    """Answer a refused request."""
    # What is left of a body that is too long is not read: it may have no end.
    headers = {429: {"Retry-After": str(RETRY_AFTER)}, 413: {"Connection": "close"}}
    return JSONResponse(error.body, error.code, headers=headers.get(error.code))


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
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str | None,
        most: int,
        seconds: float,
    ):
        self.scheduler, self.tokenizer, self.key = scheduler, tokenizer, key
        self.most, self.seconds = most, seconds
        self.models = [*scheduler.samplers]
        self._tokenizing = threading.Lock()  # a tokenizer is for one thread at a time

    def app(self) -> Starlette:
        """Return the application that a server such as uvicorn runs."""

        @asynccontextmanager
        async def lifespan(_):
            yield
            await asyncio.to_thread(self.scheduler.close)  # what was taken is still answered

        chat, text = (partial(self.answer, kind=k) for k in (protocol.Chat, protocol.Completion))
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.list_models),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ]
        handlers: dict = {Refused: refusal, ClientDisconnect: hung_up}
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)

    async def page(self, request: Request) -> HTMLResponse:
        """Answer with a page to try the model on."""
        return HTMLResponse(resources.files(__package__).joinpath("page.html").read_text("utf-8"))

    async def health(self, request: Request) -> JSONResponse:
        """Answer 'ok' with the numbers of running and waiting requests."""
        s = self.scheduler
        return JSONResponse({"status": "ok", "running": s.running, "waiting": s.waiting})

    async def metrics(self, request: Request) -> PlainTextResponse:
        """Answer in Prometheus' text format, with vLLM's names."""
        return PlainTextResponse(exposition(self.scheduler), media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> JSONResponse:
        """Answer with the models that a request may name."""
        self.check_key(request)
        common = {"object": "model", "created": 0, "owned_by": "parade"}
        common["max_model_len"] = self.scheduler.longest
        return JSONResponse({"object": "list", "data": [{"id": m, **common} for m in self.models]})

    async def answer(self, request: Request, kind: type[Asked]):
        """Answer a request as one body or as a stream."""
        self.check_key(request)
        body = await self.body(request)
        try:  # in a thread: a long text takes a while to tokenize
            asked, prompts = await asyncio.to_thread(self.read, body, kind)
        except ValueError as error:
            raise Refused(flat(error).replace("max_new_tokens", "max_tokens")) from error
        answers = Answers(self.scheduler, request, asked, prompts, self.seconds)
        if asked.stream:
            return StreamingResponse(self.events(answers), media_type="text/event-stream")
        return JSONResponse(await self.whole(answers))

    def check_key(self, request: Request) -> None:
        """Refuse a client without the key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key is not None and not hmac.compare_digest(given, self.key.encode()):
            raise Refused("a wrong API key, or none", 401, "authentication_error")

    async def body(self, request: Request) -> bytes:
        """Return a request's body; refuse one that is too long."""
        found = b""
        async for part in request.stream():
            found += part
            if len(found) > self.most:
                raise Refused(f"the body has more than {self.most} bytes", 413)
        return found

    def read(self, body: bytes, kind: type[Asked]) -> tuple[Asked, list[list[int]]]:
        """Return a body's request, and the prompt of each of its answers."""
        scheduler, most = self.scheduler, self.scheduler.at_once + self.scheduler.most
        with self._tokenizing:
            asked = protocol.read(body, kind, self.models)
            texts = [text for text in asked.texts(self.tokenizer) for _ in range(asked.n)]
            if (count := len(texts)) > most:
                raise ValueError(f"{count} answers are asked for, and this server takes {most}")
            if asked.best is not None and not self.predicts_next(asked):
                raise ValueError(
                    f"{asked.model} predicts masked tokens and not the next one, so it has no "
                    "logprobs: leave them out"
                )
            given = asked.params, asked.suffix or None
            return asked, [scheduler.prepared(asked.model, text, *given) for text in texts]

    def predicts_next(self, asked: Asked) -> bool:
        """Return whether the model's tokens have scores."""
        return self.scheduler.samplers[asked.model].predicts_next

    async def whole(self, answers: "Answers") -> dict:
        """Return the answers once all have ended."""
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
        head = asked.head(answers.number, part=False)
        return head | {"choices": choices, "usage": asked.usage(prompts, results)}

    def written(self, write: Callable[..., Any], *columns) -> list:
        """Write each row of the columns, with the tokenizer locked."""
        with self._tokenizing:
            return [write(*row, self.tokenizer) for row in zip(*columns)]

    async def events(self, answers: "Answers") -> AsyncIterator[str]:
        """Yield server-sent events of answers as they come."""
        asked, prompts, results = answers.asked, answers.prompts, []
        texts = [AcceptedText(self.tokenizer) for _ in prompts]
        try:
            async for index, chunk in answers:
                scores, accepted, job = None, None, answers.jobs[index]
                if chunk.result is not None:
                    results.append(chunk.result)
                    if job.scores is not None:
                        row = [job.prompt], [chunk.result], [job.scores]
                        [scores] = await asyncio.to_thread(self.written, asked.answer_scores, *row)
                if self.predicts_next(asked):
                    accepted = texts[index].of(chunk, job.stats)
                part = asked.delta(index, chunk, accepted, scores)
                yield event(asked.head(answers.number, part=True) | {"choices": [part]})
            if asked.stream_options.get("include_usage"):
                head = asked.head(answers.number, part=True)
                yield event(head | {"choices": [], "usage": asked.usage(prompts, results)})
            yield "data: [DONE]\n\n"
        except ClientDisconnect:
            pass
        except Refused as error:
            yield event(error.body)
        finally:  # also where the client has hung up
            answers.give_up()


class Answers:
    """The chunks of one request's answers, as they come: (which answer, chunk).

    The client's `request` is watched, because it may disconnect before anything is sent. Reading
    the chunks raises Refused if decoding fails or takes more than `seconds`, and ClientDisconnect.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        request: Request,
        asked: Asked,
        prompts: list[list[int]],
        seconds: float,
    ):
        self.scheduler, self.request, self.seconds = scheduler, request, seconds
        self.asked, self.prompts = asked, prompts
        queue: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        self.queue, loop = queue, asyncio.get_running_loop()

        def show(index: int, chunk: Chunk | Exception) -> None:  # in the thread that decodes
            loop.call_soon_threadsafe(queue.put_nowait, (index, chunk))

        self.deadline = loop.time() + seconds
        seeds = request_seeds(asked.seed, len(prompts))
        jobs = [
            (asked.model, prompt, asked.params, seed, partial(show, i), asked.best)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds))
        ]
        try:
            self.jobs: list[Job] = scheduler.submit(jobs)
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
            try:
                async with asyncio.timeout_at(self.deadline):
                    index, chunk = await self.queue.get()
            except TimeoutError:
                message = f"not ended within {self.seconds:g} seconds"
                raise Refused(message, 504, "timeout_error") from None
            if isinstance(chunk, ClientDisconnect):
                raise chunk
            if isinstance(chunk, Exception):
                raise Refused(f"decoding failed: {flat(chunk)[:300]}", 500, "server_error")
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


def event(content: dict) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def exposition(scheduler: Scheduler) -> str:
    """Return the scheduler's counts in Prometheus' text format, with vLLM's names."""
    c, lines = scheduler.counts, []

    def metric(name: str, kind: str, values: float | Mapping[str, float]) -> None:
        lines.append(f"# TYPE vllm:{name} {kind}")
        values = values if isinstance(values, Mapping) else {"": values}
        lines.extend(f"vllm:{name}{labels} {value}" for labels, value in values.items())

    metric("num_requests_running", "gauge", scheduler.running)
    metric("num_requests_waiting", "gauge", scheduler.waiting)
    metric("prompt_tokens_total", "counter", c.prompt_tokens)
    metric("generation_tokens_total", "counter", c.tokens)
    ended = {f'{{finished_reason="{r}"}}': n for r, n in sorted({**c.requests}.items())}
    metric("request_success_total", "counter", ended)
    metric("spec_decode_num_drafts_total", "counter", c.drafts)
    metric("spec_decode_num_draft_tokens_total", "counter", c.drafted)
    metric("spec_decode_num_accepted_tokens_total", "counter", sum(c.accepted))
    by_position = {f'{{position="{i}"}}': n for i, n in enumerate(c.accepted)}
    metric("spec_decode_num_accepted_tokens_per_pos_total", "counter", by_position)
    return "\n".join(lines) + "\n"

"""The HTTP side: OpenAI's routes, health, metrics and a page, over a `Scheduler`."""

import asyncio
import hmac
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from decoding.engine.params import Chunk, Result
from decoding.serving import protocol
from decoding.serving.accepted import AcceptedText
from decoding.serving.protocol import Asked
from decoding.serving.scheduler import Full, Job, Scheduler

RETRY_AFTER = 1  # seconds


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        message: What is wrong, in one line.
        code: HTTP's status.
        kind: OpenAI's word for it.
    """

    def __init__(self, message: str, code: int = 400, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.code, self.kind = code, kind

    @property
    def response(self) -> JSONResponse:
        """The error as it is sent."""
        # What is left of a body that is too long is not read: it may have no end.
        headers = {429: {"Retry-After": str(RETRY_AFTER)}, 413: {"Connection": "close"}}
        body = protocol.failure(str(self), self.kind, self.code)
        return JSONResponse(body, self.code, headers=headers.get(self.code))


class Server:
    """Answers requests.

    Args:
        scheduler: Decodes.
        tokenizer: The models' own.
        key: What clients must send as their API key; None: nothing.
        most: Bytes of a body.
        seconds: That a request may take, waiting included.
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
        """The application that a server such as uvicorn runs."""

        @asynccontextmanager
        async def lifespan(_):
            yield
            await asyncio.to_thread(self.scheduler.close)  # what was taken is still answered

        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.list_models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def page(self, request: Request) -> HTMLResponse:
        """A page to try the model on."""
        return HTMLResponse(resources.files(__package__).joinpath("page.html").read_text("utf-8"))

    async def health(self, request: Request) -> JSONResponse:
        """That the server is there, and how many requests it has."""
        s = self.scheduler
        return JSONResponse({"status": "ok", "running": s.running, "waiting": s.waiting})

    async def metrics(self, request: Request) -> PlainTextResponse:
        """Prometheus' text format, with vLLM's names."""
        return PlainTextResponse(exposition(self.scheduler), media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> JSONResponse:
        """The models that a request may name."""
        if (refused := self.unauthorized(request)) is not None:
            return refused
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "parade",
             "max_model_len": self.scheduler.longest}
            for name in self.models
        ]  # fmt: skip
        return JSONResponse({"object": "list", "data": data})

    async def completions(self, request: Request):
        """POST /v1/completions."""
        return await self.answered(request, chat=False)

    async def chat(self, request: Request):
        """POST /v1/chat/completions."""
        return await self.answered(request, chat=True)

    def unauthorized(self, request: Request) -> JSONResponse | None:
        """The answer to a client without the key; None for one that has it."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key is None or hmac.compare_digest(given, self.key.encode()):
            return None
        return Refused("a wrong API key, or none", 401, "authentication_error").response

    async def answered(self, request: Request, chat: bool):
        """The response to a request for answers."""
        if (refused := self.unauthorized(request)) is not None:
            return refused
        try:
            asked, prompts = await self.understood(await self.body(request), chat)
            answers = Answers(self.scheduler, request, asked, prompts, self.seconds)
            if asked.stream:
                events = self.events(asked, prompts, answers)
                return StreamingResponse(events, media_type="text/event-stream")
            return JSONResponse(await self.whole(asked, prompts, answers))
        except Refused as refused:
            return refused.response
        except ClientDisconnect:
            return PlainTextResponse("", 499)

    async def body(self, request: Request) -> bytes:
        """A request's body; Refused where it is too long."""
        found = b""
        async for part in request.stream():
            found += part
            if len(found) > self.most:
                raise Refused(f"the body has more than {self.most} bytes", 413)
        return found

    async def understood(self, body: bytes, chat: bool) -> tuple[Asked, list[list[int]]]:
        """What a body asks for, and the token ids of its prompts."""

        def read():
            prepared = self.scheduler.prepared
            with self._tokenizing:
                asked = protocol.asked(body, chat, self.tokenizer, self.models)
                if len(asked.prompts) > (most := self.scheduler.at_once + self.scheduler.most):
                    raise ValueError(
                        f"{len(asked.prompts)} answers are asked for, and this server takes {most}"
                    )
                if asked.best is not None and not self.scheduler.predicts_next(asked.model):
                    raise ValueError(
                        f"{asked.model} predicts masked tokens and not the next one, so it has no "
                        "logprobs: leave them out"
                    )
                return asked, [
                    prepared(asked.model, p, asked.params, asked.suffix) for p in asked.prompts
                ]

        try:
            return await asyncio.to_thread(read)  # a long text takes a while to tokenize
        except ValueError as error:
            message = " ".join(str(error).split()).replace("max_new_tokens", "max_tokens")
            raise Refused(message) from error

    async def whole(self, asked: Asked, prompts: list[list[int]], answers: "Answers") -> dict:
        """The answers once all have ended."""
        found: dict[int, Result] = {}
        try:
            async for index, chunk in answers:
                if chunk.result is not None:
                    found[index] = chunk.result
        finally:
            answers.give_up()
        results = [found[i] for i in range(len(prompts))]
        choices = await asyncio.to_thread(self.choices, asked, prompts, results, answers)
        body = protocol.head(asked, answers.number, part=False)
        return body | {"choices": choices, "usage": protocol.usage(asked, prompts, results)}

    def choices(
        self, asked: Asked, prompts: list[list[int]], results: list[Result], answers: "Answers"
    ) -> list[dict]:
        """The answers as they are sent."""
        columns = zip(prompts, results, answers.jobs)
        with self._tokenizing:
            return [
                protocol.choice(asked, i, prompt, result, job.scores, self.tokenizer)
                for i, (prompt, result, job) in enumerate(columns)
            ]

    def logprobs(self, asked: Asked, prompt: list[int], result: Result, job: Job) -> dict:
        """The log probabilities of an answer as they are sent."""
        with self._tokenizing:
            return protocol.logprobs(asked, prompt, result, job.scores, self.tokenizer)

    async def events(
        self, asked: Asked, prompts: list[list[int]], answers: "Answers"
    ) -> AsyncIterator[str]:
        """Server-sent events of answers as they come."""
        results, texts = [], [AcceptedText(self.tokenizer) for _ in prompts]
        try:
            async for index, chunk in answers:
                scores, accepted, job = None, None, answers.jobs[index]
                if chunk.result is not None:
                    results.append(chunk.result)
                    if asked.best is not None:
                        given = asked, prompts[index], chunk.result, job
                        scores = await asyncio.to_thread(self.logprobs, *given)
                if self.scheduler.predicts_next(asked.model):
                    accepted = texts[index].of(chunk, job.stats)
                part = protocol.delta(asked, index, chunk, accepted, scores)
                yield event(protocol.head(asked, answers.number, part=True) | {"choices": [part]})
            if asked.usage:
                head = protocol.head(asked, answers.number, part=True)
                yield event(
                    head | {"choices": [], "usage": protocol.usage(asked, prompts, results)}
                )
            yield "data: [DONE]\n\n"
        except ClientDisconnect:
            pass
        except Refused as error:
            yield event(protocol.failure(str(error), error.kind, error.code))
        finally:  # also where the client has hung up
            answers.give_up()


class Answers:
    """The chunks of one request's answers, as they come: (which answer, chunk).

    Args:
        scheduler: Decodes.
        request: The client's, which is watched: it may hang up before there is anything to send.
        asked: What is asked for.
        prompts: Token ids, one list for each answer.
        seconds: That all of it may take.

    Raises:
        Refused: There is no room; while it is read: it takes too long, or decoding fails.
        ClientDisconnect: While it is read: the client has hung up.
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
        queue: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        self.queue, loop = queue, asyncio.get_running_loop()

        def shown(index: int):
            def show(chunk: Chunk | Exception) -> None:  # in the thread that decodes
                loop.call_soon_threadsafe(queue.put_nowait, (index, chunk))

            return show

        self.deadline = loop.time() + seconds
        columns = zip(prompts, asked.seeds)
        jobs = [
            (asked.model, prompt, asked.params, seed, shown(i), asked.best)
            for i, (prompt, seed) in enumerate(columns)
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
                message = " ".join(str(chunk).split())[:300]
                raise Refused(f"decoding failed: {message}", 500, "server_error")
            self.left -= chunk.result is not None
            yield index, chunk

    def give_up(self) -> None:
        """Cancel what has not ended."""
        if asyncio.current_task() is not self.watch:
            self.watch.cancel()
        for job in self.jobs:
            self.scheduler.cancel(job)


def event(content: dict) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def exposition(scheduler: Scheduler) -> str:
    """The scheduler's counts in Prometheus' text format, by the names that vLLM gives them."""
    c = scheduler.counts
    lines = []

    def metric(name: str, kind: str, *values: tuple[str, float]) -> None:
        lines.append(f"# TYPE vllm:{name} {kind}")
        lines.extend(f"vllm:{name}{labels} {value}" for labels, value in values)

    metric("num_requests_running", "gauge", ("", scheduler.running))
    metric("num_requests_waiting", "gauge", ("", scheduler.waiting))
    metric("prompt_tokens_total", "counter", ("", c.prompt_tokens))
    metric("generation_tokens_total", "counter", ("", c.tokens))
    ended = [(f'{{finished_reason="{r}"}}', n) for r, n in sorted({**c.requests}.items())]
    metric("request_success_total", "counter", *ended)
    metric("spec_decode_num_drafts_total", "counter", ("", c.drafts))
    metric("spec_decode_num_draft_tokens_total", "counter", ("", c.drafted))
    metric("spec_decode_num_accepted_tokens_total", "counter", ("", sum(c.accepted)))
    by_position = [(f'{{position="{i}"}}', n) for i, n in enumerate(c.accepted)]
    metric("spec_decode_num_accepted_tokens_per_pos_total", "counter", *by_position)
    return "\n".join(lines) + "\n"

"""`python -m decoding.serve model=runs/deer_stage2/export`: an OpenAI-compatible server.

In float32 the same seed gives the same text, whatever else the server decodes.
"""

import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from data.arguments import Count, Positive, Whole
from data.files import read_text
from decoding.engine.params import SamplingParams
from models.options import looks_local
from recipes.command import main
from recipes.options import NEEDED, AnswerOptions, Verbatim, check_first, option, parse

PLAIN = "plain"  # the name of the target alone, which is served beside a drafter
LONGEST = 4096  # tokens of a request, where neither the model nor the user sets a limit


@dataclass(frozen=True, kw_only=True)
class Serve(AnswerOptions):
    """Serve an export to many clients at once, as OpenAI's API."""

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export port=8000"

    model: str = option(NEEDED, "an exported folder, a Hub id or a gguf file")
    name: str | None = option(
        None, "what clients call it; null: its run's or folder's name, or Hub id"
    )
    chat_template: str | None = option(
        None, "a file with a chat template (Jinja) in place of the model's own"
    )
    host: str = option("127.0.0.1", "the address to listen on; 0.0.0.0 is all of this machine's")
    port: Annotated[int, Field(ge=0, le=65535)] = option(
        8000, "the port to listen on; 0: a free one"
    )
    at_once: Count = option(16, "requests that are decoded together")
    waiting: Whole = option(256, "further requests that may wait; others are refused (429)")
    max_length: Annotated[int, Field(ge=2)] | None = option(
        None, "tokens of a prompt and its answer together; null: the model's context"
    )
    cache_gb: Positive | None = option(None, "of keys and values at the most; lowers at_once")
    prefix_gb: Annotated[float, Field(ge=0)] = option(
        0.5, "of keys and values kept of earlier prompts, for those that begin alike"
    )
    prefill_tokens: Count = option(512, "of prompts that one pass prefills, before others' tokens")
    body_mb: Positive = option(4.0, "of a request's body at the most")
    seconds: Positive = option(600.0, "that a request may take, waiting too")
    grace: Annotated[float, Field(gt=0, le=86400)] = option(
        30.0, "seconds after SIGTERM for the requests that it has"
    )
    log: bool = option(False, "a line of JSON on standard error for each request that has ended")
    api_key: Verbatim | None = option(None, "that clients must send; null: PARADE_API_KEY, or none")


def read_options(argv: list[str]) -> Serve:
    """Return the command's options."""
    return parse(argv, Serve, "decoding.serve")


check_first(__name__, read_options)

from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.pace import Pace
from decoding.engine.defaults import model_defaults, told
from decoding.engine.prefixes import PART, Prefixes
from decoding.engine.sampler import Sampler
from decoding.loading import load, load_newer, sampling_config, target_fingerprint, target_of
from decoding.samplers.plain import PlainSampler
from models import packed

T = TypeVar("T")


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    s = read_options(argv)
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ValueError("decoding.serve needs starlette and uvicorn: pip install 'parade[serve]'")
    import uvicorn

    from decoding.serving.app import Server
    from decoding.serving.connections import HURRY, PATIENCE, Connection, Http, room
    from decoding.serving.reload import Reload
    from decoding.serving.scheduler import Scheduler, requests_log

    try:  # before minutes of loading
        listening = socket.create_server((s.host, s.port), backlog=1024)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {s.host}:{s.port} ({error.strerror}): give another host= or port="
        ) from error
    samplers, defaults = in_a_thread_that_ends(samplers_of, s)
    fingerprint = fingerprint_of(s)
    name = next(iter(samplers))
    longest = length_of(samplers[name], s.max_length)
    at_once = s.at_once
    if s.cache_gb is not None:
        at_once = min(at_once, requests_within(s.cache_gb, samplers[name], longest))
    scheduler = Scheduler(samplers, at_once, s.waiting, longest, s.prefill_tokens)
    limits: dict[str, Any] = {"most": int(1e6 * s.body_mb), "seconds": s.seconds}
    key = s.api_key or os.environ.get("PARADE_API_KEY")
    server = Server(scheduler, samplers[name].tokenizer, key=key, defaults=defaults, **limits)
    most, backlog = room(wanted=max(1024, 2 * (at_once + s.waiting)))
    config = uvicorn.Config(
        server.app(),
        http=partial(Connection, most=most),  # type: ignore[arg-type]  # it makes one
        ws="none",
        backlog=backlog,
        log_level="error",  # who asks nonsense does not fill a log
        timeout_keep_alive=PATIENCE,
        timeout_graceful_shutdown=math.ceil(s.grace) + HURRY,
    )

    def end() -> None:
        server.end_within(s.grace)
        if hasattr(signal, "alarm"):  # should a thread hang, the system ends it
            signal.alarm(math.ceil(s.grace) + 2 * HURRY)

    if s.log:
        requests_log.addHandler(logging.StreamHandler())
        requests_log.setLevel(logging.INFO)
        requests_log.propagate = False
    for line in notes(samplers[name], defaults):
        print(line)
    print(f"{', '.join(samplers)}: {at_once} requests at once of up to {longest} tokens each")
    address = f"http://{s.host}:{listening.getsockname()[1]}/"
    print(f"{address} (Ctrl-C or SIGTERM: what was asked is answered first)", flush=True)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        reload = Reload(scheduler, name, partial(newer, s, fingerprint, at_once, longest))
        signal.signal(signal.SIGHUP, lambda *_: reload.ask())
    # uvicorn raises it once more after it has ended in good order.
    signal.signal(signal.SIGTERM, lambda *_: None)
    Http(config, end).run(sockets=[listening])


def in_a_thread_that_ends(do: Callable[..., T], *given: Any) -> T:
    """Return the result of a function that computes with torch, before the server decodes.

    OpenMP (libgomp) keeps a pool of threads for each thread that has computed, until that one ends.
    Where all pools have more threads than there are cores, none of them waits actively any more: a
    token of SmolLM2 took 48 ms in the server's thread (two cores), and takes 29 with one pool.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(do(*given))
        except BaseException as error:
            found.set_exception(error)

    thread = Thread(target=run, daemon=True)  # Ctrl-C need not wait for it
    thread.start()
    found.exception()  # waits
    thread.join()
    return found.result()


def samplers_of(s: Serve) -> tuple[dict[str, Sampler], dict[str, Any]]:
    """Load what is served, by the names that clients call it; also its own sampling parameters."""
    sampler = load(s.model, **s.loading)
    if s.chat_template is not None:
        sampler.tokenizer.chat_template = read_template(s.chat_template)
    defaults = model_defaults(sampler) if s.generation_config == "auto" else {}
    samplers = {s.name or name_of(s.model): paced(sampler, s)}
    if sampler.bench == "decoding.bench" and not isinstance(sampler, PlainSampler):
        samplers[PLAIN] = PlainSampler(sampler.target, sampler.tokenizer)
    if s.prefix_gb:
        prefixes = Prefixes(int(1e9 * s.prefix_gb), min(PART, s.prefill_tokens))
        for each in samplers.values():
            each.prefixes = prefixes
    return samplers, defaults


def paced(sampler: Sampler, s: Serve) -> Sampler:
    """Let a sampler measure whether drafts pay, unless the user has said."""
    forced = any(knob.startswith("fastest=") for knob in s.sampler)
    if isinstance(sampler, BlockSampler) and sampler.fits_machine and not forced:
        sampler.pace = Pace()
    return sampler


def fingerprint_of(s: Serve) -> str | None:
    """Return the fingerprint of the target's weights; None where no drafter is served."""
    path = os.path.expanduser(s.model)
    name = target_of(path, sampling_config(path, s.sampler), s.target)
    return None if name is None else target_fingerprint(name)


def newer(s: Serve, fingerprint: str | None, at_once: int, longest: int, old: Sampler) -> Sampler:
    """Load the export again, as a sampler that is served in the place of the old one."""
    given = {key: getattr(s, key) for key in ("target", "sampler", "trust_remote_code")}
    sampler = load_newer(s.model, old, fingerprint, **given)
    if s.cache_gb is not None and requests_within(s.cache_gb, sampler, longest) < at_once:
        raise ValueError(f"with it, cache_gb={s.cache_gb:g} has no room for {at_once} requests")
    sampler.prefixes = old.prefixes
    return paced(sampler, s)


def notes(sampler: Sampler, defaults: dict[str, Any]) -> list[str]:
    """Return what is said of a model at the start: types, defaults, temperatures without drafts."""
    usual = SamplingParams(**defaults)
    found = [packed.told(sampler.target), told(defaults) if defaults else ""]
    if getattr(sampler, "pace", None) is None:
        found += [sampler.told(replace(usual, temperature=t)) for t in (0.0, usual.temperature)]
    return [line for line in dict.fromkeys(found) if line]


def read_template(path: str) -> str:
    """Return the chat template of a file; ValueError for one that cannot be read."""
    try:
        return read_text(Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template={path} cannot be read: {error}") from error


def name_of(model: str) -> str:
    """Return what clients call a model: the name of its run or folder, or its Hub id."""
    if not looks_local(model):
        return model
    folder = Path(model).expanduser().resolve()
    return (folder.parent if folder.name == "export" else folder).name


def length_of(sampler: Sampler, given: int | None) -> int:
    """Return a request's most tokens; raise ValueError for more than the model's context."""
    context = sampler.context
    if given is not None and context is not None and given > context:
        raise ValueError(f"max_length={given} is not allowed: the model's context has {context}")
    return given or context or LONGEST


def requests_within(most: float, sampler: Sampler, longest: int) -> int:
    """Return how many requests of `longest` tokens have keys and values within `most` GB."""
    slots = longest + max(sampler.margin(SamplingParams(verify=rule)) for rule in sampler.rules)
    networks = sampler.target, getattr(sampler, "drafter", None)
    needed = sum(row_bytes(network, slots) for network in networks if network is not None)
    if (found := int(1e9 * most // needed)) < 1:
        raise ValueError(
            f"cache_gb={most:g} is too little: one request of {longest} tokens needs "
            f"{needed / 1e9:.3g}. Give more, or a lower max_length"
        )
    return found


def row_bytes(network, slots: int) -> int:
    """Return the bytes of one request's keys and values."""
    config = network.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * slots * network.dtype.itemsize


if __name__ == "__main__":
    main(run)

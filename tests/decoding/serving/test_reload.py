"""A newer drafter takes the old one's place: its requests, and what changes nothing."""

import gc
import logging
import threading
import time
import weakref

import pytest
import torch

from decoding.drafting.bigrams import count
from decoding.engine.params import SamplingParams
from decoding.engine.prefixes import Prefixes
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from decoding.serving.reload import Reload
from decoding.serving.scheduler import Scheduler
from tests.support import texts, tiny
from tests.support.gated import Gated
from tests.support.results import ids
from tests.support.samplers import dflash
from tests.support.texts import PROMPTS, SEEDS, V

PROMPT = [1, 2, 3, 4]
SIX = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0}


class GatedDeer(Gated, DeerSampler):
    """DEER that waits for a word before each cycle."""


def gated(target, drafter):
    sampler = texts.deer(target, drafter, 3, GatedDeer)
    sampler.prefixes = Prefixes(10**8, part=2)
    return sampler


@pytest.fixture
def served():
    """(the scheduler, the sampler that it begins with)"""
    sampler = gated(texts.target(), texts.random_drafter())
    scheduler = Scheduler({"m": sampler}, at_once=2, waiting=4, longest=64)
    yield scheduler, sampler
    for one in (sampler, scheduler.samplers["m"]):
        one.go(10_000)
    scheduler.close()


def ask(scheduler, seed, **params):
    """A list that will have a request's result, or an error, and the event of its end."""
    answer, ended = [], threading.Event()

    def show(chunk):
        if isinstance(chunk, Exception) or chunk.result is not None:
            answer.append(getattr(chunk, "result", chunk))
            ended.set()

    given = SamplingParams(**{**SIX, **params})
    scheduler.submit([("m", PROMPT, given, seed, show)])
    return answer, ended


def alone(target, seed, **params):
    """The tokens of plain decoding."""
    plain, given = PlainSampler(target, tiny.tokenizer(V)), SamplingParams(**{**SIX, **params})
    return plain.generate([PROMPT], given, seeds=[seed])[0].token_ids


def test_running_requests_end_with_the_old_drafter_and_later_ones_have_the_new(served):
    scheduler, old = served
    new = gated(old.target, texts.drafter_of_target(old.target))
    first, ended = ask(scheduler, 1, max_new_tokens=40)
    old.until(lambda: old.log == [[0]])
    before = scheduler.loaded
    scheduler.replace("m", new)
    assert scheduler.loaded > before
    second, also = ask(scheduler, 2)
    old.until(lambda: new.log or old.go(1))  # cycles go on while the second prompt is read
    assert not ended.is_set()
    for sampler in (old, new):
        sampler.go(100)
    assert ended.wait(20)
    assert also.wait(20)
    assert {n for row in old.log for n in row} == {0}
    assert {n for row in new.log for n in row} == {1}
    assert first[0].token_ids == alone(old.target, 1, max_new_tokens=40)
    assert second[0].token_ids == alone(old.target, 2)


def test_waiting_requests_have_the_new_drafter(served):
    scheduler, old = served
    answers = [ask(scheduler, n) for n in range(3)]  # the third waits
    old.until(lambda: len(old.log) == 1)
    new = gated(old.target, texts.drafter_of_target(old.target))
    scheduler.replace("m", new)
    for sampler in (old, new):
        sampler.go(100)
    for n, (answer, ended) in enumerate(answers):
        assert ended.wait(20)
        assert answer[0].token_ids == alone(old.target, n)
    assert {n for row in new.log for n in row} >= {2}


def freed(held):
    """Whether the old drafter is freed when its last request has ended, without a collection."""
    old = gated(texts.target(), texts.random_drafter())
    scheduler = Scheduler({"m": old}, at_once=2, waiting=4, longest=64)
    drafter, new = weakref.ref(old.drafter), gated(old.target, texts.drafter_of_target(old.target))
    new.prefixes = old.prefixes
    _, ended = ask(scheduler, 1)
    old.until(lambda log=old.log: len(log) == 1)
    gc.collect()
    gc.disable()
    try:
        scheduler.replace("m", new)
        old.go(100)
        assert ended.wait(20)
        assert drafter() is not None
        held += [old][: len(held)]
        del old
        ends = time.monotonic() + (1 if held else 20)
        while drafter() is not None and time.monotonic() < ends:
            time.sleep(0.01)
        return drafter() is None
    finally:
        gc.enable()
        scheduler.close()


def test_the_old_drafter_is_freed_with_its_last_request():
    assert freed(held=[])


def test_a_sampler_that_is_held_fails_the_same_test():
    assert not freed(held=[None])


def test_a_sampler_with_fewer_rules_is_refused(served):
    scheduler, old = served
    new = gated(old.target, texts.random_drafter())
    new.rules = ("coupled",)
    with pytest.raises(ValueError, match="does not offer verify=rejection, which"):
        scheduler.replace("m", new)
    assert scheduler.samplers["m"] is old


def test_what_cannot_be_loaded_changes_nothing(served, caplog):
    scheduler, old = served
    new = gated(old.target, texts.drafter_of_target(old.target))
    found = [ValueError("cannot load\na model"), MemoryError(), new]

    def load(sampler):
        assert sampler is old
        result = found.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    reload, loaded = Reload(scheduler, "m", load), scheduler.loaded
    for said in ("cannot load a model", "MemoryError"):
        caplog.clear()
        reload.ask()
        old.until(lambda: caplog.records)
        assert [r.getMessage() for r in caplog.records] == [
            f"SIGHUP: m is served as before: {said}"
        ]
        assert caplog.records[0].levelno == logging.ERROR
        assert scheduler.samplers["m"] is old
        assert scheduler.loaded == loaded
    reload.ask()
    old.until(lambda: scheduler.samplers["m"] is new)


def samplers():
    model = texts.target()
    bigrams = count(PROMPTS, V)
    knobs = {"bigrams": bigrams, "bigram_weights": {"0": [0.5], "1": [0.5]}}
    return {
        "plain": PlainSampler(model, tiny.tokenizer(V)),
        "deer": texts.deer(model, texts.random_drafter(), 3, **knobs),
        "dflash": dflash(model, 3),
    }


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "tree"])
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}])
def test_decoding_does_not_read_torch_s_default_type(rule, penalties):
    """transformers sets it, for all threads, while another one makes a network that it loads."""
    params = SamplingParams(verify=rule, min_tokens=2, **penalties, **SIX)
    others, own = samplers(), torch.get_default_dtype()
    for name, sampler in samplers().items():
        expected = ids(sampler.generate(PROMPTS, params, seeds=SEEDS))
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = ids(others[name].generate(PROMPTS, params, seeds=SEEDS))
        finally:
            torch.set_default_dtype(own)
        assert found == expected, name

"""The thread that decodes: who comes when, what memory all groups have, and what fails alone."""

import threading

import pytest
import torch

from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.engine.running import Running
from decoding.samplers.asarm import AsarmSampler
from decoding.samplers.plain import PlainSampler
from decoding.serving.scheduler import Full, Scheduler
from tests.support import subsets, tiny
from tests.support.gated import Gated, GatedPlain

V = 12


class Watching(GatedPlain):
    """Fails in the cycles of one temperature."""

    def cycle(self, batch, params):
        self.wait([*batch.requests])
        if params.temperature == 0.125:
            raise ValueError("the model's logits are no numbers")
        return PlainSampler.cycle(self, batch, params)


def scheduled(sampler, **options):
    """(sampler, its scheduler); what is left is decoded at the end."""
    scheduler = Scheduler({"m": sampler}, at_once=3, waiting=2, longest=32, **options)
    yield sampler, scheduler
    sampler.go(10_000)
    scheduler.close()


@pytest.fixture
def watched():
    yield from scheduled(Watching())


class Client:
    """Collects what one request is shown."""

    def __init__(self):
        self.chunks, self.ended = [], threading.Event()

    def __call__(self, chunk):
        self.chunks.append(chunk)
        if isinstance(chunk, Exception) or chunk.result is not None:
            self.ended.set()

    @property
    def token_ids(self):
        return self.chunks[-1].result.token_ids


def ask(scheduler, seed=0, tokens=6, **params):
    given = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **params)
    client = Client()
    prompt, given = scheduler.prepared("m", [1, 2, 3], given)
    [job] = scheduler.submit([("m", prompt, given, seed, client)])
    return job, client


def rows(scheduler):
    return sum(running.rows for running in scheduler._groups.values())


def most_rows(sampler, scheduler):
    """Of all caches together, where one after the other leaves a group and another begins."""
    clients = [ask(scheduler, n, 3 + 4 * n, temperature=1.0)[1] for n in range(3)]
    clients += [ask(scheduler, n, 8, temperature=0.5)[1] for n in range(2)]
    most = 0
    for client in clients:
        while not client.ended.wait(0.01):
            most = max(most, rows(scheduler))
            sampler.go(1)
    return most


def test_no_more_rows_than_requests_whatever_the_groups(watched):
    assert most_rows(*watched) == 3


def test_without_giving_memory_back_there_are_more(watched, monkeypatch):
    monkeypatch.setattr(Running, "trim", lambda self: None)
    assert most_rows(*watched) > 3


def test_texts_of_all_groups(watched):
    sampler, scheduler = watched
    asked = [(n, 3 + n, {"temperature": t}) for n, t in enumerate((0.0, 1.0, 0.5))]
    clients = [ask(scheduler, *a[:2], **a[2])[1] for a in asked]
    sampler.go(200)
    plain = PlainSampler(sampler.target, sampler.tokenizer)
    for client, (seed, tokens, given) in zip(clients, asked):
        assert client.ended.wait(20)
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **given)
        (alone,) = plain.generate([[1, 2, 3]], params, seeds=[seed])
        assert client.token_ids == alone.token_ids


def test_full(watched):
    _, scheduler = watched
    for n in range(5):  # three are decoded and two wait
        ask(scheduler, n)
    with pytest.raises(Full):
        ask(scheduler)


def test_who_waits_can_be_cancelled_too(watched):
    sampler, scheduler = watched
    jobs = [ask(scheduler, n)[0] for n in range(5)]
    scheduler.cancel(jobs[4])
    scheduler.cancel(jobs[0])
    _, client = ask(scheduler, 7)
    sampler.go(200)
    assert client.ended.wait(20)
    assert scheduler.counts.requests["cancelled"] == 2
    scheduler.cancel(jobs[0])  # again, which does nothing
    assert scheduler.counts.requests["cancelled"] == 2


def test_what_fails_fails_alone(watched):
    sampler, scheduler = watched
    fine, broken = ask(scheduler, 1)[1], ask(scheduler, 2, temperature=0.125)[1]
    sampler.go(200)
    assert fine.ended.wait(20)
    assert broken.ended.wait(20)
    assert "no numbers" in str(broken.chunks[-1])
    assert len(fine.token_ids) == 6
    assert scheduler.counts.requests == {"failed": 1, "length": 1}
    assert (scheduler.running, scheduler.waiting) == (0, 0)


class Reading(GatedPlain):
    """It also waits before each pass on a prompt, and logs the tokens of these."""

    def __init__(self):
        super().__init__()
        self.fails = False
        self.gone = 0  # passes that `pause_at` let be made

    def prefill(self, batch, name, network):
        run = network.run

        def watched(tokens, *args):
            self.wait(tokens.shape[1])
            return run(tokens, *args)

        network.run = watched
        states = super().prefill(batch, name, network)
        network.run = run
        return states

    def cycle(self, batch, params):
        self.wait([*batch.requests])
        if self.fails:
            raise ValueError("the model's logits are no numbers")
        return PlainSampler.cycle(self, batch, params)

    def pause_at(self, what):
        """Let passes be made until this one waits."""

        def waits():
            if self.log[-1:] != [what] and len(self.log) > self.gone:
                self.gone += 1
                self.go(1)
            return self.log[-1:] == [what]

        self.until(waits)


@pytest.fixture
def reading():
    yield from scheduled(Reading(), prefill_tokens=4)


LONG = [*range(1, 12)]


def ask_for(scheduler, prompt, tokens):
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=0.0)
    client = Client()
    [job] = scheduler.submit([("m", prompt, params, 0, client)])
    return job, client


def ended(sampler, *clients):
    sampler.go(100)
    assert all(client.ended.wait(20) for client in clients)


def test_others_go_on_while_a_long_prompt_is_read(reading):
    sampler, scheduler = reading
    _, first = ask_for(scheduler, [1], 20)
    sampler.pause_at([0])
    _, second = ask_for(scheduler, LONG, 2)
    ended(sampler, first, second)
    assert sampler.log[1:8] == [4, [0], 4, [0], 2, [0], [0, 1]]
    plain = PlainSampler(sampler.target, sampler.tokenizer)
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, temperature=0.0)
    assert second.token_ids == plain.generate([LONG], params)[0].token_ids


def test_given_up_while_its_prompt_is_read(reading):
    sampler, scheduler = reading
    job, client = ask_for(scheduler, LONG, 9)
    sampler.pause_at(4)
    scheduler.cancel(job)
    _, other = ask_for(scheduler, [1], 3)
    ended(sampler, other)
    assert scheduler.counts.requests == {"cancelled": 1, "length": 1}
    assert not client.chunks


def test_those_beside_a_long_prompt_fail_alone(reading):
    sampler, scheduler = reading
    _, first = ask_for(scheduler, [1], 20)
    sampler.pause_at([0])
    _, second = ask_for(scheduler, LONG, 2)
    sampler.pause_at(4)
    sampler.fails = True
    sampler.pause_at([0])
    sampler.pause_at(4)
    sampler.fails = False
    ended(sampler, first, second)
    assert "no numbers" in str(first.chunks[-1])
    assert scheduler.counts.requests == {"failed": 1, "length": 1}
    assert (scheduler.running, scheduler.waiting) == (0, 0)


class Filling(Gated, AsarmSampler):
    """Infilling that waits for a word before each cycle."""


def fill_two():
    """(log of the cycles, texts, texts alone) of two requests, of which one comes later."""
    options = {"mask_id": V, "draft": "assd", "block_size": 3}
    sampler = Filling(subsets.network(V).float(), tiny.tokenizer(V), **options)
    scheduler = Scheduler({"m": sampler}, at_once=3, waiting=2, longest=32, prefill_tokens=4)
    params = SamplingParams(verify="rejection", temperature=1.0)
    prompts, clients = [[1, *[None] * 9, 2], [5, None, 4, *[None] * 6]], [Client(), Client()]

    def ask(n):
        prompt, _ = scheduler.prepared("m", prompts[n], params)
        scheduler.submit([("m", prompt, params, n, clients[n])])

    ask(0)
    sampler.go(3)
    sampler.until(lambda: len(sampler.log) == 4)
    ask(1)
    ended(sampler, *clients)
    scheduler.close()
    texts, log = [client.token_ids for client in clients], [*sampler.log]
    sampler.go(100)
    alone = [sampler.generate([p], params, seeds=[n])[0] for n, p in enumerate(prompts)]
    return log, texts, [r.token_ids for r in alone]


def test_holes_of_requests_that_come_one_after_the_other_are_filled_together():
    log, texts, alone = fill_two()
    assert texts == alone
    joined = log.index([1])  # its first cycle, with its prompt
    assert log[:joined] == [[0]] * joined
    assert joined >= 4
    assert [0, 1] in log[joined:]


def test_draws_counted_from_the_batch_s_begin_fail_the_same_test(monkeypatch):
    join = KeyedRandomness.join

    def wrong(self, fresh):
        join(self, fresh)
        self.offset = torch.zeros_like(self.offset)
        self._ahead = self._numbers(slice(None), self._ahead.shape[-1])

    monkeypatch.setattr(KeyedRandomness, "join", wrong)
    _, texts, alone = fill_two()
    assert texts[0] == alone[0]
    assert texts[1] != alone[1]


def test_what_can_never_fit_is_refused(watched):
    with pytest.raises(ValueError, match="together more than the 32 of this server"):
        ask(watched[1], tokens=30)


def test_closing_answers_what_was_taken(watched):
    sampler, scheduler = watched
    clients = [ask(scheduler, n)[1] for n in range(5)]
    sampler.go(1000)
    scheduler.close()
    assert all(client.ended.is_set() for client in clients)
    with pytest.raises(Full):
        ask(scheduler)

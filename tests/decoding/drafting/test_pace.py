"""The choice between drafts and none: it finds what is faster, and changes no text."""

import random

import pytest

from decoding.drafting import block_sampler
from decoding.drafting.pace import LATE, SOON, TRIAL, Course, Pace
from decoding.engine.params import KEYED, SamplingParams
from tests.support import texts
from tests.support.results import ids
from tests.support.samplers import dflash
from tests.support.texts import PROMPTS, SEEDS, target


def run(course, cycles, speeds):
    """The ways of so many cycles; `speeds` are tokens a second by way, or change over time."""
    taken = []
    for n in range(cycles):
        taken.append(course.way)
        speed = speeds(n) if callable(speeds) else speeds
        course.add(course.way, 10, 10 / speed[course.way])
    return taken


@pytest.mark.parametrize("faster", ["plain", "chain"])
@pytest.mark.parametrize("first", ["plain", "chain"])
@pytest.mark.parametrize("ratio", [1.1, 3.0])
def test_the_faster_way_is_taken_nearly_always(faster, first, ratio):
    speeds = {way: ratio if way == faster else 1.0 for way in ("plain", "chain")}
    taken = run(Course(("plain", "chain"), first), 1000, speeds)
    assert taken[0] == first
    again = SOON if ratio < 1.3 else LATE
    assert 2 <= 1000 - taken.count(faster) <= TRIAL * (2 + 1000 / again)
    assert {*taken[3 * TRIAL : 90]} == {faster}


def test_it_notices_that_the_other_way_has_become_faster():
    speeds = lambda n: {"plain": 1.0, "chain": 2.0 if n < 500 else 0.5}  # noqa: E731
    taken = run(Course(("plain", "chain"), "chain"), 2000, speeds)
    assert taken[:500].count("chain") > 480
    assert taken[1000:].count("plain") > 980


def test_a_cycle_after_a_change_is_not_counted():
    """A drafter then reads what it has missed."""
    course = Course(("plain", "chain"), "plain")
    run(course, TRIAL, {"plain": 1.0, "chain": 1.0})
    assert course.way == "chain"
    course.add("chain", 10, 1000.0)
    run(course, TRIAL - 1, {"plain": 1.0, "chain": 2.0})
    assert course.way == "chain"


def test_a_trial_that_costs_much_is_short_and_not_made_for_more_requests():
    course = Course(("plain", "chain"), "plain")
    taken = run(course, 60, {"plain": 1.0, "chain": 0.2})
    assert taken.count("chain") == 2  # one that is not counted, and one
    pace, given = Pace(), ((0.0,), ("plain", "chain"), "chain")
    run(pace.course(4, *given), 20, {"plain": 1.0, "chain": 0.5})
    assert run(pace.course(30, *given), LATE, {"plain": 1.0, "chain": 0.5}).count("chain") == 0
    assert pace.course(2, *given).way == "chain"  # of fewer nothing is known
    calibrated = Pace().course(16, (0.0,), ("plain", "chain"), "plain")
    assert run(calibrated, LATE, {"plain": 1.0, "chain": 0.5}).count("chain") == 0


class Wild(Pace):
    """Takes any way in any cycle."""

    def __init__(self, seed, ways):
        super().__init__()
        self.draw, self.seen, self.every = random.Random(seed), set(), ways

    def course(self, requests, kind, ways, first):
        course = super().course(requests, kind, ways, first)
        course.way = self.draw.choice(ways)
        self.seen.add(course.way)
        return course


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", KEYED)
def test_texts_are_plain_decodings_whatever_is_taken(rule, temperature):
    params = SamplingParams(max_new_tokens=24, temperature=temperature, verify=rule)
    model = target()
    expected = [row.token_ids for row in texts.plain_rows(model, params)]
    made = [dflash(model, 4), dflash(model, 4, context="shared", layers=[1])]
    made.append(texts.deer(model, texts.random_drafter(), 4))
    for sampler in made:
        for seed in range(2):
            sampler.pace = wild = Wild(seed, ("plain", "chain"))
            found = ids(sampler.generate(PROMPTS, params, seeds=SEEDS, at_once=seed * 2 + 2))
            assert found == expected
            assert wild.seen == {"plain", "tree" if rule == "tree" else "chain"}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_where_a_text_would_change_nothing_is_chosen(rule, monkeypatch):
    """Draws depend on the drafts; and a client that names a length gets it."""
    monkeypatch.setattr(block_sampler, "perf_counter", lambda: 1 / 0)
    sampler = dflash(target(), 4)
    sampler.pace = Pace()
    sampler.generate(PROMPTS, SamplingParams(max_new_tokens=4, verify=rule), seeds=SEEDS)
    sampler.generate(PROMPTS, SamplingParams(max_new_tokens=4, block_size=2), seeds=SEEDS)
    with pytest.raises(ZeroDivisionError):  # negative control
        sampler.generate(PROMPTS, SamplingParams(max_new_tokens=4), seeds=SEEDS)

"""Identity: with the same seed DEER decodes the text of plain decoding, token for token."""

import pytest

from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.randomness import request_seeds
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.lossless import noise_of_the_block, one_too_many
from tests.support.results import ids
from tests.support.texts import (
    PROMPTS,
    SEEDS,
    WARPS,
    V,
    deer,
    drafter_of_target,
    greedy_texts,
    oracle,
    plain_rows,
    plain_texts,
    random_drafter,
    target,
)


@pytest.mark.slow
@pytest.mark.parametrize("rule", KEYED)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", WARPS)
def test_keyed_deer_is_plain_decoding(name, temperature, rule):
    model = target()
    params = SamplingParams(18, temperature, verify=rule, **WARPS[name])
    expected = plain_texts(params)
    samplers = [
        deer(model, random_drafter(), 3),
        deer(model, drafter_of_target(model), 1),
        deer(model, drafter_of_target(model), 6),
        oracle(model, 2, PROMPTS, expected),
        oracle(model, 7, PROMPTS, expected),
    ]
    for sampler in samplers:
        assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == expected
    alone = samplers[0].generate(PROMPTS[2:3], params, seeds=SEEDS[2:3])
    assert ids(alone) == expected[2:3]


@pytest.mark.parametrize("rule", KEYED)
@pytest.mark.parametrize("form", [{}, {"shifted": True}], ids=str)
def test_keyed_deer_with_a_bidirectional_drafter_is_plain_decoding(rule, form):
    model, params = target(), SamplingParams(max_new_tokens=18, verify=rule)
    expected = plain_texts(params)
    form = {"attention": "bidirectional", **form}
    for drafter, k in [(random_drafter(), 3), (drafter_of_target(model), 6)]:
        found = deer(model, drafter, k, **form).generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == expected
        assert found[0].stats.drafter_passes == found[0].stats.target_passes


@pytest.mark.parametrize("rule", KEYED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_keyed_deer_with_a_causal_drafter_is_plain_decoding(rule, temperature):
    """PARD: the target itself as the drafter is always right about the first token."""
    model = target()
    params = SamplingParams(max_new_tokens=18, verify=rule, temperature=temperature)
    expected = plain_texts(params)
    for drafter, k in [(random_drafter(V), 3), (model, 1), (model, 6)]:
        sampler = DeerSampler(
            model, tiny.tokenizer(V), drafter, block_size=k, mask_id=0, attention="causal"
        )
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == expected
        sure = [r for r in found if drafter is model and 0 not in r.token_ids]  # the mask itself
        assert all(min(r.stats.emitted[:-1]) >= 2 for r in sure)
        assert sure or drafter is not model


def test_another_seed_gives_another_text():
    params = SamplingParams(max_new_tokens=18)
    first = ids(plain_rows(target(), params))
    second = ids(plain_rows(target(), params, seeds=[s + 1 for s in SEEDS]))
    assert all(a != b for a, b in zip(first, second))


def test_requests_of_one_call_get_derived_seeds():
    sampler = PlainSampler(target(), tiny.tokenizer(V))
    counted = sampler.generate([[1]] * 3, SamplingParams(max_new_tokens=9, seed=40))
    given = sampler.generate(
        [[1]] * 3, SamplingParams(max_new_tokens=9), seeds=request_seeds(40, 3)
    )
    assert ids(counted) == ids(given)


def test_neighbouring_seeds_share_no_noise():
    """With seed + i, request 1 of seed 1 would be request 0 of seed 2."""
    sampler = PlainSampler(target(), tiny.tokenizer(V))
    one, two = (
        ids(sampler.generate([[1]] * 2, SamplingParams(max_new_tokens=12, seed=s))) for s in (1, 2)
    )
    assert one[0] != one[1]
    assert one[1] != two[0]
    assert ids(sampler.generate([[1]], SamplingParams(max_new_tokens=12, seed=1))) == one[:1]
    counted = sampler.generate([[1]] * 2, SamplingParams(max_new_tokens=12), seeds=[1, 2])
    assert ids(counted)[1] == two[0]  # what it would be


class ShiftedNoise(noise_of_the_block(DeerSampler)): ...


class ForgottenRollback(one_too_many(DeerSampler)): ...


@pytest.mark.parametrize("wrong", [ShiftedNoise, ForgottenRollback])
def test_a_wrong_sampler_fails_the_same_test(wrong):
    model, params = target(), SamplingParams(max_new_tokens=18)
    expected = plain_texts(params)
    right = deer(model, random_drafter(), 3).generate(PROMPTS, params, seeds=SEEDS)
    broken = deer(model, random_drafter(), 3, wrong).generate(PROMPTS, params, seeds=SEEDS)
    assert ids(right) == expected
    assert ids(broken) != expected


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_inside_a_block_ends_the_row_there(ignore_eos):
    model = target(eos_token_id=[4, 7])
    params = SamplingParams(max_new_tokens=30, temperature=0.7, ignore_eos=ignore_eos)
    expected = plain_rows(model, params)
    # The oracle knows the text after the end, too, so a block goes on after the end.
    on = plain_rows(model, SamplingParams(max_new_tokens=40, temperature=0.7, ignore_eos=True))
    sampler = oracle(model, 6, PROMPTS, ids(on))
    found = sampler.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(found) == ids(expected)
    assert [r.finish_reason for r in found] == [r.finish_reason for r in expected]
    for r in found:
        ended = r.finish_reason == "eos"
        assert ended == (r.token_ids[-1] in (4, 7) and not ignore_eos)
        assert ended or len(r.token_ids) == 30
    assert ({"eos"} <= {r.finish_reason for r in found}) is not ignore_eos


RAGGED = [*PROMPTS, [0, 5, 0, 5, 0, 5], [9, 8, 7], [4]]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rule", VERIFY)
def test_a_batch_of_eight_is_row_for_row_a_batch_of_one(rule, temperature):
    model = target(eos_token_id=4)
    params = SamplingParams(max_new_tokens=16, temperature=temperature, verify=rule)
    seeds = [7, 70, 700, 1, 10, 100, 3, 30]
    for sampler in (
        PlainSampler(model, tiny.tokenizer(V)),
        deer(model, drafter_of_target(model), 3),
    ):
        together = sampler.generate(RAGGED, params, seeds=seeds)
        alone = [sampler.generate([p], params, seeds=[s])[0] for p, s in zip(RAGGED, seeds)]
        assert ids(together) == ids(alone)
        assert [r.stats.emitted for r in together] == [r.stats.emitted for r in alone]
        assert len({len(r.token_ids) for r in together}) > 1 or temperature == 0


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_greedy_is_the_text_of_transformers_generate(kind, penalty):
    model = target(kind, eos_token_id=4)
    params = SamplingParams(max_new_tokens=20, temperature=0.0, repetition_penalty=penalty)
    expected = greedy_texts(model, 20, repetition_penalty=penalty)
    assert ids(PlainSampler(model, tiny.tokenizer(V)).generate(PROMPTS, params)) == expected
    assert ids(deer(model, random_drafter(), 4).generate(PROMPTS, params)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [V - 4, V, V + 2, V + 9])
def test_padded_vocabularies_of_either_side(size, temperature):
    """As 151,936 against 152,064: either side may have rows that the other lacks."""
    model = target()
    sampler = DeerSampler(
        model,
        tiny.tokenizer(V),
        random_drafter(size),
        block_size=3,
        mask_id=min(size, V + 2) - 2,
        sep_id=min(size, V + 2) - 1,
    )
    params = SamplingParams(max_new_tokens=30, temperature=temperature)
    expected = plain_texts(params)
    assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == expected
    assert temperature == 0 or max(max(answer) for answer in expected) == V - 1


@pytest.mark.parametrize("rule", VERIFY)
def test_stats_add_up(rule):
    model = target(eos_token_id=4)
    params = SamplingParams(max_new_tokens=21, verify=rule)
    for sampler in (PlainSampler(model, tiny.tokenizer(V)), deer(model, random_drafter(), 3)):
        for r in sampler.generate(PROMPTS, params, seeds=SEEDS):
            assert sum(r.stats.emitted) == len(r.token_ids)
            assert r.stats.target_passes == len(r.stats.emitted)
            assert min(r.stats.emitted) >= 1
            assert max(r.stats.emitted) <= 4
            plain = isinstance(sampler, PlainSampler)
            assert r.stats.drafter_passes == (0 if plain else r.stats.target_passes)
            assert min(r.stats.target_s, r.stats.sampler_s) > 0


def test_a_drafter_that_knows_the_text_has_its_acceptance_length():
    """It misses every fourth token: cycles of four (three drafted, one the target's own)."""
    model, params = target(), SamplingParams(max_new_tokens=20)
    expected = plain_texts(params)
    found = oracle(model, 3, PROMPTS, expected).generate(PROMPTS, params, seeds=SEEDS)
    assert [r.stats.emitted for r in found] == [[4] * 5] * len(PROMPTS)
    assert found[0].stats.acceptance_length == 4
    plain = plain_rows(model, params)[0]
    assert plain.stats.acceptance_length == 1


@pytest.mark.parametrize("rule", VERIFY)
def test_bfloat16_runs(rule):
    model, drafter = target().bfloat16(), random_drafter().bfloat16()
    params = SamplingParams(max_new_tokens=12, verify=rule, repetition_penalty=1.2, top_p=0.9)
    for r in deer(model, drafter, 4).generate(PROMPTS, params, seeds=SEEDS):
        assert len(r.token_ids) == 12
        assert all(0 <= t < V for t in r.token_ids)

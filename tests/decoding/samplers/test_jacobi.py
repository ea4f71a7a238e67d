"""Jacobi decoding is plain decoding, token for token, whatever it guesses and recycles."""

import random
from itertools import cycle

import pytest
import torch

from decoding.engine.cache import RaggedCache
from decoding.engine.params import SamplingParams
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.jacobi_mr import JacobiMRSampler
from tests.support import tiny
from tests.support.lossless import noise_of_the_block
from tests.support.results import ids
from tests.support.texts import PROMPTS, SEEDS, V, plain_rows, plain_texts, target

NEW = 26


def knowing(cls, texts, miss):
    """A sampler whose first guesses are `texts` by prompt, wrong at every miss-th position.

    The true text after each miss is in the pool, too, as if it had been given up once.
    """

    class Knowing(cls):
        def begin(self, batch, params):
            super().begin(batch, params)
            for b, row in enumerate(batch.requests):
                start = len(PROMPTS[row])
                text = texts[row][: batch.tokens.shape[1] - start]
                batch.tokens[b, start : start + len(text)] = torch.tensor(text)
                batch.tokens[b, start + miss - 1 : start + len(text) : miss] += 1
                batch.tokens[b] %= V

        def recall(self, batch):
            candidates, found = super().recall(batch)
            for b, row in enumerate(batch.requests if candidates.shape[1] else ()):
                at = int(batch.lengths[b]) - len(PROMPTS[row])
                text = texts[row][at : at + candidates.shape[2]]
                candidates[b, 0, : len(text)] = torch.tensor(text)
            return candidates, found

    return Knowing


def jacobi(model, n, running, cls=JacobiSampler):
    return cls(model, tiny.tokenizer(V), block_size=n, running=running)


def multi(model, n, blocks, pool, ratio=0.5, cls=JacobiMRSampler):
    return cls(
        model, tiny.tokenizer(V), block_size=n, blocks=blocks, pool_size=pool, spawn_ratio=ratio
    )


def samplers(model, n, texts):
    """Every way of decoding, with its own guesses and with good ones."""
    for running in (True, False):
        yield jacobi(model, n, running)
        yield jacobi(model, n, running, knowing(JacobiSampler, texts, 4))
    for blocks, pool, ratio in ((1, 0, 0.5), (2, 0, 0.0), (3, 2, 0.5), (4, 3, 1.0), (1, 1, 0.3)):
        yield multi(model, n, blocks, pool, ratio)
        yield multi(model, n, blocks, pool, ratio, knowing(JacobiMRSampler, texts, 5))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 64])
def test_every_way_is_plain_decoding_in_a_ragged_batch_and_alone(n, temperature):
    model = target()
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature)
    expected = plain_texts(params)
    for sampler in samplers(model, n, expected):
        together = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(together) == expected
        if type(sampler) in (JacobiSampler, JacobiMRSampler):
            alone = sampler.generate(PROMPTS[2:3], params, seeds=SEEDS[2:3])
            assert ids(alone) == expected[2:3]
            assert alone[0].stats.emitted == together[2].stats.emitted


@pytest.mark.slow
def test_two_hundred_prompts():
    """Batches of 5, as ragged as they come, each temperature in turn; the end may fall anywhere."""
    model, draw = target(), random.Random(0)
    model.generation_config.eos_token_id = 7
    ways = [jacobi(model, 5, True), multi(model, 4, 2, 2)]
    temperatures = cycle([0.0, 0.7, 1.0])
    ended = 0
    for first in range(0, 200, 5):
        params = SamplingParams(max_new_tokens=16, temperature=next(temperatures))
        prompts = [draw.choices(range(V), k=draw.randint(1, 12)) for _ in range(5)]
        seeds = [*range(first, first + 5)]
        expected = plain_rows(model, params, prompts, seeds)
        ended += sum(r.finish_reason == "eos" for r in expected)
        for way in ways:
            assert ids(way.generate(prompts, params, seeds=seeds)) == ids(expected)
    assert 0 < ended < 200


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(1, 9))
def test_an_end_at_every_offset_of_a_block(offset):
    """The end is made to fall on the offset by asking for the token that plain decoding has."""
    model = target()
    params = SamplingParams(max_new_tokens=NEW, temperature=1.0)
    on = plain_texts(params)
    model.generation_config.eos_token_id = on[1][offset - 1]
    expected = plain_rows(model, params)
    assert expected[1].finish_reason == "eos"
    assert len(expected[1].token_ids) <= offset
    for sampler in samplers(model, 4, on):
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == ids(expected)
        assert [r.finish_reason for r in found] == [r.finish_reason for r in expected]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_warped_distributions(temperature):
    model = target()
    params = SamplingParams(
        max_new_tokens=NEW, temperature=temperature, top_k=8, top_p=0.9, repetition_penalty=1.3
    )
    expected = plain_texts(params)
    for sampler in samplers(model, 4, expected):
        assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == expected


def count_moves(monkeypatch):
    moves, move = [], RaggedCache.move

    def counted(cache, source, to):
        moves.append(bool((source != to).any()))
        move(cache, source, to)

    monkeypatch.setattr(RaggedCache, "move", counted)
    return moves


def test_recycled_guesses_win_and_their_keys_are_kept(monkeypatch):
    model, params = target(), SamplingParams(max_new_tokens=NEW, temperature=1.0)
    expected = plain_texts(params)
    moves = count_moves(monkeypatch)
    sampler = multi(model, 4, 2, 2, cls=knowing(JacobiMRSampler, expected, 3))
    found = sampler.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(found) == expected
    assert any(moves)
    without = multi(model, 4, 2, 0, cls=knowing(JacobiMRSampler, expected, 3))
    passes = [sum(r.stats.target_passes for r in x) for x in
              (found, without.generate(PROMPTS, params, seeds=SEEDS))]  # fmt: skip
    assert passes[0] < passes[1]


def test_pseudo_active_blocks_save_passes():
    """Near a uniform distribution the noise decides, so guesses after wrong ones may be right."""
    model = tiny.causal_lm(V, scale=0.7).float()
    params = SamplingParams(max_new_tokens=NEW, temperature=1.0)
    expected, passes = ids(plain_rows(model, params)), []
    for sampler in (multi(model, 4, 1, 0), multi(model, 4, 4, 0, 0.0)):
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == expected
        passes.append(sum(r.stats.target_passes for r in found))
    assert passes[1] < passes[0] < NEW * len(PROMPTS)


def test_one_block_without_a_pool_is_block_jacobi():
    model, params = target(), SamplingParams(max_new_tokens=NEW, temperature=0.7)
    a = multi(model, 5, 1, 0).generate(PROMPTS, params, seeds=SEEDS)
    b = jacobi(model, 5, False).generate(PROMPTS, params, seeds=SEEDS)
    assert [r.stats.emitted for r in a] == [r.stats.emitted for r in b]


def test_known_texts_take_as_few_passes_as_there_are_blocks():
    model, params = target(), SamplingParams(max_new_tokens=24, temperature=0.0)
    expected = plain_texts(params)
    sampler = jacobi(model, 5, True, knowing(JacobiSampler, expected, 99))
    found = sampler.generate(PROMPTS, params)
    assert [r.stats.emitted for r in found] == [[6, 6, 6, 6]] * len(PROMPTS)


def test_only_committed_tokens_are_streamed():
    model, params = target(), SamplingParams(max_new_tokens=NEW, temperature=0.7)
    expected = plain_texts(params)
    for sampler in (jacobi(model, 5, True), multi(model, 5, 3, 2)):
        streamed = [[] for _ in PROMPTS]
        for chunk in sampler.stream(PROMPTS, params, seeds=SEEDS):
            row = streamed[chunk.request]
            row += chunk.token_ids
            assert row == expected[chunk.request][: len(row)]
        assert streamed == expected


class ShiftedNoise(noise_of_the_block(JacobiMRSampler)): ...


class OneTooMany(JacobiMRSampler):
    """Wrong: a guess is emitted that was not accepted."""

    def cycle(self, batch, params):
        tokens, counts = super().cycle(batch, params)
        return tokens, (counts + 1).clamp_max(self.block_size)


class PseudoCommits(JacobiMRSampler):
    """Wrong: what a pseudo-active block accepted is never verified again."""

    def branch_pass(self, batch, guess, candidates, params):
        main, others = super().branch_pass(batch, guess, candidates, params)
        at = batch.lengths[:, None] + torch.arange(guess.shape[1])
        frozen = batch.state.frozen.gather(1, at)
        main[:, : guess.shape[1]] = torch.where(frozen, guess, main[:, : guess.shape[1]])
        return main, others


@pytest.mark.parametrize("wrong", [ShiftedNoise, OneTooMany, PseudoCommits])
def test_a_wrong_sampler_fails_the_same_test(wrong):
    # Milder logits than elsewhere: pseudo-active blocks accept much, and some of it wrongly.
    model = tiny.causal_lm(V, scale=1.0).float()
    params = SamplingParams(max_new_tokens=60, temperature=1.0)
    expected = ids(plain_rows(model, params))
    right, broken = (multi(model, 4, 3, 1, 0.0, cls) for cls in (JacobiMRSampler, wrong))
    assert ids(right.generate(PROMPTS, params, seeds=SEEDS)) == expected
    assert ids(broken.generate(PROMPTS, params, seeds=SEEDS)) != expected


def test_keys_of_the_losing_branch_fail_the_same_test(monkeypatch):
    model, params = target(), SamplingParams(max_new_tokens=NEW, temperature=1.0)
    expected = plain_texts(params)
    monkeypatch.setattr(RaggedCache, "move", lambda cache, source, to: None)
    broken = multi(model, 4, 2, 2, cls=knowing(JacobiMRSampler, expected, 3))
    assert ids(broken.generate(PROMPTS, params, seeds=SEEDS)) != expected


def test_another_rule_is_refused_where_it_would_matter():
    sampler = jacobi(target(), 4, True)
    with pytest.raises(ValueError, match=r"verify='block' is not offered .* \['coupled'\]"):
        sampler.generate([[1]], SamplingParams(verify="block"))
    sampler.generate([[1]], SamplingParams(verify="block", temperature=0, max_new_tokens=2))

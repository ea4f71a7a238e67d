"""Sample n is a function of the seed and n; steps are the same however they are split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.rows.stream import BatchSchedule, OnceEach, Stream

ROWS = [{"x": torch.tensor([i])} for i in range(13)]


def noisy(row, generator, number):
    return {**row, "noise": torch.rand(2, generator=generator)}


def sample(stream, n):
    return (int(stream[n]["x"]), *stream[n]["noise"].tolist())


def order(seed, epoch=0):
    """The rows of one epoch."""
    stream = Stream(ROWS, seed)
    return [int(stream[epoch * 13 + i]["x"]) for i in range(13)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**40), st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_sample_does_not_depend_on_the_order_of_access(seed, numbers):
    one = Stream(ROWS, seed, noisy)
    together = [sample(one, n) for n in numbers]
    assert together == [sample(Stream(ROWS, seed, noisy), n) for n in numbers]


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_each_epoch_is_another_permutation(seed):
    epochs = [order(seed, e) for e in range(6)]
    assert all(sorted(e) == list(range(13)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 6


def test_another_seed_is_another_order_and_other_noise():
    assert len({tuple(order(seed)) for seed in range(5)}) == 5
    first = Stream(ROWS, 0, noisy)[3]["noise"]
    assert not torch.equal(first, Stream(ROWS, 1, noisy)[3]["noise"])


def test_every_sample_has_its_own_noise_and_shares_none_with_the_shuffle():
    stream = Stream(ROWS, 5, noisy)
    assert len({stream[n]["noise"][0].item() for n in range(200)}) == 200
    # The same row in two epochs is corrupted twice, differently.
    again = {}
    for n in range(26):
        again.setdefault(int(stream[n]["x"]), []).append(stream[n]["noise"][0].item())
    assert all(len(set(v)) == 2 for v in again.values())
    # The permutation of epoch e and the noise of sample e come from different generators.
    permute = Stream(ROWS, 5, lambda row, g, n: {"x": torch.randperm(13, generator=g)})
    assert all(permute[e]["x"].tolist() != order(5, e) for e in range(3))


def test_no_corruption_leaves_the_row():
    stream = Stream(ROWS, 0)
    assert all(set(stream[n]) == {"x"} for n in range(3))


def step_numbers(steps, batch, micro, world):
    """[step][all sample numbers that any process takes in it]."""
    found = [[] for _ in steps]
    for rank in range(world):
        schedule = BatchSchedule(steps, batch, micro, rank, world)
        batches = list(schedule)
        assert len(batches) == len(schedule) == len(steps) * schedule.accumulate
        assert all(len(b) == micro for b in batches)
        for i, numbers in enumerate(batches):
            found[i // schedule.accumulate] += numbers
    return found


SPLITS = [(w, m) for w in (1, 2, 3, 4, 6, 12) for m in (1, 2, 3, 4, 6, 12) if 12 % (w * m) == 0]


@pytest.mark.parametrize(("world", "micro"), SPLITS)
def test_a_step_takes_the_same_samples_however_it_is_split(world, micro):
    found = step_numbers(range(4), 12, micro, world)
    assert [sorted(step) for step in found] == [list(range(12 * s, 12 * s + 12)) for s in range(4)]


def test_one_process_without_accumulation_takes_them_in_order():
    assert list(BatchSchedule(range(2), 3, 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(BatchSchedule(range(2), 4, 1, rank=1, world=2)) == [[2], [3], [6], [7]]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SPLITS), st.integers(0, 7), st.integers(0, 7))
def test_resuming_gives_the_tail(split, done, more):
    world, micro = split
    for rank in range(world):
        whole = BatchSchedule(range(done + more), 12, micro, rank, world)
        resumed = BatchSchedule(range(done, done + more), 12, micro, rank, world)
        assert list(resumed) == list(whole)[done * whole.accumulate :]


@pytest.mark.parametrize(("batch", "micro", "world"), [(12, 5, 1), (12, 4, 2), (3, 4, 1)])
def test_a_batch_that_cannot_be_split_is_refused(batch, micro, world):
    with pytest.raises(ValueError, match=f"batch_size={batch}.* {world} processes") as e:
        BatchSchedule(range(3), batch, micro, 0, world)
    assert f"micro_batch_size={micro}" in str(e.value)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5))
def test_each_held_out_sample_is_read_once(number, size, world):
    ranks = [OnceEach(number, size, rank, world) for rank in range(world)]
    batches = [list(rank) for rank in ranks]
    assert len({len(rank) for rank in (*ranks, *batches)}) == 1  # as many forwards everywhere
    counted = [
        sample
        for rank, found in zip(ranks, batches)
        for index, batch in enumerate(found)
        for sample in batch * rank.counts(index)
    ]
    assert sorted(counted) == list(range(number))
    assert all(1 <= len(batch) <= size for found in batches for batch in found)

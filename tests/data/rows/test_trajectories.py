"""Noise schedules, replayed trajectories and packed answers against numbers derived by hand."""

import pyarrow
import torch

from data.corruption.schedules import progressive_times
from data.rows.trajectories import (
    Answer,
    NoisyBlocks,
    Trajectories,
    interleave,
    nearest_state,
    replay,
)
from data.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["ab"], 257)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def times(count, window, order):
    return progressive_times(count, window, order, generator()).tolist()


def test_schedules_by_hand():
    assert times(6, 4, "linear") == [0, 0.25, 0.5, 0.75, 0, 0.25]
    assert times(6, 4, "reverse") == [0.75, 0.5, 0.25, 0, 0.75, 0.5]
    assert times(3, 1, "linear") == [0, 0, 0]
    drawn = times(400, 4, "random")
    assert {*drawn} == {0, 0.25, 0.5, 0.75}
    assert drawn != times(400, 4, "linear")


# Two blocks of three tokens; the second block is right after one pass.
ROW = dict(
    start=[7, 7, 7, 4, 9, 9], passes=[3, 2],
    changes=[2, 1, 0, 2, 0], at=[0, 2, 1, 1, 2], to=[1, 5, 2, 5, 6],
)  # fmt: skip


def test_replayed_states_are_the_stored_changes():
    first, second = replay(ROW, 3)
    assert first.tolist() == [[7, 7, 7], [1, 7, 5], [1, 2, 5], [1, 2, 5]]
    assert second.tolist() == [[4, 9, 9], [4, 5, 6], [4, 5, 6]]


def test_the_nearest_state():
    states, clean = replay(ROW, 3)[0], torch.tensor([1, 2, 5])
    # Wrong tokens of the states: 3, 1, 0, 0.
    assert nearest_state(states, clean, 3, 0.0).tolist() == [1, 2, 5]
    assert nearest_state(states, clean, 3, 1 / 3).tolist() == [1, 7, 5]
    assert nearest_state(states, clean, 3, 0.9).tolist() == [7, 7, 7]
    # After the answer's end nothing counts: of the first token alone 1, 0, 0, 0 are wrong.
    assert nearest_state(states, clean, 1, 0.0).tolist() == [1, 7, 5]


def test_a_state_by_the_tokens_after_the_first_wrong_one():
    """Five tokens, one wrong at the second: one is wrong, four are from the first wrong one on."""
    clean = torch.arange(5)
    early, late = clean.clone(), clean.clone()
    early[1], late[3:] = 9, 9
    states = torch.stack([early, late, clean])
    for t, by_wrong, by_tail in [(0.2, early, late), (0.4, late, late), (0.8, late, early)]:
        assert torch.equal(nearest_state(states, clean, 5, t), by_wrong)
        assert torch.equal(nearest_state(states, clean, 5, t, tail=True), by_tail)


def test_any_state_comes_whatever_the_ratio():
    """CLLM: at the ratio 0 of a window of one, states other than the fixed point are drawn too."""
    only, draw = answer([8], 1, [1, 2, 5], 3, 1, replay(ROW, 3)[:1]), generator()
    noise = NoisyBlocks(1, "linear", TOKENIZER, state="any")
    found = {tuple(noise(only, draw)["input_ids"][1:4].tolist()) for _ in range(40)}
    assert found == {(7, 7, 7), (1, 7, 5), (1, 2, 5)}
    fixed = NoisyBlocks(1, "linear", TOKENIZER)
    assert {tuple(fixed(only, draw)["input_ids"][1:4].tolist()) for _ in range(9)} == {(1, 2, 5)}


def answer(prompt, width, ids, n, blocks, states=()):
    padded = torch.tensor([0] * (width - len(prompt)) + prompt)
    clean = torch.tensor(ids + [0] * (blocks * n - len(ids))).view(blocks, n)
    return Answer(padded, len(prompt), clean, len(ids), list(states))


def test_interleaved_answer_by_hand():
    # Prompt a b padded to three tokens, answer c d e of two blocks of two, noisy c x and e y.
    noisy = torch.tensor([[3, 9], [5, 9]])
    sample = interleave(answer([1, 2], 3, [3, 4, 5], 2, 2), noisy, pad_id=0)
    assert {k: v.tolist() for k, v in sample.items()} == {
        "input_ids": [0, 1, 2, 3, 9, 3, 4, 5, 0, 5, 0],
        "position_ids": [0, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5],
        "document": [-1, 0, 0, 0, 0, 0, 0, 0, -1, 0, -1],
        "index": [-3, -2, -1, 0, 1, 0, 1, 2, 3, 2, 3],
        "block": [-1, -1, -1, 0, 0, 1, 1, 0, 0, 1, 1],
        "target": [[3, 4], [5, 0]],
        "present": [[True, True], [True, False]],
        "noised": [[False, True], [False, False]],
    }


def test_noise_follows_the_schedule_and_starts_at_the_first_wrong_token():
    whole = answer([8], 1, [1, 2, 5, 4, 5, 6], 3, 2, replay(ROW, 3))
    linear = NoisyBlocks(3, "linear", TOKENIZER)(whole, generator())
    # Block 1 at t = 0: its fixed point; block 2 at t = 1/3: 0 wrong tokens are nearer than 2.
    assert not linear["noised"][0].any()
    reverse = NoisyBlocks(3, "reverse", TOKENIZER)(whole, generator())
    # Block 1 at t = 2/3: 3 and 1 wrong tokens are as near, the first counts. Block 2 as above.
    assert reverse["noised"].tolist()[0] == [True, True, True]
    assert reverse["input_ids"][1:4].tolist() == [7, 7, 7]
    assert reverse["input_ids"][4:7].tolist() == [1, 2, 5]


def test_an_answer_that_is_only_its_end():
    state = torch.tensor([[6, 6], [0, 3]])
    only = answer([8, 9], 4, [0], 2, 3, [state])
    sample = NoisyBlocks(2, "reverse", TOKENIZER)(only, generator())
    assert sample["present"].sum() == 1
    assert sample["noised"].tolist()[0] == [True, False]


def test_the_largest_id_is_of_all_that_a_model_reads(tmp_path):
    plain = {"prompt_ids": [3], "answer_ids": [1, 2, 5, 4, 5, 6], **ROW}
    for number, change in enumerate(({}, {"prompt_ids": [70]}, {"start": [7, 80, 7, 4, 9, 9]})):
        table = pyarrow.Table.from_pylist([plain, {**plain, **change}])
        with pyarrow.ipc.new_file(tmp_path / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table)
        rows = Trajectories(tmp_path / f"{number}.arrow", 1, 2, 3)
        assert rows.largest_id == [9, 70, 80][number]

"""What a trajectory gains, counted by hand, and its picture."""

import torch

from data.text.tokenizer import train_tokenizer
from decoding.bench.jacobi_picture import Counts, counts, kinds, run
from tests.support import tiny

CLEAN = torch.tensor([1, 2, 3, 4])


def test_kinds_by_hand():
    states = torch.tensor([[9, 9, 3, 9], [1, 9, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4]])
    assert kinds(states, CLEAN).tolist() == [[0, 0, 1, 0], [2, 0, 1, 1], [2, 2, 2, 0], [2, 2, 2, 2]]


def test_counts_by_hand():
    # Accepted 0, 1, 3, 4: one token beyond one each. Token 3 is guessed at once and stays right;
    # token 4 is guessed in the second state, and lost.
    states = torch.tensor([[9, 9, 3, 9], [1, 9, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4]])
    assert counts(states, CLEAN) == Counts(passes=3, fast_forwarded=1, stationary=1)
    # One token a pass, as plain decoding: nothing is gained.
    slow = torch.tensor([[9, 9], [1, 9], [1, 2]])
    assert counts(slow, CLEAN[:2]) == Counts(2, 0, 0)


def test_the_command_prints_and_draws(tmp_path, capsys):
    tokenizer = train_tokenizer(["ab"], 257)
    tiny.causal_lm(257, eos_token_id=None).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    picture = tmp_path / "picture.png"
    run([f"model={tmp_path}", "prompt=a $b", "block_size=4", "max_new_tokens=10", f"out={picture}"])
    shown = capsys.readouterr().out
    assert "tokens a pass" in shown
    assert picture.stat().st_size > 2000

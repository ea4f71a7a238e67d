"""Ordinary text among answers: its share, and rows that have nothing to correct."""

import pytest
import torch

from data.rows.packing import PackedRows
from data.rows.rehearsal import Rehearsed, as_answer
from data.rows.trajectories import Answer, NoisyBlocks
from data.text.tokenizer import train_tokenizer


class Answers(list):
    shape = (3, 2, 2)


@pytest.fixture
def text(tmp_path):
    documents = [(list(range(10 * i, 10 * i + 7)), [True] * 7) for i in range(1, 41)]
    return PackedRows.build(tmp_path / "rows", documents, 7, 0, {})


def answers(count):
    clean = torch.full((2, 2), 9)
    return Answers([Answer(torch.tensor([1, 2, 3]), 3, clean, 4, [clean[:1] * 0] * 2)] * count)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_text_has_its_share_and_each_row_once(text, share):
    mixed = Rehearsed(answers(5), text, share)
    rows = [mixed[i] for i in range(len(mixed))]
    ordinary = [tuple(r.prompt.tolist()) for r in rows if r.prompt[0] != 1]
    assert len(ordinary) / len(rows) == pytest.approx(share, abs=0.02)
    assert len(set(ordinary)) == len(ordinary) > 30


def test_no_share_is_no_text_and_a_small_corpus_is_taken_whole(text):
    assert len(Rehearsed(answers(5), text, 0.0)) == 5
    assert len(Rehearsed(answers(400), text, 0.5)) == 440


def test_text_is_an_answer_without_noise(text):
    row = Rehearsed(answers(5), text, 0.5)[0]
    assert (row.prompt.tolist(), row.prompt_size, row.size) == ([10, 11, 12], 3, 4)
    noise = NoisyBlocks(2, "linear", train_tokenizer(["ab"], 257))
    sample = noise(row, torch.Generator().manual_seed(0))
    assert not sample["noised"].any()
    assert sample["target"].tolist() == [[13, 14], [15, 16]]


def test_a_short_document_leaves_a_token_to_predict():
    row = as_answer(torch.tensor([4, 5]), 3, 2, 2)
    assert (row.prompt.tolist(), row.prompt_size) == ([0, 0, 4], 1)
    assert (row.clean.tolist(), row.size) == ([[5, 0], [0, 0]], 1)

"""Teacher answers: the stored distributions are the teacher's at each token of an answer."""

import numpy as np
import pytest
import torch

from data.text.tokenizer import train_tokenizer
from decoding import load
from decoding.collectors.answers import TeacherAnswers
from decoding.collectors.teachers import Recording
from tests.support import tiny

PROMPTS = [{"id": "a", "prompt_ids": [1, 2, 3]}, {"id": "b", "prompt_ids": [4, 5, 6, 7, 8]}]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    train_tokenizer(["ab"], 257).save_pretrained(folder)
    # Token 0 ends a text, and is likely enough that answers have different lengths.
    network = tiny.causal_lm(257, scale=1.0, eos_token_id=0).float()
    with torch.no_grad():
        network.lm_head.weight[0] *= 4
    network.save_pretrained(folder)
    return str(folder)


def collected(teacher, **options):
    answers = TeacherAnswers(
        teacher, 2, [0.0, 1.0], max_new_tokens=12, seed=3, dtype="float32", **options
    )
    return answers.collect(PROMPTS)


def test_stored_distributions_are_those_of_a_teacher_forced_forward(teacher):
    network, shifted = load(teacher, dtype="float32").target, []
    for row in collected(teacher, top_k=4):
        prompt, answer = row["prompt_ids"], row["answer_ids"]
        with torch.inference_mode():
            logits = network(torch.tensor([prompt + answer])).logits[0]
        probs, ids = logits[len(prompt) - 1 : -1].softmax(-1).topk(4)
        assert row["teacher_ids"].reshape(-1, 4).tolist() == ids.tolist()
        np.testing.assert_allclose(
            row["teacher_probs"].reshape(-1, 4), probs.numpy(), rtol=2e-3, atol=1e-6
        )
        if row["temperature"] == 0:
            assert row["teacher_ids"][::4].tolist() == answer
        shifted.append(logits[len(prompt) :].topk(4).indices.tolist() == ids.tolist())
    assert len({len(row["answer_ids"]) for row in collected(teacher)}) > 1  # ragged
    assert not all(shifted)  # negative control: those of the next position are others


def test_recording_changes_no_answer(teacher):
    plain, recorded = collected(teacher), collected(teacher, top_k=4)
    assert [r["answer_ids"] for r in plain] == [r["answer_ids"] for r in recorded]
    assert "teacher_ids" not in plain[0]


def test_distributions_need_plain_decoding(teacher):
    sampler = load(teacher, sampler=["method=jacobi"])
    with pytest.raises(ValueError, match="top_k=4"):
        Recording(sampler, 4)


def test_prompts_take_the_temperatures_in_turn(teacher):
    answers = TeacherAnswers(teacher, 1, [0.0, 1.0], max_new_tokens=12, seed=3, dtype="float32")
    rows = answers.collect(PROMPTS)
    assert [(r["id"], r["temperature"]) for r in rows] == [("a", 0.0), ("b", 1.0)]
    both = {(r["id"], r["temperature"]): r["answer_ids"] for r in collected(teacher)}
    assert both.keys() == {(p["id"], t) for p in PROMPTS for t in (0.0, 1.0)}
    assert all(both[r["id"], r["temperature"]] == r["answer_ids"] for r in rows)

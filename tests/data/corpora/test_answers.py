"""Collections of answers: their reader, and the tokens that they use most."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data.corpora.answers import frequent_tokens, read_answers, read_manifest, sequences, shard_path


def write(folder, rows):
    shard_path(folder, 0).parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shard_path(folder, 0))


def row(prompt, answer, **more):
    return {"id": "x", "prompt_ids": prompt, "answer_ids": answer, **more}


@pytest.fixture
def split():
    """The split that the id 'x' is in."""
    from data.corpora.stdlib import is_held_out

    return "heldout" if is_held_out("answers to x") else "train"


def test_distributions_come_after_zeros_for_the_prompt(tmp_path, split):
    k, ids = 2, np.arange(6, dtype=np.int32)
    stored = {"teacher_ids": ids, "teacher_probs": (ids / 8).astype(np.float16)}
    write(tmp_path, [row([7, 8], [1, 2, 3], **stored)])
    (answer,) = read_answers(tmp_path, split)
    assert answer.ids == [7, 8, 1, 2, 3]
    assert answer.trained == [False, False, True, True, True]
    assert answer.columns["teacher_ids"].tolist() == [[0] * k] * 2 + [[0, 1], [2, 3], [4, 5]]
    assert answer.columns["teacher_probs"].dtype == np.float16
    assert answer.columns["teacher_probs"][2:].flatten().tolist() == [i / 8 for i in range(6)]


def test_answers_without_distributions_have_no_columns(tmp_path, split):
    write(tmp_path, [row([7], [1, 2])])
    (answer,) = read_answers(tmp_path, split)
    assert answer.columns == {}


def test_frequent_tokens_are_those_of_the_answers_then_of_the_prompts(tmp_path, split):
    assert split == "train"  # what is counted
    write(tmp_path, [row([9, 9, 9, 4], [5, 5, 3]), row([4, 9], [3, 5, 2])])
    assert frequent_tokens(tmp_path, 2).tolist() == [3, 5]
    assert frequent_tokens(tmp_path, 4).tolist() == [2, 3, 5, 9]
    assert frequent_tokens(tmp_path, 100).tolist() == [2, 3, 4, 5, 9]
    other = tmp_path / "other"
    write(other, [row([9], [7, 7, 2, 2, 2])])
    assert frequent_tokens(other, 2).tolist() == [2, 7]
    assert frequent_tokens((tmp_path, other), 2).tolist() == [2, 5]  # of both together


def test_sequences_are_prompts_with_their_answers_cut(tmp_path, split):
    assert split == "train"
    write(tmp_path, [row([9, 4], [5, 3, 1]), row([4], [3]), row([7], [2])])
    assert sequences(tmp_path, 2, 4) == [[9, 4, 5, 3], [4, 3]]
    assert len(sequences(tmp_path, 9, 4)) == 3


def test_shards_that_are_gone_or_damaged(tmp_path, split):
    write(tmp_path, [row([7], [1, 2])])
    complete = tmp_path / "complete.json"
    complete.write_text('{"shards": 1}')
    assert len([*read_answers(tmp_path, split)]) == 1
    complete.write_text('{"shards": 6}')
    with pytest.raises(ValueError, match="had 6 shards when it was complete and has 1 now"):
        [*read_answers(tmp_path, split)]
    complete.write_text('{"shards"')
    with pytest.raises(ValueError, match=r"complete\.json is damaged"):
        [*read_answers(tmp_path, split)]
    complete.unlink()
    file = shard_path(tmp_path, 0)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"00000\.parquet is damaged"):
        [*read_answers(tmp_path, split)]


def test_a_file_is_no_collection_and_the_command_that_makes_one_is_named(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"decoding\.collect recipe=deer_answers .*answers=runs"):
        read_manifest(tmp_path / "chats.jsonl")

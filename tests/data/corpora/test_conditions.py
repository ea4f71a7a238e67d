"""`where=`: conditions on the columns of data sets, collections and trajectories."""

import pyarrow
import pyarrow.parquet
import pytest

from data.corpora.answers import read_answers, shard_path
from data.corpora.conditions import Condition, conditions, keeps
from data.corpora.sources import load_documents
from data.corpora.stdlib import is_held_out
from tests.support.files import write_jsonl

IDS = [i for i in map(str, range(60)) if not is_held_out(i)]


@pytest.fixture
def scored(tmp_path):
    """Rows as OpenCodeInstruct has them: the score is a number in text."""
    rows = [
        {"id": i, "input": f"q{i}", "output": "a", "domain": "ab"[n % 2],
         "average_test_score": ["1.0", "0.9", None][n % 3]}
        for n, i in enumerate(IDS)
    ]  # fmt: skip
    return write_jsonl(tmp_path / "a.jsonl", rows)


def found(source, **options):
    return [d["id"] for d in load_documents(source, **options)]


def test_answers_that_pass_all_their_tests(scored):
    assert found(scored) == IDS
    assert found(scored, where="average_test_score>=1") == IDS[::3]
    assert found(scored, where="average_test_score >= 0.95, domain==b") == IDS[3::6]
    assert found(scored, where="average_test_score<1") == IDS[1::3]
    assert found(scored, where="domain!=b", limit=2) == [IDS[0], IDS[2]]


@pytest.mark.parametrize(
    ("value", "sign", "other", "holds"),
    [
        ("1.0", ">=", "1", True), (1, "==", "1.0", True), (0.99, ">=", "1", False),
        ("eos", "==", "eos", True), ("length", "!=", "eos", True), ("length", "==", "eos", False),
        (None, "!=", "eos", False), (2, ">", "10", False), (True, "==", "1", True),
    ],
)  # fmt: skip
def test_numbers_are_compared_as_numbers(value, sign, other, holds):
    assert keeps({"x": value}, [Condition("x", sign, other)], "here") is holds


@pytest.mark.parametrize("where", ["score", "score=1", ">=1", "score>=", "a==1,", ""])
def test_what_is_no_condition(where):
    with pytest.raises(ValueError, match=r"is no condition.*average_test_score>=1"):
        conditions(where)


def test_errors_name_the_column_and_the_place(scored, tmp_path):
    with pytest.raises(ValueError, match=r"line 1.*'score'.*average_test_score"):
        found(scored, where="score>=1")
    with pytest.raises(ValueError, match=r"domain>=1.*'a'.*=="):
        found(scored, where="domain>=1")
    with pytest.raises(ValueError, match=r"no document.*where='domain==c'"):
        found(scored, where="domain==c")
    for source in ("stdlib", "docstrings"):
        with pytest.raises(ValueError, match=rf"{source}.*where="):
            found(source, where="score>=1")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"texts.*where="):
        found(str(tmp_path / "texts"), where="score>=1")


def test_a_collection_by_the_columns_of_its_shards(tmp_path):
    rows = [
        {"id": f"p{n}", "prompt_ids": [1], "answer_ids": [n, 2], "score": n / 10,
         "finish_reason": ["eos", "length"][n % 2]}
        for n in range(10)
    ]  # fmt: skip
    shard_path(tmp_path, 0).parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shard_path(tmp_path, 0))

    def ids(where):
        both = [*read_answers(tmp_path, "train", where), *read_answers(tmp_path, "heldout", where)]
        return sorted(a.ids[1] for a in both)

    assert ids(None) == list(range(10))
    assert ids("score>=0.5") == [5, 6, 7, 8, 9]
    assert ids("score>=0.5,finish_reason==eos") == [6, 8]
    with pytest.raises(ValueError, match=r"00000.parquet, row \d+.*'grade'.*'score'"):
        ids("grade>=1")

"""Packing keeps every token with its flag, and the store on disk appears whole or not at all."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.rows.packing import COLUMNS, PackedRows, pack

PAD = -7
DOCUMENTS = [
    ([1, 2, 3, 4, 5], [False, True, True, True, True]),
    ([9], [True]),
    ([6, 7], [True, True]),
]


@st.composite
def corpora(draw):
    """Documents whose tokens are all different, so that each can be followed."""
    lengths = draw(st.lists(st.integers(0, 25), max_size=12))
    flags = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        (list(range(start, start + n)), flags[start : start + n])
        for start, n in zip(starts, lengths, strict=False)
    ]


def dropped_by_rule(documents, length):
    """Count the single tokens left over, by a model of the rule: free positions only."""
    dropped, free = 0, length
    for ids, _ in documents:
        left = len(ids)
        while left >= 2:
            free = length if free < 2 else free
            taken = min(free, left)
            left, free = left - taken, free - taken
        dropped += left
    return dropped


@given(corpora(), st.integers(2, 12))
def test_no_token_is_lost_or_doubled(documents, length):
    rows = list(pack(documents, length, PAD))
    flags = {id: flag for ids, trained in documents for id, flag in zip(ids, trained, strict=True)}
    seen = [
        (id, bool(trained))
        for row in rows
        for id, document, trained in zip(
            row["input_ids"], row["document"], row["trained"], strict=True
        )
        if document >= 0
    ]
    assert seen == [(id, flags[id]) for id, _ in seen]
    assert [id for id, _ in seen] == sorted({id for id, _ in seen})
    assert len(flags) - len(seen) == dropped_by_rule(documents, length)


@given(corpora(), st.integers(2, 12))
def test_rows_are_laid_out_as_said(documents, length):
    rows = list(pack(documents, length, PAD))
    owner = {id: index for index, (ids, _) in enumerate(documents) for id in ids}
    for row in rows:
        assert {len(row[column]) for column in COLUMNS} == {length}
        real = length - row["document"].count(-1)
        assert row["input_ids"][real:] == [PAD] * (length - real)
        assert not any(row["trained"][real:])
        assert not any(row["position"][real:])
        sizes = [row["document"].count(d) for d in range(max(row["document"]) + 1)]
        assert min(sizes) >= 2
        assert row["document"][:real] == [d for d, n in enumerate(sizes) for _ in range(n)]
        assert row["position"][:real] == [p for n in sizes for p in range(n)]
        chunks = np.split(np.array(row["input_ids"][:real]), np.cumsum(sizes)[:-1])
        assert all(len({owner[id] for id in chunk.tolist()}) == 1 for chunk in chunks)
    # Greedy: only a row's last position may stay empty before the last row.
    assert all(row["document"].count(-1) <= 1 for row in rows[:-1])


def test_pack_by_hand():
    assert list(pack(DOCUMENTS, 4, PAD)) == [
        {
            "input_ids": [1, 2, 3, 4],
            "document": [0, 0, 0, 0],
            "position": [0, 1, 2, 3],
            "trained": [0, 1, 1, 1],
        },
        {
            "input_ids": [6, 7, PAD, PAD],
            "document": [0, 0, -1, -1],
            "position": [0, 1, 0, 0],
            "trained": [1, 1, 0, 0],
        },
    ]


def test_pack_refuses_rows_of_one_token():
    with pytest.raises(ValueError, match="length=1"):
        list(pack(DOCUMENTS, 1, PAD))


def build(folder, documents=DOCUMENTS, length=4, fingerprint=None):
    return PackedRows.build(folder, documents, length, PAD, fingerprint or {"source": "test"})


def test_store_gives_the_packed_rows(tmp_path):
    built = build(tmp_path / "sub" / "rows")
    opened = PackedRows(tmp_path / "sub" / "rows")
    expected = list(pack(DOCUMENTS, 4, PAD))
    assert len(built) == len(opened) == len(expected)
    for rows in (built, opened, pickle.loads(pickle.dumps(built))):
        for index, row in enumerate(expected):
            assert {k: v.tolist() for k, v in rows[index].items()} == row
            assert {v.dtype for v in rows[index].values()} == {torch.int64}
    with pytest.raises(IndexError):
        built[len(built)]
    column = np.load(tmp_path / "sub" / "rows" / "input_ids.npy", mmap_mode="r")
    assert column.dtype == np.int32
    assert column.shape == (2, 4)


def test_the_manifest_counts_rows_and_tokens(tmp_path):
    manifest = build(tmp_path / "rows").manifest
    counts = {key: value for key, value in manifest.items() if key != "fingerprint"}
    assert counts == {
        "length": 4,
        "pad_id": PAD,
        "rows": 2,
        "tokens": 6,
        "columns": [],
    }


def test_store_works_in_a_loader_with_workers(tmp_path):
    loader = torch.utils.data.DataLoader(build(tmp_path / "rows"), batch_size=2, num_workers=1)
    [batch] = loader
    assert batch["input_ids"].shape == (2, 4)


def unread():
    raise AssertionError("the documents were read")
    yield


def test_equal_fingerprint_reads_nothing(tmp_path):
    fingerprint = {"tokenizer": "abc", "columns": ("a", "b")}
    build(tmp_path / "rows", fingerprint=fingerprint)
    assert len(build(tmp_path / "rows", unread(), fingerprint=fingerprint)) == 2


def test_other_fingerprint_or_length_builds_again(tmp_path):
    build(tmp_path / "rows")
    assert len(build(tmp_path / "rows", DOCUMENTS[:1], fingerprint={"source": "other"})) == 1
    assert build(tmp_path / "rows", length=8, fingerprint={"source": "other"})[0][
        "input_ids"
    ].shape == (8,)
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_failed_build_leaves_the_old_rows(tmp_path):
    build(tmp_path / "rows")

    def broken():
        yield DOCUMENTS[0]
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        build(tmp_path / "rows", broken(), fingerprint={"source": "other"})
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]
    assert PackedRows(tmp_path / "rows").manifest["fingerprint"] == {"source": "test"}


def test_bad_stores(tmp_path):
    with pytest.raises(ValueError, match="no document has 2"):
        build(tmp_path / "rows", [([1], [True])])
    with pytest.raises(ValueError, match=r"PackedRows\.build"):
        PackedRows(tmp_path / "rows")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        build(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_further_columns_stay_with_their_tokens(tmp_path):
    values = [np.arange(2 * n, dtype=np.float16).reshape(n, 2) + 10 * n for n in (3, 4)]
    documents = [
        (list(range(1, len(v) + 1)), [True] * len(v), {"teacher": v, "single": v[:, 0]})
        for v in values
    ]
    rows = build(tmp_path / "rows", documents, length=5)
    assert rows[0]["teacher"].dtype == torch.float16
    tokens = [
        (int(token), tuple(pair.tolist()), single.item())
        for row in (rows[0], rows[1])
        for token, pair, single, document in zip(
            row["input_ids"], row["teacher"], row["single"], row["document"]
        )
        if document >= 0
    ]
    expected = [(i + 1, tuple(pair.tolist()), pair[0]) for v in values for i, pair in enumerate(v)]
    assert tokens == expected
    assert not rows[1]["teacher"][rows[1]["document"] < 0].any()
    again = pickle.loads(pickle.dumps(rows))
    assert torch.equal(again[1]["teacher"], rows[1]["teacher"])

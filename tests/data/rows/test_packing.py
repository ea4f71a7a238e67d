"""Packing keeps texts and the prompts of answers, and the store appears whole or not at all."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.rows.packing import COLUMNS, OPEN, PackedRows, pack

PAD = -7
DOCUMENTS = [
    ([1, 2, 3, 4, 5], [False, True, True, True, True]),
    ([9], [True]),
    ([6, 7], [True, True]),
]


def corpora(flags):
    """Documents whose tokens are all different, so that each can be followed."""

    @st.composite
    def drawn(draw):
        documents, start = [], 0
        for n in draw(st.lists(st.integers(0, 25), max_size=12)):
            trained = draw(st.lists(flags, min_size=n, max_size=n))
            documents.append((list(range(start, start + n)), trained))
            start += n
        return documents

    return drawn()


texts, answers = corpora(st.just(True)), corpora(st.booleans())


def chunks(rows):
    """Return the chunks of all rows: lists of (token, whether it is trained)."""
    found = []
    for row in rows:
        columns = zip(row["input_ids"], row["document"], row["trained"], strict=True)
        tokens = [(id, document, bool(trained)) for id, document, trained in columns]
        for number in range(max(row["document"]) + 1):
            found.append([(id, t) for id, document, t in tokens if document == number])
    return found


@given(texts, st.integers(2, 12))
def test_no_token_of_a_text_is_lost_or_doubled(documents, length):
    seen = [id for chunk in chunks(pack(documents, length, PAD)) for id, _ in chunk]
    assert seen == sorted({*seen})
    sizes = [len(ids) for ids, _ in documents]
    # A single token predicts nothing; only rows of two cannot give the last one a neighbour.
    lost = sum(n % 2 if length == 2 else n == 1 for n in sizes)
    assert sum(sizes) - len(seen) == lost


@given(answers, st.integers(2, 12))
def test_an_answer_is_whole_or_loses_its_end(documents, length):
    counts = Counter()
    found = {c[0][0]: c for c in chunks(pack(documents, length, PAD, counts))}
    lost, cut, left_out = 0, 0, Counter()
    for ids, trained in documents:
        if all(trained):  # a text
            continue
        lost += sum(trained[length:])
        if any(trained[1:length]):
            assert found[ids[0]] == [*zip(ids, trained, strict=True)][:length]
            cut += len(ids) > length
        else:
            assert ids[0] not in found
            left_out["long_prompts" if any(trained[length:]) else "untrained"] += 1
    expected = {"cut_answers": cut, "cut_tokens": lost, **left_out}
    assert {key: counts[key] for key in expected} == expected
    assert counts["answers"] == sum(not all(trained) for _, trained in documents)


@pytest.mark.parametrize("size", [40, 64])
def test_no_trained_token_without_its_prompt(size):
    """The old rule trained a fifth of such tokens at position 0 of a row, after nothing."""
    documents = [
        ([1] * prompt + [2] * answer, [False] * prompt + [True] * answer)
        for prompt, answer in ((5 + i % 7, 3 + 11 * i % 50) for i in range(300))
    ]
    counts = Counter()
    found = chunks(pack(documents, size, PAD, counts))
    assert not any(chunk[0][1] for chunk in found)
    kept = sum(trained for chunk in found for _, trained in chunk)
    assert kept + counts["cut_tokens"] == sum(sum(trained) for _, trained in documents)
    running = chunks(pack([(ids, [True] * len(ids)) for ids, _ in documents], size, PAD))
    assert any(chunk[0][0] == 2 for chunk in running)  # what is cut like a text begins so


def test_answers_fill_rows_best_and_few_wait():
    """Rows of 10: sizes of 6 wait for those of 4, but no more of them than `OPEN`."""
    many = OPEN + 9
    sizes = [6] * many + [4] * many
    rows = pack([([1] * n, [False] + [True] * (n - 1)) for n in sizes], 10, PAD)
    padding = [row["document"].count(-1) for row in rows]
    assert sorted(padding) == [0] * OPEN + [2] * 4 + [4] * 9 + [6]
    assert padding[:9] == [4] * 9


def test_texts_and_answers_have_rows_of_their_own():
    text, answer = ([1, 2, 3], [True] * 3), ([4, 5, 6], [False, True, True])
    rows = list(pack([text, answer] * 3, 9, PAD))
    assert [row["input_ids"] for row in rows] == [[4, 5, 6] * 3, [1, 2, 3] * 3]


@given(texts, st.integers(2, 12))
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
        parts = np.split(np.array(row["input_ids"][:real]), np.cumsum(sizes)[:-1])
        assert all(len({owner[id] for id in part.tolist()}) == 1 for part in parts)
    # Greedy: only a row's last two positions may stay empty before the last row.
    assert all(row["document"].count(-1) <= 2 for row in rows[:-1])


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
        "largest_id": 7,
        "answers": 1,
        "cut_answers": 1,
        "cut_tokens": 1,
        "long_prompts": 0,
        "untrained": 0,
        "columns": [],
    }


def test_what_is_cut_is_said_in_one_line(tmp_path, capsys):
    build(tmp_path / "rows", [*DOCUMENTS, ([1] * 5, [False] * 4 + [True]), ([1, 1], [False] * 2)])
    assert capsys.readouterr().out == (
        "2 rows of 4 tokens: 3 answers, 1 lost their end, 1 left out, as the prompt fills a row, "
        "2 tokens of answers lost, 1 left out, as nothing in them is trained\n"
    )
    build(tmp_path / "whole", [([1, 2, 3], [False, True, True]), ([4] * 9, [True] * 9)])
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="2 answers fill rows of 4 tokens"):
        build(tmp_path / "long", [([1] * 5, [False] * 4 + [True])] * 2)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 10**12},
        {"rows": "2"},
        {"rows": True},
        {"rows": 1},
        {"length": 5},
        {"tokens": -6},
        {"largest_id": 0.5},
        {"columns": 3},
        {"columns": [["x"]]},
        {"columns": ["../other/input_ids"]},
    ],
)
def test_a_changed_manifest_is_one_line(tmp_path, change):
    build(tmp_path / "rows")
    file = tmp_path / "rows" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, **change}))
    with pytest.raises(ValueError, match=r"rows.* damaged") as caught:
        PackedRows(tmp_path / "rows")
    assert "\n" not in str(caught.value)
    file.write_text(json.dumps(manifest))
    assert len(PackedRows(tmp_path / "rows")) == 2


@pytest.mark.parametrize("array", [np.zeros((2, 4)), np.zeros((2, 4, 1), "<i4"), np.int32(3)])
def test_a_changed_column_is_one_line(tmp_path, array):
    build(tmp_path / "rows")
    np.save(tmp_path / "rows" / "document.npy", array)
    with pytest.raises(ValueError, match=r"rows is damaged: .*document\.npy"):
        PackedRows(tmp_path / "rows")


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

"""Stored hidden states: what was written is read, a row at a time, and there is room for it."""

import pickle
import shutil
from collections import namedtuple

import pytest
import torch

from data.rows import states
from data.rows.packing import PackedRows
from data.rows.states import SHARD, RowsWithStates

LENGTH, WIDTH = 6, 4


@pytest.fixture
def rows(tmp_path):
    documents = (([i, i + 1, i + 2, i + 3, i + 4, i + 5], [True] * 6) for i in range(SHARD + 3))
    packed = PackedRows.build(tmp_path / "rows", documents, LENGTH, 0, {})
    return RowsWithStates(packed.folder, {"target": "x", "layers": [1]}, WIDTH)


def of(rows, shard):
    """Numbers that say which row, token and place they are of; bfloat16 holds them."""
    r, t, w = (torch.arange(n) for n in (len(rows.rows_of(shard)), LENGTH, WIDTH))
    return (1 + r % 2)[:, None, None] + t[:, None] / 8 + w / 16


def test_what_is_written_is_read(rows):
    assert rows.missing() == [0, 1]
    rows.write(1, of(rows, 1))
    assert rows.missing() == [0]
    rows.write(0, of(rows, 0))
    assert rows.missing() == []
    again = pickle.loads(pickle.dumps(rows))  # as for a loader's processes
    for reader in (rows, again):
        for row in (0, 1, SHARD - 1, SHARD, SHARD + 2):
            shard, at = divmod(row, SHARD)
            found = reader[row]
            torch.testing.assert_close(found["states"].float(), of(rows, shard)[at], atol=0, rtol=0)
            assert found["input_ids"][0] == row


def test_others_states_are_elsewhere(rows):
    other = RowsWithStates(rows.folder, {"target": "x", "layers": [2]}, WIDTH)
    rows.write(0, of(rows, 0))
    assert other.missing() == [0, 1]


def test_room(rows, monkeypatch, capsys):
    needed = (SHARD + 3) * LENGTH * WIDTH * 2
    rows.check_size(needed)
    assert f"at most {needed / 1e6:.1f} MB to write" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"data\.stored_states allows") as error:
        rows.check_size(needed - 1)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("U", "free")(needed - 1))
    with pytest.raises(ValueError, match="only 0 MB are free"):
        rows.check_size(needed)
    rows.write(0, of(rows, 0))
    rows.check_size(needed)  # what is there needs no more room


def test_a_shard_is_there_whole_or_not_at_all(rows, monkeypatch):
    def cut(tensors, file):
        file.write_bytes(b"half")
        raise OSError("cut")

    monkeypatch.setattr(states, "save_file", cut)
    with pytest.raises(OSError, match="cut"):
        rows.write(0, of(rows, 0))
    assert rows.missing() == [0, 1]
    assert [*rows.states_folder.iterdir()] == []

"""Traces on disk: found by their whole key, and refused if damaged or of another key."""

import pytest
import torch

from decoding.calibration.traces import read_trace, write_trace

KEY = {"model": "0123", "seed": 0, "prompt": [3, 1, 4]}
TRACE = torch.arange(-2, 34, dtype=torch.int16).view(2, 9, 2)


def test_a_trace_is_found_by_its_whole_key(tmp_path):
    folder = tmp_path / "traces"
    assert read_trace(folder, KEY) is None
    write_trace(folder, KEY, TRACE)
    write_trace(folder, KEY, TRACE)  # as another process does that has decoded it meanwhile
    found = read_trace(folder, KEY)
    assert found.dtype == TRACE.dtype
    assert torch.equal(found, TRACE)
    for other in ({"seed": 1}, {"prompt": [3, 1]}, {"model": "4567"}):
        assert read_trace(folder, KEY | other) is None
    assert len([*folder.iterdir()]) == 1


def truncated(file):
    file.write_bytes(file.read_bytes()[:-40])


def flipped(file):
    content = bytearray(file.read_bytes())
    at = content.index(b"trace.npy") + 60
    content[at] ^= 1
    file.write_bytes(content)


def foreign(file):
    file.write_text("not a trace")


def moved(file):
    write_trace(file.parent / "other", KEY | {"seed": 1}, TRACE)
    (other,) = (file.parent / "other").iterdir()
    other.replace(file)


@pytest.mark.parametrize("spoilt", [truncated, flipped, foreign, moved])
def test_a_damaged_or_foreign_file_is_named(tmp_path, spoilt):
    write_trace(tmp_path, KEY, TRACE)
    (file,) = tmp_path.iterdir()
    spoilt(file)
    with pytest.raises(ValueError, match="remove it") as error:
        read_trace(tmp_path, KEY)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)

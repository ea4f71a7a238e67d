"""A checkpoint cannot make its reader call anything."""

import os

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load, save

from trainers.export import run as export_command
from trainers.runs.checkpoint_files import step_of
from trainers.runs.safe_load import METADATA, Refused, check_folder, read_file


class Call:
    """What calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "was_here"


def test_a_file(tmp_path, mark):
    path = tmp_path / "step-3.ckpt"
    torch.save({"global_step": 3, "state_dict": {"a": torch.ones(2)}}, path)
    assert step_of(path) == 3
    torch.save({"global_step": 3, "x": Call(os.mkdir, str(mark))}, path)
    for read in (read_file, step_of):
        with pytest.raises(Refused, match=r"step-3\.ckpt asks to call posix\.mkdir.*nothing of it"):
            read(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the negative control: it would have called
    assert mark.exists()


def test_by_the_commands(lab, tmp_path, mark):
    path = tmp_path / "step-1.ckpt"
    torch.save({"global_step": 1, "state_dict": Call(os.mkdir, str(mark))}, path)
    with pytest.raises(Refused, match=r"posix\.mkdir"):
        lab.fit("ar_target", "name=hostile", f"resume={path}")
    run = lab.fit("ar_target").parent
    with pytest.raises(Refused, match=r"posix\.mkdir"):
        export_command([f"run={run}", f"checkpoint={path}"])
    assert not mark.exists()


def stolen(module, name, argument):
    """A pickle that calls module.name(argument), name with dots or without."""
    text = b"\x80\x04"
    for part in (module, name):
        text += b"\x8c" + bytes([len(part)]) + part.encode()
    text += b"\x93\x8c" + bytes([len(argument)]) + argument.encode() + b"\x85R."
    return text


@pytest.mark.parametrize(
    "name",
    [
        ("posix", "mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch", "load"),
        ("builtins", "eval"),
    ],
)
def test_metadata_of_shards(tmp_path, mark, name):
    shards = tmp_path / "step-3.ckpt"
    save({"a": torch.ones(3), "rate": 0.5}, checkpoint_id=shards, no_dist=True)
    check_folder(shards)
    found = {"a": torch.zeros(3), "rate": 0.0}
    load(found, checkpoint_id=shards, no_dist=True)
    assert found["a"].tolist() == [1, 1, 1]
    (shards / METADATA).write_bytes(stolen(*name, str(mark)))
    with pytest.raises(Refused, match=f"asks to call {name[0]}.{name[1]}"):
        check_folder(shards)
    assert not mark.exists()


def test_metadata_would_have_called(tmp_path, mark):
    """Negative control: torch's own reader runs it."""
    shards = tmp_path / "step-3.ckpt"
    save({"a": torch.ones(3)}, checkpoint_id=shards, no_dist=True)
    (shards / METADATA).write_bytes(stolen("posix", "mkdir", str(mark)))
    with pytest.raises(AttributeError):
        FileSystemReader(shards).read_metadata()
    assert mark.exists()

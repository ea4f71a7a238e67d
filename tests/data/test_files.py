"""Atomic writes against errors in the middle, a kill and concurrent writers."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from safetensors import SafetensorError

from data import files
from data.files import atomic_folder, atomic_write, put_in_place, read_array, read_json
from recipes.command import one_line


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def fill(folder, text):
    for part in "abc":
        (folder / part).write_text(text)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("before", [None, "before"])
def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path, before, sync):
    file = tmp_path / "a.txt"
    if before is not None:
        file.write_text(before)
    with atomic_write(file, sync=sync) as temporary:
        temporary.write_text("after")
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".")
        assert (file.read_text() if file.exists() else None) == before
    assert file.read_text() == "after"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_an_error_in_the_middle_of_a_file_leaves_what_was_there(tmp_path, error):
    file = tmp_path / "a.txt"
    file.write_text("before")

    def write():
        with atomic_write(file) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert file.read_text() == "before"
    assert names(tmp_path) == ["a.txt"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("before")
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a.txt"):
        pass
    assert (tmp_path / "a.txt").read_text() == "before"


def test_sync_reaches_every_part_and_the_folder(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "_sync", lambda path: synced.append(path.name))
    (tmp_path / ".new" / "deep").mkdir(parents=True)
    fill(tmp_path / ".new" / "deep", "x")
    put_in_place(tmp_path / ".new", tmp_path / "whole", sync=True)
    assert sorted(synced) == sorted([".new", "deep", "a", "b", "c", tmp_path.name])
    synced.clear()
    with atomic_write(tmp_path / "a.txt") as temporary:
        temporary.write_text("")
    assert not synced


@pytest.mark.parametrize("before", [None, "empty", "full"])
def test_a_folder_is_replaced_whole(tmp_path, before):
    folder = tmp_path / "whole"
    if before is not None:
        folder.mkdir()
    if before == "full":
        fill(folder, "before")
        (folder / "more").write_text("of the old one")
    with atomic_folder(folder) as temporary:
        fill(temporary, "after")
    assert names(tmp_path) == ["whole"]
    assert {p.name: p.read_text() for p in folder.iterdir()} == dict.fromkeys("abc", "after")


def test_an_error_in_the_middle_of_a_folder_leaves_what_was_there(tmp_path):
    (tmp_path / "whole").mkdir()
    fill(tmp_path / "whole", "before")

    def write():
        with atomic_folder(tmp_path / "whole") as temporary:
            (temporary / "a").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert names(tmp_path) == ["whole"]
    assert (tmp_path / "whole" / "a").read_text() == "before"


def test_a_failed_rename_of_a_folder_puts_the_old_one_back(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    fill(tmp_path / "whole", "before")
    replace, calls = os.replace, []

    def third_call_fails(a, b):
        calls.append((a, b))
        if len(calls) == 3:  # the folder was refused, the old one is set aside; now the new one
            raise OSError("no")
        replace(a, b)

    monkeypatch.setattr("os.replace", third_call_fails)
    with pytest.raises(OSError, match="no"), atomic_folder(tmp_path / "whole") as temporary:
        fill(temporary, "after")
    assert len(calls) == 4
    assert names(tmp_path) == ["whole"]
    assert (tmp_path / "whole" / "a").read_text() == "before"


KILLED = """
import sys, time
from pathlib import Path
from data.files import {form}
path = Path(sys.argv[1])
with {form}(path) as temporary:
    file = temporary / "a" if temporary.is_dir() else temporary
    with file.open("w") as stream:
        stream.write("half")
        stream.flush()
        print("half", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("form", ["atomic_write", "atomic_folder"])
def test_a_killed_write_leaves_what_was_there(tmp_path, form):
    path = tmp_path / "whole"
    with getattr(files, form)(path) as temporary:
        fill(temporary, "before") if form == "atomic_folder" else temporary.write_text("before")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(form=form), str(path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert ((path / "a") if form == "atomic_folder" else path).read_text() == "before"
    left = [name for name in names(tmp_path) if name != "whole"]
    assert len(left) == 1, "the process was killed before its write"
    assert left[0].startswith(".whole.")


def concurrently(write, read, writers=4, times=40):
    """Errors of writers that write at once, and what a reader saw meanwhile."""
    errors, seen, done = [], set(), threading.Event()

    def loop(number):
        try:
            for _ in range(times):
                write(str(number) * 20_000)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(writers)]
    watcher = threading.Thread(target=lambda: watch(read, seen, done))
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    return errors, seen


def watch(read, seen, done):
    while not done.is_set():
        seen.add(read())
        time.sleep(0.0005)


WHOLE = {str(n) * 20_000 for n in range(4)}


def test_a_reader_never_sees_a_part_of_what_several_write(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("0" * 20_000)

    def write(text):
        with atomic_write(file) as temporary, temporary.open("w") as stream:
            for start in range(0, len(text), 1000):
                stream.write(text[start : start + 1000])
                stream.flush()

    errors, seen = concurrently(write, file.read_text)
    assert not errors
    assert seen <= WHOLE
    assert names(tmp_path) == ["a.txt"]


def test_a_reader_does_see_parts_of_a_plain_write(tmp_path):
    """Negative control."""
    file = tmp_path / "a.txt"
    file.write_text("0" * 20_000)

    def write(text):
        with file.open("w") as stream:
            for start in range(0, len(text), 1000):
                stream.write(text[start : start + 1000])
                stream.flush()
                time.sleep(0.0002)

    _, seen = concurrently(write, file.read_text)
    assert not seen <= WHOLE


def test_several_writers_of_a_folder_leave_one_whole(tmp_path):
    folder = tmp_path / "whole"

    def write(text):
        with atomic_folder(folder) as temporary:
            fill(temporary, text)

    errors, _ = concurrently(write, lambda: None)
    assert not errors
    assert names(tmp_path) == ["whole"]
    assert len({p.read_text() for p in folder.iterdir()}) == 1
    assert names(folder) == ["a", "b", "c"]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b"[" * 100_000, b"[]", b"null", b"3"])
def test_a_damaged_json_file_is_named(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_bytes(b'{"a": [1]}')
    assert read_json(file) == {"a": [1]}
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is damaged: "):
        read_json(file)


def test_a_json_file_without_what_is_needed(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    assert read_json(file, ["a"]) == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.json is damaged: it has no 'b'"):
        read_json(file, ["a", "b"])


@pytest.mark.parametrize("mmap", [True, False])
def test_a_cut_array_is_named(tmp_path, mmap):
    file = tmp_path / "a.npy"
    np.save(file, np.arange(30))
    assert read_array(file, mmap).tolist() == [*range(30)]
    whole = file.read_bytes()
    for length in (0, 40, 200):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.npy is damaged .*: remove "):
            read_array(file, mmap)


@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
class TestFullDisk:
    """The error of a write that names no file names the one that was to be written."""

    def failed(self, write, path, error):
        with pytest.raises(OSError) as found, write(path):
            raise error
        assert not path.exists()
        return found.value

    def test_the_path_is_named(self, tmp_path, write):
        found = self.failed(write, tmp_path / "x", OSError(errno.ENOSPC, "No space left"))
        assert one_line(found).startswith(f"the disk is full ({tmp_path / 'x'}): ")

    def test_a_name_that_is_there_stays(self, tmp_path, write):
        found = self.failed(write, tmp_path / "x", OSError(errno.ENOSPC, "No space left", "y"))
        assert found.filename == "y"

    def test_safetensors_own_error_is_one_too(self, tmp_path, write):
        told = "I/O error: No space left on device (os error 28)"
        found = self.failed(write, tmp_path / "x", SafetensorError(told))
        assert one_line(found).startswith(f"the disk is full ({tmp_path / 'x'}): ")
        with pytest.raises(SafetensorError, match="header"), write(tmp_path / "x"):
            raise SafetensorError("a damaged header")

"""Two commands do not work on one folder at once, and a claim leaves nothing behind."""

import signal
import subprocess
import sys

import pytest

from recipes.folders import LOCK, RANKS, claimed

HOLD = """
import sys, time
from pathlib import Path
from recipes.folders import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_named_until_it_is_killed(tmp_path):
    folder = tmp_path / "runs" / "a"
    other = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        busy = rf"another process works on {folder}: wait"
        with pytest.raises(ValueError, match=busy), claimed(folder):
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    with claimed(folder):
        assert (folder / LOCK).exists()


def test_nothing_is_left_of_a_claim_that_wrote_nothing(tmp_path):
    folder = tmp_path / "runs" / "recipe" / "name"
    with pytest.raises(KeyError), claimed(folder):
        raise KeyError
    assert not (tmp_path / "runs").exists()
    with claimed(folder):
        (folder.parent.parent / "input").mkdir()  # of the command, but not in its folder
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["input"]
    with claimed(folder):
        (folder / "a").write_text("")
    assert (folder / "a").exists()


@pytest.mark.parametrize("rank", RANKS)
def test_the_other_processes_of_a_command_do_not_wait(tmp_path, monkeypatch, rank):
    with claimed(tmp_path):
        monkeypatch.setenv(rank, "1")
        with claimed(tmp_path):
            pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    why = r"cannot write into the folder .*file/runs \(Not a dir"
    with pytest.raises(ValueError, match=why), claimed(tmp_path / "file" / "runs"):
        pass

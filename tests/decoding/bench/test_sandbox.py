"""Programs of every kind of bad end; a right one passes under the same limits."""

import os
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from decoding.bench import sandbox
from decoding.bench.sandbox import Limits, check, execute

LIMITS = Limits(cpu_seconds=1, wall_seconds=20, memory=256, file=1)


def outcome(program, **limits):
    return execute(textwrap.dedent(program), replace(LIMITS, **limits))


PASSING = {
    "nothing": "",
    "asserts": "import math, re, collections\nassert math.sqrt(4) == 2",
    "a file in its folder": """
        import os, shutil, tempfile
        os.mkdir("a")
        with open("a/b", "w") as file:
            file.write("text")
        os.rename("a/b", "a/c")
        shutil.rmtree("a")
        assert os.listdir(".") == []
        with tempfile.TemporaryFile() as file:
            file.write(b"text")
    """,
    "a data class": """
        from __future__ import annotations
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        assert Point(1).x == 1
    """,
    "much output": "for _ in range(300_000): print('a' * 20)",
    "an error that it handles": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass",
}


@pytest.mark.parametrize("name", PASSING)
def test_a_right_program_passes(name):
    assert outcome(PASSING[name]) == ("passed", "")


FAILING = [
    ("assert 1 == 2, 'not so'", "AssertionError: not so"),
    ("1 / 0", "ZeroDivisionError"),
    ("def f(:", "SyntaxError"),
    ("while True: input()", "EOFError"),
    ("x = bytearray(2**30)", "MemoryError"),
    ("x = []\nwhile True: x.append('a' * 10**6)", ""),
    ("open('a', 'wb').write(bytes(2**21))", "File too large"),
    ("def f(): f()\nf()", "RecursionError"),
]


@pytest.mark.parametrize(("program", "error"), FAILING)
def test_a_wrong_program_fails(program, error):
    found = outcome(program)
    assert found.outcome == "failed"
    assert error in found.error


@pytest.mark.parametrize(
    "early",
    [
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "exit()",
        "import os; os._exit(0)",
        """print('{"token": "", "error": ""}')\nimport os; os._exit(0)""",
        """import os; os.write(3, b'{"error": ""}'); os._exit(0)""",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, os; atexit.register(os._exit, 0); exit()",
    ],
)
def test_leaving_before_the_tests_is_no_pass(early):
    assert outcome(f"{early}\nassert False").outcome == "failed"
    assert outcome(early).outcome == "failed"


@pytest.mark.parametrize(
    ("program", "limits", "error"),
    [
        ("while True: pass", {}, "more than 1 s of CPU"),
        ("import signal; signal.signal(24, signal.SIG_IGN)\nwhile True: pass", {}, "of CPU"),
        ("import time; time.sleep(60)", {"wall_seconds": 1.0}, "more than 1 s"),
    ],
)
def test_an_endless_one_times_out(program, limits, error):
    found = outcome(program, **limits)
    assert found.outcome == "timed out"
    assert error in found.error


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os\nwhile True: os.fork()", "os.fork is not allowed"),
        ("import subprocess\nsubprocess.run(['true'])", "subprocess.Popen is not allowed"),
        ("import os\nos.system('true')", "os.system is not allowed"),
        ("import multiprocessing as m\nm.Process(target=print).start()", "os.fork"),
        # No audit hook refuses this one, only the kernel's limit does.
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("import socket\nsocket.socket()", "socket.__new__ is not allowed"),
        ("import ctypes\nctypes.CDLL(None)", "ctypes"),
    ],
)
def test_no_further_process_thread_or_connection(program, error):
    found = outcome(program)
    assert found.outcome == "failed"
    assert error in found.error


@pytest.mark.parametrize(
    "attack",
    [
        "open(path, 'w').close()",
        "open(path, 'a').write('x')",
        "os.truncate(path, 0)",
        "os.remove(path)",
        "os.rename(path, 'here')",
        "os.chmod(path, 0)",
        "os.open(path, os.O_RDWR)",
        "pathlib.Path(path).write_text('')",
        "shutil.rmtree(os.path.dirname(path))",
        "os.unlink('victim', dir_fd=os.open(os.path.dirname(path), os.O_RDONLY))",
        "os.symlink(path, 'link')",
        "open(os.path.relpath(path), 'w')",
        "open(os.path.join(os.path.dirname(path), 'new'), 'w')",
    ],
)
def test_nothing_is_written_outside_its_folder(attack, tmp_path):
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    victim.chmod(0o666)
    found = outcome(f"import os, pathlib, shutil\npath = {str(victim)!r}\n{attack}")
    assert (found.outcome, found.error[:15]) == ("failed", "PermissionError")
    assert victim.read_text() == "untouched"
    assert [p.name for p in tmp_path.iterdir()] == ["victim"]


def test_without_the_guard_it_is_written_and_the_kernel_still_refuses_a_fork(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    victim.chmod(0o666)
    text = Path(sandbox.__file__).read_text().replace("sys.addaudithook(", "id(")
    monkeypatch.setattr(Path, "read_text", lambda self, encoding=None: text)
    assert outcome(f"open({str(victim)!r}, 'w').close()").outcome == "passed"
    assert victim.stat().st_size == 0
    found = outcome("import os\nos.fork()")
    assert found == ("failed", "BlockingIOError: [Errno 11] Resource temporarily unavailable")


def test_neither_environment_nor_rights_are_handed_on(monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    program = "import os\nassert 'SECRET' not in os.environ and 'HOME' not in os.environ\n"
    program += "assert os.geteuid() != 0 and os.listdir('.') == []"
    assert outcome(program) == ("passed", "")
    assert os.environ["SECRET"] == "token"


def test_mistakes():
    check(LIMITS)
    with pytest.raises(ValueError, match="memory=0 is not allowed: it must be above 0"):
        Limits(memory=0)
    with pytest.raises(ValueError, match="even an empty program timed out"):
        check(replace(LIMITS, wall_seconds=0.001))

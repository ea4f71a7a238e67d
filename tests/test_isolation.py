"""A test that leaves the process changed fails; every test draws the same numbers in any order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).parents[1]
LEAKS = {
    "os.environ['LEFT']": "os.environ['LEFT'] = '1'",
    "SIGUSR1": "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "inference mode": "torch.left = torch.inference_mode(); torch.left.__enter__()",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
}
TESTS = """
import os, random, signal
import numpy, pytest, torch

@pytest.mark.parametrize("leak", {leaks!r})
def test_leak(leak):
    exec(leak)

def test_drawn():
    drawn = random.random(), numpy.random.rand(), torch.rand(1, dtype=torch.float32).item()
    print("drawn", drawn)
"""


def outcomes(folder, *options):
    """What pytest prints of the tests above, under this suite's conftest."""
    command = [sys.executable, "-m", "pytest", "-rA", "-c", "/dev/null", "-p", "tests.conftest"]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", *options, str(folder)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaking")
    (folder / "test_leaking.py").write_text(TESTS.format(leaks=[*LEAKS.values()]))
    return folder


@pytest.fixture(scope="module")
def printed(folder, forked):
    return [outcomes(folder, f"--randomly-seed={seed}") for seed in (1, 2)]


@pytest.mark.parametrize("name", LEAKS)
def test_what_a_test_leaves_is_its_failure(printed, name):
    for lines in printed:
        (error,) = [line for line in lines if line.startswith("ERROR") and LEAKS[name] in line]
        assert name in error


def test_numbers_do_not_hang_on_the_order(printed):
    drawn = [[x for x in lines if x.startswith("drawn")] for lines in printed]
    assert len(drawn[0]) == 1
    assert drawn[0] == drawn[1]
    orders = [[x for x in lines if x.startswith("ERROR")] for lines in printed]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_can_be_had_again(printed, seed):
    assert any(f"SEED={seed}" in line for line in printed[seed - 1])

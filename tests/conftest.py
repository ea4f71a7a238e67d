import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AttentionInterface

from models.attention import GROUPED, WRITTEN_OUT, grouped, written_out
from tests.support import forked as forks
from tests.support.lab import Lab
from tests.support.process_state import changed, process_state, seed_everything

# Tiny models: a second thread only waits, in the processes that tests start too (and `make test`
# shares the cores among workers).
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    """Only the order is random: see `pytest_runtest_setup`."""
    config.option.randomly_reset_seed = False


def pytest_collection_finish():
    """Garbage is what tests leave: modules that their collection has imported stay."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup():
    """Generators as they are when the test runs alone, for its wider fixtures too."""
    seed_everything()


def pytest_runtest_call():
    seed_everything()


def pytest_terminal_summary(terminalreporter, config):
    """How to run in this order again; -q hides the header that says it."""
    seed = config.getoption("randomly_seed", None)
    if isinstance(seed, int):
        terminalreporter.write_line(f"in this order again: the same command with SEED={seed}")


@pytest.fixture(autouse=True)
def clean_process():
    """Fails a test that leaves the process changed: it would pass or fail others by their order."""
    before = process_state()
    yield
    found = changed(before, process_state())
    assert not found, f"the test leaves these changed: {found}"


@pytest.fixture(autouse=True)
def as_before_a_command(clean_process):
    """Takes back what a command changes for good, as it may: it is alone in its process."""
    log, verbosity = logging.getLogger("pytorch_lightning"), transformers.logging.get_verbosity()
    level, bars = log.level, transformers.logging.is_progress_bar_enabled()
    kept = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUDA_DEVICE_ORDER", "TRITON_CACHE_DIR")
    values = {name: os.environ.get(name) for name in (*kept, "TRITON_PTXAS_PATH")}
    yield
    log.setLevel(level)
    transformers.logging.set_verbosity(verbosity)
    if bars:
        transformers.logging.enable_progress_bar()
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="module")
def forked():
    """Python commands that a module's tests start are forks: see `tests.support.forked`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forks.Forked)
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The whole chain of the lab scale, made once: do not change what it holds."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    lab.fit("ar_target")
    lab.fit("diffusion_adapt")
    lab.collect()
    lab.fit("deer_stage1")
    lab.fit("deer_stage2")
    return lab


@pytest.fixture(autouse=True)
def own_attention():
    """Our attention functions under their names, where an export's copy of them was imported."""
    for name, function in ((WRITTEN_OUT, written_out), (GROUPED, grouped)):
        AttentionInterface.register(name, function)


@pytest.fixture
def vllm_stub(monkeypatch):
    """An interpreter, this one, whose workers find the stub of vLLM (tests/support/stub_vllm)."""
    stub = Path(__file__).parent / "support" / "stub_vllm"
    path = os.pathsep.join([str(stub), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return sys.executable


# The fork server is the last: a pytest that a test starts has all of this module, too, and no test
# has left a thread, a file or a process group.
# What is imported now stays: collecting garbage need not look at it, here and in the forks, which
# would copy each page that they look at.
if not torch.cuda.device_count():  # where it would begin CUDA, which no fork can use then
    import deepspeed  # noqa: F401  # an export's save_pretrained imports it where it is installed
gc.collect()
gc.freeze()
forks.start_server()

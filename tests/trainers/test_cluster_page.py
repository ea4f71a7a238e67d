"""The commands of docs/how_to/cluster.md, at a tiny size; a worker that is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.lab import finish
from tests.support.runs import curve, rows, same_weights
from trainers.runs.checkpoint_files import checkpoint_files

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "cluster.md"
STEPS = ("trainer.max_steps=30", "trainer.log_every=1", "trainer.validate_every=30")
OWN = ("recipe=", "scale=", "name=")  # what the lab gives itself


def on_the_page(*words):
    """The first command of the page that has these words, as a list."""
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    return next(line.split() for line in lines if {*words} <= {*line.split()})


def tiny(command, arguments, processes):
    """Make a command's size tiny, and torchrun's interpreter a fork; the rest stays literal."""
    command = [word for word in command if not word.startswith(OWN)]
    if command[0] == "torchrun":
        command[:1] = ["python", "-m", "torch.distributed.run"]
    command[0] = sys.executable
    if "--nproc-per-node" in command:
        command[command.index("--nproc-per-node") + 1] = str(processes)
    sizes = {"trainer.devices=8": f"trainer.devices={processes}"}
    return [*(sizes.get(word, word) for word in command), *arguments]


def start(command):
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def whole(lab):
    """The folder of an undisturbed run of one process."""
    return lab.fit("deer_stage2", *STEPS, "name=page").parent


def fit_arguments(lab, name):
    ours = lab.arguments("deer_stage2", *STEPS, "trainer.micro_batch_size=2", f"name={name}")
    return [word for word in ours if word not in ("trainer.micro_batch_size=4",)]


def as_one(folder, whole):
    one, two = curve(whole), curve(folder)
    assert one.keys() == two.keys()
    return max(abs(one[s] - two[s]) for s in one) <= 2e-6


@pytest.mark.parametrize("program", ["python", "torchrun"])
def test_one_machine(lab, whole, program):
    words = ["python"] if program == "python" else ["torchrun", "--standalone"]
    command = on_the_page(*words, "trainers.fit", "strategy=fsdp2", "trainer.devices=8")
    finish(start(tiny(command, fit_arguments(lab, f"by_{program}"), 2)))
    assert as_one(whole.with_name(f"by_{program}"), whole)


def test_two_machines(lab, whole):
    command = tiny(on_the_page("torchrun", "--node-rank"), fit_arguments(lab, "machines"), 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = {"node0": "127.0.0.1", command[command.index("--master-port") + 1]: port}
    command = [here.get(word, word) for word in command]
    rank = command.index("--node-rank") + 1
    both = [start([*command[:rank], node, *command[rank + 1 :]]) for node in ("0", "1")]
    said = [finish(machine) for machine in both]
    assert as_one(whole.with_name("machines"), whole)
    assert ["exported to" in output for output in said] == [True, False]


def test_a_worker_is_killed_and_the_number_of_processes_changes(lab, whole):
    """Two processes, of which one is killed; then one, which gets a signal; then two again."""
    folder = whole.with_name("killed_worker")

    def begin():
        command = on_the_page("torchrun", "--standalone", "trainers.fit")
        return start(tiny(command, fit_arguments(lab, "killed_worker"), 2))

    def wait_for(process, step):
        while process.poll() is None and newest() < step:
            time.sleep(0.005)

    def newest():
        found = checkpoint_files(folder / "checkpoints")
        return int(found[-1].stem.removeprefix("step-")) if found else 0

    two = begin()
    wait_for(two, 4)
    psutil.Process(two.pid).children()[-1].kill()
    output, _ = two.communicate(timeout=120)
    assert two.returncode != 0, output
    assert not (folder / "export").exists()
    killed_at = newest()
    assert 4 <= killed_at < 30
    alone = ("trainer.micro_batch_size=2", "name=killed_worker")
    one = lab.start("deer_stage2", *STEPS, *alone, "strategy=fsdp2")
    wait_for(one, killed_at + 2)
    one.send_signal(signal.SIGTERM)
    output, _ = one.communicate(timeout=120)
    assert "going on with 1 processes" in output
    assert "SIGTERM at step" in output
    assert killed_at < newest() < 30
    assert "going on with 2 processes" in finish(begin())
    assert as_one(folder, whole)
    assert not same_weights(folder, whole), "it is the run of one process"


def test_collecting_on_two_processes(lab):
    command = on_the_page("torchrun", "decoding.collect")
    output = finish(start(tiny(command, lab.collect_arguments("name=by_two"), 2)))
    folder = lab.runs / "deer_answers"
    assert rows(folder / "by_two") == rows(folder)
    assert (folder / "by_two" / "complete.json").exists()
    assert output.count("deer_answers at scale lab") == 2

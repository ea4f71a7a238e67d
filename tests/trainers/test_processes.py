"""What is about processes, with real ones: ranks, torchrun, SLURM, signals, kill -9."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.kills import kill
from tests.support.lab import finish
from tests.support.runs import curve, cut, kept, same_run, same_weights
from trainers.runs.checkpoint_files import checkpoint_files

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

LONG = ("trainer.max_steps=50", "trainer.log_every=1", "trainer.validate_every=20")
TWO = ("trainer.devices=2", "strategy=ddp", "trainer.micro_batch_size=2")
DROPOUT = ("trainer.max_steps=30", "trainer.log_every=1", "+network.attention_dropout=0.4")
# One task of a job, as srun starts it.
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NAME": "fit",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": "localhost",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


# A fit that keeps the gradients of its step; the other process runs the same file.
SAVE_GRADIENTS = """
import sys
import torch
from pytorch_lightning import Callback
from recipes.compose import compose
from trainers import fit

class Save(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.is_global_zero:
            torch.save({n: p.grad for n, p in module.named_parameters()}, sys.argv[1])

fit.Progress = Save
fit.fit(compose(sys.argv[2:], "fit"))
"""


# A fit whose second process finds its steps ten times as long as the first.
UNEQUAL = """
import os, sys
from recipes.compose import compose
from trainers import fit
from trainers.runs.length import Seconds, Stopwatch

Stopwatch.seconds = lambda *_: Seconds(10 ** int(os.environ.get("LOCAL_RANK", 0)), 0.25, 0, 0, 5)
fit.fit(compose(sys.argv[1:], "fit"))
"""


@pytest.fixture(scope="module")
def whole(lab):
    """The folder of an undisturbed run of one process; all its checkpoints stay."""
    return lab.fit("deer_stage2", *LONG, "name=whole", "trainer.keep_last=99").parent


def wait_for_checkpoint(process, folder, step=2):
    while process.poll() is None and not (folder / "checkpoints" / f"step-{step}.ckpt").exists():
        time.sleep(0.002)


def stop(process, folder, number, step=2):
    """A signal once there is a checkpoint; what the run has printed."""
    wait_for_checkpoint(process, folder, step)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    assert f"{signal.Signals(number).name} at step" in output
    assert "go on with the same command" in output
    assert not (folder / "export").exists()
    return output


def greatest_difference(a, b):
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) for step in a)


def test_two_processes_give_the_loss_curve_of_one(lab, whole):
    """In float32, over 50 steps with the same global batch, to 1e-6 of a loss of about 5."""
    finish(lab.start("deer_stage2", *LONG, *TWO, "name=two"))
    one, two = curve(whole), curve(whole.with_name("two"))
    assert len(one) == 50
    difference = greatest_difference(one, two)
    print(f"greatest difference over {len(one)} steps: {difference:.2e}")
    assert difference <= 1e-6 * max(one.values())
    # Negative control: another order of the data.
    lab.fit("deer_stage2", *LONG, "name=seed", "seed=1")
    assert greatest_difference(one, curve(whole.with_name("seed"))) > 1e-3
    assert not same_weights(whole, whole.with_name("seed"))


def test_the_first_process_alone_has_the_target_that_only_acceptance_needs(lab):
    """It is spread there; what it measures is on the curve of both."""
    spread = ("device_map=cpu:100KB", "name=first")
    output = finish(lab.start("deer_stage1", *TWO, *spread))
    assert output.count("offloaded to the") == 1  # accelerate's line, once a process
    for column in ("acceptance_length_t0", "acceptance_length_t1"):
        one, two = (curve(lab.runs / "deer_stage1" / n, column) for n in ("", "first"))
        assert one
        assert two == pytest.approx(one, rel=1e-6)


def test_two_processes_agree_on_the_steps_of_a_minute(lab, tmp_path):
    """Both begin twice, and train as if they had been given the steps."""
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    more = ("trainer.log_every=1", "+network.attention_dropout=0.1")

    def run(name, *length):
        given = lab.arguments("ar_target", f"name={name}", *TWO, *more, *length)
        subprocess.run(
            [sys.executable, script, *given],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
            check=True,
            timeout=300,
        )
        return lab.runs / "ar_target" / name

    minutes = run("two_minutes", "trainer.max_steps=null", "minutes=0.25")
    assert [*curve(minutes, "loss")] == [*range(1, 9)]
    assert same_run(minutes, run("two_steps", "trainer.max_steps=8"))


def test_two_processes_give_the_gradient_of_one(lab, tmp_path):
    """In float64, of the same global batch, to 1e-10."""
    script = tmp_path / "save_gradients.py"
    script.write_text(SAVE_GRADIENTS)

    def gradients(name, *overrides):
        given = lab.arguments("deer_stage2", f"name={name}", "trainer.precision=64-true")
        subprocess.run(
            [sys.executable, script, tmp_path / name, *given, "trainer.max_steps=1", *overrides],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
            check=True,
            timeout=200,
        )
        return torch.load(tmp_path / name)

    one, two = gradients("gradient_of_one"), gradients("gradient_of_two", *TWO)
    assert all(g.dtype == torch.float64 for g in one.values())
    assert max((one[n] - two[n]).abs().max().item() for n in one) <= 1e-10
    # Negative control: half of the batch.
    half = gradients("gradient_of_half", "trainer.batch_size=2", "trainer.micro_batch_size=2")
    assert max((one[n] - half[n]).abs().max().item() for n in one) > 1e-6


def test_under_torchrun_two_processes_go_on_with_the_run_of_one(lab, whole):
    """No line of code knows torchrun. Another number of processes is told."""
    folder = cut(whole, "torchrun", 20)
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "trainers.fit"]
    done = subprocess.run(
        [*command, *lab.arguments("deer_stage2", *LONG, *TWO, "name=torchrun")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = "2 processes x 1 forwards a step, after 1 x 1"
    assert done.stdout.count(told) == 1
    assert "no longer bit for bit" in done.stdout
    one, two = curve(whole), curve(folder)
    assert {s: two[s] for s in range(1, 21)} == {s: one[s] for s in range(1, 21)}
    assert one != two, "the second half is of two processes"
    assert greatest_difference(one, two) <= 1e-6 * max(one.values())


class TestStopped:
    def test_sigterm(self, lab, whole):
        """Also when the checkpoint that it has written is damaged later."""
        folder = whole.with_name("term")
        stop(lab.start("deer_stage2", *LONG, "name=term"), folder, signal.SIGTERM)
        copy = shutil.copytree(folder, folder.with_name("backup"))
        lab.fit("deer_stage2", *LONG, "name=term")
        assert same_run(folder, whole)
        shutil.rmtree(folder)
        copy.rename(folder)
        newest = checkpoint_files(folder / "checkpoints")[-1]
        newest.write_bytes(newest.read_bytes()[:1000])
        lab.fit("deer_stage2", *LONG, "name=term")
        assert same_run(folder, whole)

    def test_ctrl_c(self, lab, whole):
        folder = whole.with_name("ctrl_c")
        stop(lab.start("deer_stage2", *LONG, "name=ctrl_c"), folder, signal.SIGINT)
        lab.fit("deer_stage2", *LONG, "name=ctrl_c")
        assert same_run(folder, whole)

    def test_two_at_once(self, lab, whole):
        """One goes on, the other says so; the one is halted meanwhile, so that it is there."""
        folder = whole.with_name("twice")
        one = lab.start("deer_stage2", *LONG, "name=twice")
        wait_for_checkpoint(one, folder)
        one.send_signal(signal.SIGSTOP)
        other = lab.start("deer_stage2", *LONG, "name=twice")
        said, _ = other.communicate(timeout=120)
        one.send_signal(signal.SIGCONT)
        finish(one)
        assert other.returncode == 2
        assert "another process works on" in said
        assert same_run(folder, whole)

    def test_sigusr1_in_a_slurm_job(self, lab, whole, tmp_path):
        """Lightning's own handler would write elsewhere and requeue the job by itself."""
        called, scontrol = tmp_path / "called", tmp_path / "scontrol"
        scontrol.write_text(f"#!/bin/sh\necho $@ >> {called}\n")
        scontrol.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        process = lab.start("deer_stage2", *LONG, "name=slurm", **SLURM, PATH=path)
        stop(process, whole.with_name("slurm"), signal.SIGUSR1)
        assert not called.exists()
        assert not list(Path.cwd().glob("hpc_ckpt*"))
        lab.fit("deer_stage2", *LONG, "name=slurm")
        assert same_run(whole.with_name("slurm"), whole)

    def test_every_process_draws_its_own_dropout_again(self, lab):
        """Two processes, stopped and resumed by the signal and the command of the first one."""
        run = ("ar_target", *DROPOUT, *TWO)
        finish(lab.start(*run, "name=two_whole"))
        folder = lab.runs / "ar_target" / "two_stopped"
        stop(lab.start(*run, "name=two_stopped"), folder, signal.SIGTERM, step=4)
        last = checkpoint_files(folder / "checkpoints")[-1]
        mine, other = torch.load(last, weights_only=False)["random_states"]
        assert not torch.equal(mine["torch"], other["torch"])
        finish(lab.start(*run, "name=two_stopped"))
        assert same_run(folder, folder.with_name("two_whole"))


def test_chaos(lab, whole):
    """`make chaos` in short: SIGKILL some steps after the start, then in a checkpoint's write."""
    folder = whole.with_name("killed")
    kill(lab.start("deer_stage2", *LONG, "name=killed"), folder, steps=7)
    cuts = 0
    while not cuts:
        cuts += kill(lab.start("deer_stage2", *LONG, "name=killed"), folder, steps=None)
    assert list((folder / "checkpoints").glob(".step-*.partial"))
    assert kept(folder)
    lab.fit("deer_stage2", *LONG, "name=killed")
    assert same_run(folder, whole)
    assert not list((folder / "checkpoints").glob(".*"))

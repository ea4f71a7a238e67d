"""What is about processes, with real ones: two ranks, signals, kill -9, a damaged checkpoint."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

LONG = ("trainer.max_steps=40", "trainer.log_every=1", "trainer.validate_every=20")


def start(lab, *overrides, **options):
    arguments = lab.arguments("deer_stage2", *LONG, *overrides)
    return subprocess.Popen(
        [sys.executable, "-m", "trainers.fit", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def folder(lab, name):
    return lab.runs / "deer_stage2" / name


def curve(lab, name):
    with (folder(lab, name) / "metrics.csv").open() as file:
        return [(int(r["step"]), r["loss"], r["val_loss"]) for r in csv.DictReader(file)]


def weights(lab, name):
    return load_file(folder(lab, name) / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(lab):
    lab.fit("deer_stage2", *LONG, "name=whole")
    return curve(lab, "whole"), weights(lab, "whole")


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_two_processes_give_the_loss_curve_of_one(lab, whole):
    process = start(
        lab, "name=two", "trainer.devices=2", "trainer.strategy=ddp", "trainer.micro_batch_size=2"
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    one, two = (
        {step: float(loss) for step, loss, _ in found if loss}
        for found in (whole[0], curve(lab, "two"))
    )
    assert one.keys() == two.keys()
    assert max(abs(one[s] - two[s]) for s in one) <= 1e-6 * max(one.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_stopped_run_goes_on_bit_for_bit(lab, whole, number):
    name = f"stopped_{number.name}"
    process = start(lab, f"name={name}")
    checkpoints = folder(lab, name) / "checkpoints"
    while process.poll() is None and not (checkpoints / "step-2.ckpt").exists():
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, "the run was faster than the signal"
    assert not (folder(lab, name) / "export").exists(), output
    if number is not signal.SIGKILL:
        assert "go on with the same command" in output
        assert process.returncode == 128 + number
    lab.fit("deer_stage2", *LONG, f"name={name}")
    assert curve(lab, name) == whole[0]
    assert same(weights(lab, name), whole[1])


def test_a_damaged_last_checkpoint_falls_back(lab, whole, capsys):
    process = start(lab, "name=damaged")
    checkpoints = folder(lab, "damaged") / "checkpoints"
    while process.poll() is None and not (checkpoints / "step-4.ckpt").exists():
        time.sleep(0.005)
    process.kill()
    process.communicate()
    if (folder(lab, "damaged") / "export").exists():
        pytest.skip("the run was faster than the signal")
    newest = max(checkpoints.glob("*.ckpt"), key=lambda f: f.stat().st_mtime)
    newest.write_bytes(newest.read_bytes()[:1000])
    lab.fit("deer_stage2", *LONG, "name=damaged")
    assert "is damaged" in capsys.readouterr().out
    assert curve(lab, "damaged") == whole[0]
    assert same(weights(lab, "damaged"), whole[1])


def test_another_seed_is_another_curve(lab, whole):
    """Negative control of the comparisons above."""
    lab.fit("deer_stage2", *LONG, "name=seed", "seed=1")
    assert curve(lab, "seed") != whole[0]
    assert not same(weights(lab, "seed"), whole[1])

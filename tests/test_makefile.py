"""The lab's targets: every command parses, and what is measured is made by the same target."""

import shlex
import subprocess
from pathlib import Path

import pytest

from decoding.bench.denoise import DenoiseBench
from decoding.bench.engine import EngineBench
from decoding.bench.heldout_loss import HeldoutLoss
from decoding.bench.images import ImageBench
from decoding.bench.infill import InfillBench
from decoding.bench.text import Bench
from decoding.calibrate import Calibrate
from recipes.compose import compose, run_folder
from recipes.options import parse
from trainers.export import Export
from trainers.soft_targets import TEACHER_LOSSES

ROOT = Path(__file__).parents[1]
MEASURES = {
    "decoding.bench": Bench,
    "decoding.bench.denoise": DenoiseBench,
    "decoding.bench.engine": EngineBench,
    "decoding.bench.heldout_loss": HeldoutLoss,
    "decoding.bench.images": ImageBench,
    "decoding.bench.infill": InfillBench,
    "decoding.calibrate": Calibrate,
}


def commands(target):
    """(module, arguments) of every command of a target."""
    dry = ["make", "-n", target, "RUNS=runs"]
    lines = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in lines.splitlines():
        _, dash, rest = line.partition(" -m ")
        module, *arguments = shlex.split(rest) if dash else [""]
        if module.startswith(("trainers.", "decoding.")):
            yield module, arguments


LABS = (
    "lab-deer",
    "lab-deer-losses",
    "lab-deer-figures",
    "lab-deer-layouts",
    "lab-pcllm",
    "lab-pcllm-ablations",
    "lab-asarm",
    "lab-asarm-trees",
    "lab-cspd",
    "lab-spiffy",
)
SMALL = ("small-deer", "small-pard", "small-pcllm")


@pytest.mark.parametrize("target", LABS + SMALL)
def test_the_commands_of_a_lab(target):
    made, measured = {}, set()
    for module, arguments in commands(target):
        if module in MEASURES:
            found = parse(arguments, MEASURES[module], module)
            measured |= {found.model, *getattr(found, "also", ())}
            continue
        if module == "trainers.export":
            assert f"{parse(arguments, Export, module).run}/export" in made
            continue
        command = module.rpartition(".")[2]
        config = compose(arguments, command)
        if command == "fit":
            made[f"{run_folder(config)}/export"] = config
    assert measured
    assert measured <= made.keys()


def test_an_ablation_of_the_mask_changes_it():
    fits = [compose(a, "fit") for module, a in commands("lab-pcllm-ablations") if "fit" in module]
    rounds = {c.name: c for c in fits if c.recipe == "pcllm_round1"}
    assert len({str((c.module, c.data.corruption)) for c in rounds.values()}) == len(rounds) == 7
    # In a window that holds all eight blocks of an answer NC-IC is NC.
    ic = {name: c.module.window for name, c in rounds.items() if c.module.mask == "nc_ic"}
    assert ic == {"nc_ic_4": 4, "cllm": 1}
    assert rounds["cllm"].data.corruption.state == "any"  # at one block a window Eq. 7 has no noise
    assert rounds["nc_ic_4"].module.window == rounds["linear_4"].module.window == 4


def test_an_ablation_of_the_loss_changes_it():
    fits = [compose(a, "fit") for module, a in commands("lab-deer-losses") if "fit" in module]
    runs = {c.name: c.module for c in fits if c.recipe == "deer_stage2"}
    taught = {name: m.teacher_loss for name, m in runs.items() if m.soft}
    assert set(taught.values()) == set(TEACHER_LOSSES)
    assert all(name == loss for name, loss in taught.items())
    assert runs.keys() - taught.keys() == {"tokens"}

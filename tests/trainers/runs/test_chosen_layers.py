"""The layers that a new drafter copies from its target: chosen once, and read from its run."""

import json
import time

import pytest

from models import dflash_init, diffusion
from tests.support.runs import cut, same_run
from trainers.export import export_checkpoint
from trainers.runs.length import Seconds, Stopwatch
from trainers.runs.provenance import chosen_layers

pytestmark = pytest.mark.slow
SLEPT = 2.0
LENGTH = ("trainer.max_steps=null", "minutes=0.25", "trainer.checkpoint_every=2",
          "trainer.keep_last=9", "trainer.log_every=1", "network.layers=2")  # fmt: skip


@pytest.fixture
def chosen(monkeypatch):
    """Record the number of layers that each choice of layers is asked for."""
    asked = []

    def choice(network, count):
        asked.append(count)
        time.sleep(SLEPT)
        return [1, 2][:count]  # not those that the real choice begins with

    for module in (diffusion, dflash_init):
        monkeypatch.setattr(module, "copying", choice)
    return asked


@pytest.fixture
def clock(monkeypatch):
    """A second a step; when the commands, and the building of what they measure, began."""
    found = []

    def seconds(self, rows, prompts, began, built):
        found.append((began, built))
        return Seconds(step=1, row=0.25, prompt=0, checkpoint=0, before=5)

    monkeypatch.setattr(Stopwatch, "seconds", seconds)
    return found


@pytest.mark.parametrize("recipe", ["diffusion_adapt", "dflash"])
def test_once_in_a_run_of_so_many_minutes_and_all_that_comes_of_it(lab, chosen, clock, recipe):
    name = f"chosen_{recipe}"
    folder = lab.runs / recipe / name
    lab.fit(recipe, f"name={name}", *LENGTH)
    assert chosen == [2]
    ((began, built),) = clock
    assert built - began > SLEPT  # the time that the run itself does not need
    assert chosen_layers(folder) == [1, 2]
    again = cut(folder, f"{name}_again", 4)
    lab.fit(recipe, f"name={name}_again", *LENGTH)
    assert same_run(folder, again)
    twice = cut(folder, f"{name}_twice", 4)
    (twice / "provenance.json").write_bytes((again / "provenance.json").read_bytes())
    lab.fit(recipe, f"name={name}_twice", *LENGTH)
    export_checkpoint(folder, folder / "checkpoints" / "step-4.ckpt")
    assert chosen == [2]


def test_every_new_run_has_its_own(lab, chosen, clock, capsys):
    given = ("trainer.max_steps=2", "network.layers=[0,2]")
    lab.fit("diffusion_adapt", "name=given", *given)
    assert chosen == []
    assert chosen_layers(lab.runs / "diffusion_adapt" / "given") == [0, 2]
    lab.fit("diffusion_adapt", "name=new", *LENGTH, "minutes=null", "trainer.max_steps=4")
    assert chosen == [2]
    assert "the drafter has layers [1, 2] of 3" in capsys.readouterr().out
    folder = lab.runs / "diffusion_adapt" / "new"
    # Another number of them, from a checkpoint that a user names: refused, as before.
    checkpoint = f"resume={folder / 'checkpoints' / 'step-2.ckpt'}"
    with pytest.raises(ValueError, match="tensors differ from the network"):
        lab.fit("diffusion_adapt", "name=other", *LENGTH, "minutes=null",
                "trainer.max_steps=4", "network.layers=1", checkpoint)  # fmt: skip
    # A run without one, of a version that did not note them.
    story = json.loads((folder / "provenance.json").read_text())
    del story["layers"]
    (folder / "provenance.json").write_text(json.dumps(story))
    export_checkpoint(folder, folder / "checkpoints" / "step-2.ckpt")
    assert chosen == [2, 1, 2]
    story["layers"] = ["../x"]
    (folder / "provenance.json").write_text(json.dumps(story))
    with pytest.raises(ValueError, match="layers="):
        export_checkpoint(folder, folder / "checkpoints" / "step-2.ckpt")

"""Looking at a training draws nothing from its random numbers."""

import csv

import pytest
import torch

from trainers.runs.callbacks import AcceptanceLength
from trainers.runs.randomness import RandomStates

DROPOUT = ["lora.rank=4", "lora.dropout=0.3", "trainer.log_every=1", "trainer.max_steps=6"]


@pytest.fixture
def losses(lab, tmp_path):
    """A function that trains with dropout, and returns the loss of every step."""
    numbers = iter(range(9))

    def train(*more):
        name = f"name={tmp_path.name}_{next(numbers)}"
        run = lab.fit("deer_stage1", name, *DROPOUT, *more).parent
        with (run / "metrics.csv").open() as file:
            return [row["loss"] for row in csv.DictReader(file) if row["loss"]]

    return train


@pytest.mark.slow
def test_how_often_a_run_validates_changes_no_step(losses, monkeypatch):
    measure = AcceptanceLength.on_validation_end

    def draws(self, *arguments):
        torch.rand(3)
        return measure(self, *arguments)

    monkeypatch.setattr(AcceptanceLength, "on_validation_end", draws)
    seldom = losses("trainer.validate_every=6")
    assert losses("trainer.validate_every=2") == seldom
    monkeypatch.setattr(RandomStates, "on_train_batch_start", lambda *_: None)
    assert losses("trainer.validate_every=2") != seldom  # the negative control

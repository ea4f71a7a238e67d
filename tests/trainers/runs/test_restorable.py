import math

import pytest
import torch

ODD = {
    "pytorch-lightning_version": (("pytorch-lightning_version",), 3),
    "epoch": (("epoch",), [0]),
    "run.found": (("run", "found"), [[0]]),
    "run.accumulate": (("run", "accumulate"), []),
    "callbacks.LossGuard": (("callbacks", "LossGuard"), -1),
    "callbacks.LossGuard.smooth": (("callbacks", "LossGuard", "smooth"), {}),
    "random_states": (("random_states",), math.nan),
    "random_states.0.torch": (("random_states", 0, "torch"), torch.ones(3)),
    "lr_schedulers.0.base_lrs": (("lr_schedulers", 0, "base_lrs"), [0.1]),
    "lr_schedulers.0.last_epoch": (("lr_schedulers", 0, "last_epoch"), 10**400),
    "optimizer_states.0.state.4.exp_avg": (
        ("optimizer_states", 0, "state", 4, "exp_avg"),
        torch.ones(2),
    ),
    "optimizer_states.0.state.5": (("optimizer_states", 0, "state", 5), {"step": torch.ones(())}),
    "optimizer_states.0.param_groups.0.params": (
        ("optimizer_states", 0, "param_groups", 0, "params", 0),
        7,
    ),
    "loops.fit_loop": (("loops", "fit_loop"), 10**12),
}


@pytest.fixture(scope="module")
def halfway(lab):
    """The first checkpoint of a run, and its content."""
    run = lab.fit("ar_target").parent
    path = min((run / "checkpoints").iterdir())
    return path, torch.load(path, weights_only=True)


@pytest.fixture
def resumed(lab, halfway, tmp_path):
    """A function that changes a value of the checkpoint, and resumes from the change."""
    _, content = halfway

    def resume(where, value):
        path = tmp_path / "step-2.ckpt"
        torch.save(changed(content, where, value), path)
        return lab.fit("ar_target", f"name={tmp_path.name}", f"resume={path}")

    return resume


def changed(tree, where, value):
    """A copy of a tree with another value at a path."""
    if not where:
        return value
    copy = {**tree} if isinstance(tree, dict) else list(tree)
    copy[where[0]] = changed(copy[where[0]], where[1:], value)
    return copy


def test_what_a_run_saves_is_restored(resumed, halfway):
    _, content = halfway
    assert (resumed(("epoch",), content["epoch"]) / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ODD)
def test_a_value_of_another_form_is_one_line(name, resumed, lab, tmp_path):
    with pytest.raises(ValueError) as refused:
        resumed(*ODD[name])
    line = str(refused.value)
    assert f"step-2.ckpt is damaged or of another version (its {name} " in line
    assert "\n" not in line
    assert not (lab.runs / "ar_target" / tmp_path.name).exists()

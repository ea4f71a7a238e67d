"""Training on stored hidden states is training on those of a forward in every step."""

import pytest
from safetensors.torch import load_file, save_file

from data.rows.states import RowsWithStates
from tests.support.lab import finish
from tests.support.runs import curve, same_run
from trainers.runs import stored_states

pytestmark = pytest.mark.usefixtures("forked")

STEPS = (
    "trainer.max_steps=8",
    "trainer.log_every=1",
    "acceptance.dtype=bfloat16",
    "module.soft=0",
    "data.train.length=16",  # so that there are several shards
)
STORED = "data.stored_states=1"


@pytest.fixture(scope="module")
def prepared(lab):
    lab.collect()
    return lab


def folders(lab):
    return sorted((lab.runs / "data").glob("*-states-*"))


def fit(lab, name, *more):
    return lab.fit("dflash", *STEPS, f"name={name}", *more).parent


def furthest(ours, theirs):
    ours, theirs = curve(ours), curve(theirs)
    assert ours.keys() == theirs.keys()
    return max(abs(ours[s] - theirs[s]) for s in ours)


@pytest.fixture(scope="module")
def both(prepared):
    return fit(prepared, "online"), fit(prepared, "stored", STORED)


def test_the_loss_curve_is_the_same(both):
    # Other rows beside a row round bfloat16's products otherwise.
    assert furthest(*both) < 2e-3


def test_other_states_have_another_curve(prepared, both, monkeypatch):
    """The negative control: the states of tokens in another order."""
    own = RowsWithStates.states
    monkeypatch.setattr(RowsWithStates, "states", lambda self, row: own(self, row).flip(0))
    monkeypatch.setattr(stored_states, "_check_first", lambda *_: None)
    assert furthest(both[0], fit(prepared, "flipped", STORED)) > 1e-2


def test_they_are_computed_once_and_what_is_missing_again(prepared, both, monkeypatch):
    (folder,) = folders(prepared)
    shards = sorted(folder.iterdir())
    assert len(shards) > 1
    shards[-1].unlink()
    counted = []
    computed = stored_states.computed

    def counting(target, rows, which):
        counted.append(len(which))
        return computed(target, rows, which)

    monkeypatch.setattr(stored_states, "computed", counting)
    again = fit(prepared, "again", STORED)
    assert sum(counted) < 1 + 64 + 1  # the check of the first row, and one shard
    assert same_run(both[1], again)
    assert sorted(folder.iterdir()) == shards


def test_states_of_another_target_are_refused(prepared, both):
    (folder,) = folders(prepared)
    file = min(folder.iterdir())
    kept = file.read_bytes()
    tensors = {name: -x for name, x in load_file(file).items()}
    try:
        save_file(tensors, file)
        with pytest.raises(ValueError, match="hidden states of another target") as error:
            fit(prepared, "other", STORED)
        assert "\n" not in str(error.value)
    finally:
        file.write_bytes(kept)


@pytest.mark.processes
def test_two_processes_store_their_shares(prepared, both):
    (folder,) = folders(prepared)
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    for file in folder.iterdir():
        file.unlink()
    two = (*STEPS, "trainer.devices=2", "trainer.micro_batch_size=2", "strategy=ddp")
    finish(prepared.start("dflash", *two, STORED, "name=two"))
    assert {f.name for f in folder.iterdir()} == before.keys()
    assert furthest(both[1], prepared.runs / "dflash" / "two") < 2e-3


def test_another_engine_makes_the_same_states(prepared, both, vllm_stub, monkeypatch, tmp_path):
    options = f"data.states_options={{python: {vllm_stub}}}"
    by_vllm = STORED, "data.states_engine=vllm", options, f"data.folder={tmp_path}"
    assert furthest(both[1], fit(prepared, "engine", *by_vllm)) < 2e-3
    # Negative control: an engine that counts layers from another one.
    (folder,) = tmp_path.glob("*-states-*")
    for file in folder.iterdir():
        file.unlink()
    monkeypatch.setenv("STUB_VLLM", "layers")
    with pytest.raises(ValueError, match="vLLM stub gives other hidden states than the target"):
        fit(prepared, "off_by_one", *by_vllm)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("dflash", "data.states_engine=vllm"), r"give data\.stored_states=<GB> too"),
        (("dflash", STORED, "data.states_engine=sglang"), r"unknown data\.states_engine 'sglang'"),
        (("dflash", *STEPS, "data.stored_states=1e-9"), r"data\.stored_states allows 1e-09: allow"),
        (("dflash", *STEPS, "data.stored_states=0"), r"data\.stored_states=0 is not allowed"),
        (("dflash", *STEPS, "data.stored_states=-1"), r"data\.stored_states=-1 is not allowed"),
        (("dflash", *STEPS, "data.stored_states=abc"), r"data\.stored_states='abc' is of type str"),
        (("dflash", STORED, "module.soft=0.5"), r"give module\.teacher=answers or module\.soft=0"),
        (("deer_stage1", STORED), "MaskedDiffusion reads no hidden states of a target"),
    ],
)
def test_where_it_is_not_allowed(prepared, given, message):
    with pytest.raises(ValueError, match=message) as error:
        prepared.fit(*given, "name=wrong")
    assert "\n" not in str(error.value)

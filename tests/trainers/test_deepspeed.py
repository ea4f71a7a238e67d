"""DeepSpeed on two CPU processes: it trains as one process does; other strategies on resume."""

import os

import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.utils.cpp_extension import _get_build_directory

from recipes.compose import compose
from tests.support import ranks, runs, tiny
from tests.support.ranks import Norms
from trainers import export, fit
from trainers.runs.checkpoint_files import renamed

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

RECIPE = "deer_stage2"
# The norm that the gradient is clipped to is below every step's, so that their size matters.
STEPS = ("trainer.max_steps=6", "trainer.log_every=1", "trainer.validate_every=6",
         "trainer.keep_last=9", "trainer.gradient_clip=0.05")  # fmt: skip
TWO = ("trainer.devices=2", "trainer.micro_batch_size=2")
FOUR = ("trainer.devices=2", "trainer.micro_batch_size=1")  # two forwards a step and process
ONE = ("trainer.devices=1", "trainer.micro_batch_size=4")
IDS = (
    "+module.draft_ids={_target_: data.corpora.answers.frequent_tokens, "
    "source: '${answers}', count: 64}"
)
HEAD, LORA, HALF = "module.markov_rank=4", "lora.rank=2", "trainer.precision=bf16-mixed"
ZERO = tuple(f"strategy=deepspeed_{stage}" for stage in (1, 2, 3))
RUNS = {  # those of two processes, in this order: a name that comes again goes on
    "zero_1": (*FOUR, ZERO[0]),
    "zero_2": (*TWO, ZERO[1]),
    "zero_3": (*TWO, ZERO[2]),
    "ids_and_head": (*FOUR, ZERO[2], IDS, HEAD),
    "sharded_head": (*FOUR, "strategy=fsdp2", IDS, HEAD),
    "lora_2": (*FOUR, ZERO[1], LORA),
    "lora_3": (*TWO, ZERO[2], LORA),
    "half_2": (*TWO, ZERO[1], HALF),
    "ddp": (*TWO, "strategy=ddp"),
}
STOPPED = {  # stopped after step 3, and gone on with
    "zero_2_stopped": ((*TWO, ZERO[1]), (*TWO, ZERO[1])),
    "zero_3_stopped": ((*TWO, ZERO[2]), (*TWO, ZERO[2])),
    "ddp_to_fsdp2": ((*TWO, "strategy=ddp"), (*TWO, "strategy=fsdp2")),
    "fsdp2_to_ddp": ((*TWO, "strategy=fsdp2"), (*TWO, "strategy=ddp")),
    "zero_2_to_3": ((*TWO, ZERO[1]), (*TWO, ZERO[2])),
    "zero_2_to_fsdp2": ((*TWO, ZERO[1]), (*TWO, "strategy=fsdp2")),
    "fsdp2_to_zero_2": ((*TWO, "strategy=fsdp2"), (*TWO, ZERO[1])),
    "ddp_to_zero_3": ((*TWO, "strategy=ddp"), (*TWO, ZERO[2])),
}
VALIDATING = {  # stopped after the last step, before its validation
    "zero_2_validating": (*TWO, ZERO[1]),
    "ddp_validating": (*TWO, "strategy=ddp"),
}
REFUSED = {
    "ema": (*TWO, "strategy=fsdp2", "optimization.ema=0.9"),
    "four": ("trainer.devices=4", "trainer.micro_batch_size=1", "strategy=fsdp2"),
    "nodes": (*TWO, "trainer.num_nodes=2", "trainer.micro_batch_size=1", "strategy=ddp"),
    "alone": (*ONE, "name=alone"),
}


@pytest.fixture(scope="module")
def folder(lab):
    return lab.runs / RECIPE


@pytest.fixture(scope="module")
def one(lab):
    """Train on one process, with other settings; the gradients' norms."""
    norms = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "Progress", Norms)
        for name, given in {
            "one": (), "one_ids_and_head": (IDS, HEAD), "one_lora": (LORA,), "one_half": (HALF,)
        }.items():  # fmt: skip
            Norms.found, Norms.stop = [], None
            lab.fit(RECIPE, *STEPS, *given, f"name={name}")
            norms[name] = Norms.found
    return norms


@pytest.fixture(scope="module")
def two(lab, tmp_path_factory):
    """Train all of the above on two processes; what each has said."""
    told = [(name, (), given) for name, given in (RUNS | REFUSED).items()]
    for name, (first, then) in STOPPED.items():
        told += [(f"{name} first", ("stop=3",), first), (name, (), then)]
    for name, given in VALIDATING.items():
        told += [(f"{name} first", ("stop=6",), given), (name, (), given)]
    asked = [
        [*stop, *lab.arguments(RECIPE, *STEPS, *given, f"name={name.removesuffix(' first')}")]
        for name, stop, given in told
    ]
    ran = ranks.run_all(asked, 2, tmp_path_factory.mktemp("ranks") / "all")
    return {name: r for (name, *_), r in zip(told, ran)}


def check(folder, one, other, loss=1e-6, weights=1e-6):
    """Assert that two runs have the same curve and weights."""
    a, b = (runs.curve(folder / name) for name in (one, other))
    assert a.keys() == b.keys()
    assert max(abs(a[s] - b[s]) for s in a) <= loss * max(a.values())
    a, b = (runs.weights(folder / name / "export") for name in (one, other))
    assert a.keys() == b.keys()
    assert max((a[k] - b[k]).abs().max().item() for k in a) <= weights
    for metric in ("acceptance_length_t0", "acceptance_length_t1"):
        assert runs.curve(folder / one, metric) == runs.curve(folder / other, metric)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("zero_1", "one"), ("zero_2", "one"), ("zero_3", "one"), ("lora_2", "one_lora"),
        ("ids_and_head", "one_ids_and_head"), ("sharded_head", "one_ids_and_head"),
        ("lora_3", "one_lora"),
    ],
)  # fmt: skip
def test_two_processes_train_as_one(folder, one, two, name, reference):
    """The same curve, weights, acceptance, and norms of the gradient before it is clipped."""
    assert two[name].error is None
    check(folder, reference, name)
    assert two[name].norms == pytest.approx(one[reference], rel=1e-5)
    assert min(one[reference]) > 0.05, "nothing is clipped"
    # A head is whole in the export.
    files = {f.name for f in (folder / name / "export").glob("*.safetensors")}
    assert files == {f.name for f in (folder / reference / "export").glob("*.safetensors")}


def test_another_gradient_is_seen(folder, one, two):
    """Negative control of the comparison above."""
    with pytest.raises(AssertionError):
        check(folder, "one_lora", "zero_2")
    assert [n / 2 for n in two["zero_1"].norms] != pytest.approx(one["one"], rel=1e-2)


def test_bfloat16_rounds_the_network_alone(folder, one, two):
    """Rounded weights of the loss would be 0.1 to 0.3% wrong in every step."""
    name = "half_2"
    assert two[name].error is None
    a, b = (runs.curve(folder / run) for run in (name, "one_half"))
    assert max(abs(a[s] / b[s] - 1) for s in a) < 3e-4
    assert two[name].norms == pytest.approx(one["one_half"], rel=2e-2)
    weights = runs.weights(folder / name / "export")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    # A checkpoint's export has the dtype of the run's own: here it is the same.
    last = folder / name / "checkpoints" / "step-6.ckpt"
    export.run([f"run={folder / name}", f"checkpoint={last}"])
    again = folder / name / "export-step-6"
    assert runs.same(runs.weights(again), weights)
    configs = [(f / "config.json").read_text() for f in (again, folder / name / "export")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", ["zero_2", "zero_3"])
def test_a_stopped_run_goes_on_bit_for_bit(folder, two, name):
    stopped = two[f"{name}_stopped first"]
    assert stopped.error == "status 143"
    assert "SIGTERM at step 3" in stopped.output
    assert two[f"{name}_stopped"].error is None
    assert runs.same_run(folder / f"{name}_stopped", folder / name)


@pytest.mark.parametrize("name", ["zero_2", "ddp"])
def test_a_validation_that_is_cut_short_is_made_up_for(folder, two, name):
    """One process alone hears the signal."""
    stopped = two[f"{name}_validating first"]
    assert stopped.error == "status 143"
    assert "SIGTERM at step 6" in stopped.output
    assert "val_loss" not in stopped.output
    assert two[f"{name}_validating"].error is None
    assert two[f"{name}_validating"].norms == []
    assert runs.same_run(folder / f"{name}_validating", folder / name)


class TestAnotherStrategy:
    @pytest.mark.parametrize("name", ["ddp_to_fsdp2", "fsdp2_to_ddp"])
    def test_ddp_and_fsdp2_go_on_with_each_other(self, folder, two, name):
        assert two[name].error is None
        assert len(two[name].norms) == 3
        check(folder, "ddp", name)

    @pytest.mark.parametrize("name", ["zero_2_to_3", "zero_2_to_fsdp2"])
    def test_shards_of_deepspeed_go_on_as_they_were_begun(self, folder, two, name):
        message = two[name].error
        assert f"give strategy={'deepspeed_2'} on 2 processes, as before" in message
        assert "python -m trainers.export" in message
        assert "\n" not in message
        assert not (folder / name / "export").exists()
        assert (folder / name / "checkpoints" / "step-3.ckpt").is_dir()

    @pytest.mark.parametrize("name", ["fsdp2_to_zero_2", "ddp_to_zero_3"])
    def test_deepspeed_goes_on_from_its_own_only(self, two, name):
        assert "give strategy=ddp or strategy=fsdp2" in two[name].error
        assert "\n" not in two[name].error

    def test_two_processes_then_one(self, lab, folder, two):
        """The runs that were refused above go on with one process, or say how they would."""
        name = "fsdp2_to_zero_2"
        lab.fit(RECIPE, *STEPS, *ONE, "strategy=auto", f"name={name}")
        check(folder, "ddp", name)
        with pytest.raises(ValueError, match="strategy=deepspeed_2 on 2 processes, as before"):
            lab.fit(RECIPE, *STEPS, *ONE, "strategy=auto", "name=zero_2_to_3")

    def test_the_way_that_is_told_works(self, folder, lab, two):
        """Another run begins with the weights of DeepSpeed's checkpoint."""
        run = folder / "zero_2_to_3"
        export.run([f"run={run}", f"checkpoint={run / 'checkpoints' / 'step-3.ckpt'}"])
        weights = f"drafter={run / 'export-step-3'}"
        lab.fit(RECIPE, *STEPS, *ONE, weights, "name=with_its_weights")
        before, after = (runs.curve(folder / name) for name in ("zero_2", "with_its_weights"))
        assert abs(after[1] - before[1]) > 1e-3

    def test_states_are_taken_by_name(self):
        """Equal shapes: in the module's own order another parameter's states would be taken."""
        network = tiny.causal_lm(64)
        kinds = [[p for p in network.parameters() if (p.ndim > 1) == two] for two in (True, False)]
        optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds])
        numbers = {p: n for n, p in enumerate(p for kind in kinds for p in kind)}
        for p, n in numbers.items():
            optimizer.state[p] = {"exp_avg": torch.full_like(p, n)}
        names = {p: name for name, p in network.named_parameters()}
        found = renamed(optimizer.state_dict(), [names[p] for p in numbers])
        assert {n: s["exp_avg"].flatten()[0] for n, s in found["state"].items()} == {
            names[p]: n for p, n in numbers.items()
        }
        back = renamed(found, {name: numbers[p] for p, name in names.items()})
        assert back == optimizer.state_dict()
        # Lightning's way, which neither fits nor fails for each of these.
        wrong = FullyShardedDataParallel.rekey_optim_state_dict(
            optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, network
        )["state"]
        shapes = {name: p.shape for name, p in network.named_parameters()}
        swapped = [
            name for name, state in wrong.items()
            if state["exp_avg"].shape == shapes[name]
            and not torch.equal(state["exp_avg"], found["state"][name]["exp_avg"])
        ]  # fmt: skip
        assert swapped


class TestRefusals:
    """One line on every process, and no folder."""

    def test_averaged_weights(self, folder, two):
        assert two["ema"].error.startswith("optimization.ema=0.9 needs the whole network")
        assert not (folder / "ema").exists()

    @pytest.mark.parametrize("name", ["four", "nodes", "alone"])
    def test_another_number_of_processes_than_torchrun_has_started(self, folder, two, name):
        asked = {"four": "4", "nodes": "4", "alone": "1"}[name]
        message = two[name].error
        assert f"ask for {asked} processes, but torchrun has started 2" in message
        assert "\n" not in message
        assert not (folder / name).exists()

    def test_another_number_than_srun_has_started(self, lab, folder, monkeypatch):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
        with pytest.raises(ValueError, match=r"but srun has started 2: give trainer\.devices="):
            lab.fit(RECIPE, *STEPS, "name=srun")
        assert not (folder / "srun").exists()
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
        trainer = fit.build_trainer(*parts(lab))
        assert trainer.num_devices == 1


def parts(lab, *given):
    """Return the settings that `fit.build_trainer` takes of a recipe."""
    config = fit.resolve_precision(compose(lab.arguments(RECIPE, *given), "fit"))
    return fit.Trainer(**config.trainer), config.strategy, []


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true", "32-true"])
def test_no_precision_casts_a_batch(lab, precision):
    trainer = fit.build_trainer(*parts(lab, f"trainer.precision={precision}"))
    batch = {"step_weight": torch.tensor(1 / 3).double(), "rate": torch.rand(4)}
    found = trainer.precision_plugin.convert_input(batch)
    assert all(found[k] is batch[k] for k in batch)


def test_a_checkpoint_is_exported_in_the_dtype_of_its_run(lab, folder):
    """Float64 as an example that every device has; negative control: the recipe's own float32."""
    lab.fit(RECIPE, *STEPS, "trainer.precision=64-true", "name=double")
    run = folder / "double"
    export.run([f"run={run}", f"checkpoint={run / 'checkpoints' / 'step-6.ckpt'}"])
    a, b = (runs.weights(run / name) for name in ("export", "export-step-6"))
    assert {w.dtype for w in a.values()} == {torch.float64}
    assert runs.same(a, b)


@pytest.mark.slow
def test_offloading_trains_as_one_process(lab, folder, one, tmp_path):
    """With DeepSpeed's AdamW for the CPU, whose compilation takes minutes."""
    built = os.path.join(_get_build_directory(CPUAdamBuilder.NAME, False), "cpu_adam.so")
    if not (os.path.exists(built) or os.environ.get("PARADE_COMPILE")):
        pytest.skip(
            "DeepSpeed's CPUAdam is not compiled here: PARADE_COMPILE=1 and a C++ compiler do it "
            "once, in 1 to 3 minutes"
        )
    names = ("deepspeed_2_offload", "deepspeed_3_offload")
    asked = [
        lab.arguments(RECIPE, *STEPS, *FOUR, f"strategy={name}", f"name={name}") for name in names
    ]
    for name, ran in zip(names, ranks.run_all(asked, 2, tmp_path / "offloaded")):
        assert ran.error is None
        check(folder, "one", name)
        assert ran.norms == pytest.approx(one["one"], rel=1e-5)

"""Hidden states of a target, computed once before training instead of in every step."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from data.corpora.fingerprints import model_fingerprint
from data.rows.packing import PackedRows
from data.rows.states import DTYPE, RowsWithStates
from decoding.external.vllm_engine import ON_CPU
from decoding.external.vllm_states import VllmStates
from decoding.loading import for_inference
from models import causal
from models.placement import input_device
from terminal.progress import track
from trainers.base import DISTRIBUTIONS, HIDDEN_STATES, BaseModule
from trainers.target_states import target_states

ROWS = 8  # rows per forward of the target
# Relative difference of stored and computed states of the same target: bfloat16's rounding is
# 0.004, and other kernels, batches or devices add to it.
TOLERANCE = 0.05


def with_states(
    rows: Dataset, module: BaseModule, target: str, most: float, engine: dict | None = None
) -> RowsWithStates:
    """Give a module rows with its target's states, at most `most` GB, to be made at the start.

    `engine` is what makes them, {'engine': 'vllm', option: value}; None: this process.
    """
    needs = module.needs_target
    if HIDDEN_STATES not in needs or not isinstance(rows, PackedRows):
        raise ValueError(
            f"data.stored_states is not allowed: {type(module).__name__} reads no hidden states of "
            "a target"
        )
    if DISTRIBUTIONS in needs:
        raise ValueError(
            "data.stored_states saves nothing where the loss asks the target in every step: give "
            "module.teacher=answers or module.soft=0"
        )
    layers = [*module.target_layers]
    assert module.target is not None  # `needs_target` asks for it
    size = module.target.config.get_text_config().hidden_size
    made_by = {"target": target, "layers": layers, "dtype": str(module.target.dtype)}
    made_by["weights"] = model_fingerprint(target)
    if engine is not None:
        made_by["engine"] = engine["engine"]
    module.states_engine = engine
    module.stored_states = RowsWithStates(rows.folder, made_by, len(layers) * size)
    module.stored_states.check_size(1e9 * most)
    return module.stored_states


def store_states(module: BaseModule, rows: RowsWithStates) -> None:
    """Compute the missing states, each process its share of the shards."""
    trainer = module.trainer
    missing = rows.missing()
    if 0 not in missing:  # all processes, so that none waits for one that has found an error
        _check_first(module, rows)
    trainer.strategy.barrier()  # no process writes what another still counts as missing
    if mine := missing[trainer.global_rank :: trainer.world_size]:
        with _source(module, rows) as states_of:
            for shard in track(mine, "states of the target"):
                of = rows.rows_of(shard)
                parts = [range(i, min(i + ROWS, of.stop)) for i in range(of.start, of.stop, ROWS)]
                rows.write(shard, torch.cat([states_of(part) for part in parts]))
    trainer.strategy.barrier()


@contextmanager
def _source(module: BaseModule, rows: RowsWithStates) -> Iterator[Callable[[range], Tensor]]:
    """Open what computes states: a function of rows, as `computed`."""
    options = dict(module.states_engine or {})
    assert module.target is not None
    if not options.pop("engine", None):
        yield partial(computed, _for_inference(module.target), rows)
        return
    defaults = {
        "dtype": str(module.target.dtype).removeprefix("torch."),
        "max_model_len": rows.shape[1] + 1,
        **(ON_CPU if module.device.type == "cpu" else {}),
    }
    target = causal.local_path(rows.made_by["target"])
    with VllmStates(target, rows.made_by["layers"], **{**defaults, **options}) as engine:
        known = PackedRows(rows.folder)[0]["document"] >= 0
        first, ours = _of_engine(engine, rows, range(1)), computed(module.target, rows, range(1))
        if (apart := _distance(first[0, known], ours[0, known])) > TOLERANCE:
            raise ValueError(
                f"vLLM {engine.version} gives other hidden states than the target has here (the "
                f"relative difference is {apart:.2g}): leave data.states_engine out"
            )
        yield partial(_of_engine, engine, rows)


def _of_engine(engine: VllmStates, rows: RowsWithStates, which: range) -> Tensor:
    """Return the states of some rows, as `computed`, from an engine that reads each text alone."""
    plain, (_, length, width) = PackedRows(rows.folder), rows.shape
    found, texts, at = torch.zeros(len(which), length, width, dtype=DTYPE), [], []
    for n, row in enumerate(plain[i] for i in which):
        for document in row["document"].unique():
            if document >= 0:  # else it is padding
                at.append((n, row["document"] == document))
                texts.append(row["input_ids"][at[-1][1]].tolist())
    for (n, tokens), states in zip(at, engine.states(texts)):
        found[n, tokens] = states.flatten(1).to(DTYPE)
    return found


def _for_inference(target: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a target on the CPU that is faster; elsewhere the target itself."""
    if input_device(target).type != "cpu":
        return target
    copied = copy.deepcopy(target)  # the module's own goes on to train
    for_inference(copied)
    return copied


def computed(target: PreTrainedModel, rows: RowsWithStates, which: range) -> Tensor:
    """Compute the states [rows, length, width] of some rows, by a forward of the target."""
    plain = PackedRows(rows.folder)
    texts, device = [plain[i] for i in which], input_device(target)
    columns = {c: torch.stack([text[c] for text in texts]).to(device) for c in texts[0]}
    batch = {
        "input_ids": columns["input_ids"],
        "position_ids": columns["position"],
        "document": columns["document"],
        "block": torch.full_like(columns["document"], -1),  # no draft block follows the text
    }
    found = target_states(target, batch, rows.shape[1], rows.made_by["layers"], logits=False)
    return torch.cat(found.hidden_states, -1).to("cpu", DTYPE)


def _check_first(module: BaseModule, rows: RowsWithStates) -> None:
    """Raise ValueError unless the first row's states are those of this target."""
    known = rows[0]["document"] >= 0
    assert module.target is not None
    ours, theirs = computed(module.target, rows, range(1))[0, known], rows.states(0)[known]
    if _distance(theirs, ours) > TOLERANCE:
        raise ValueError(
            f"{rows.states_folder} has hidden states of another target than "
            f"{rows.made_by['target']} is now: remove that folder, or give data.folder=..."
        )


def _distance(states: Tensor, reference: Tensor) -> float:
    """Return the relative difference of states from those of the target here."""
    reference = reference.float()
    return ((states.float() - reference).norm() / reference.norm()).item()

"""Hidden states of a target, computed once before training instead of in every step."""

import torch
from torch.utils.data import Dataset

from data.corpora.fingerprints import model_fingerprint
from data.rows.packing import PackedRows
from data.rows.states import DTYPE, RowsWithStates
from terminal.progress import track
from trainers.base import DISTRIBUTIONS, HIDDEN_STATES, BaseModule

ROWS = 8  # rows per forward of the target
# Relative difference of stored and computed states of the same target: bfloat16's rounding is
# 0.004, and other kernels, batches or devices add to it.
TOLERANCE = 0.05


def with_states(rows: Dataset, module: BaseModule, target: str, most: float) -> RowsWithStates:
    """Give a module rows with its target's states, at most `most` GB, to be made at the start."""
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
    for shard in track(missing[trainer.global_rank :: trainer.world_size], "states of the target"):
        of = rows.rows_of(shard)
        parts = [range(i, min(i + ROWS, of.stop)) for i in range(of.start, of.stop, ROWS)]
        rows.write(shard, torch.cat([computed(module, rows, part) for part in parts]))
    trainer.strategy.barrier()


def computed(module: BaseModule, rows: RowsWithStates, which: range) -> torch.Tensor:
    """Compute the states [rows, length, width] of some rows, by a forward of the target."""
    plain = PackedRows(rows.folder)
    found = [plain[i] for i in which]
    columns = {c: torch.stack([row[c] for row in found]).to(module.device) for c in found[0]}
    batch = {  # clean tokens alone: no draft block follows them
        "input_ids": columns["input_ids"],
        "position_ids": columns["position"],
        "document": columns["document"],
        "block": torch.full_like(columns["document"], -1),
        "target": columns["input_ids"].new_zeros(len(found), 0, 1),
    }
    states = module.target_states(batch, module.target_layers, logits=False).hidden_states
    return torch.cat(states, -1).to("cpu", DTYPE)


def _check_first(module: BaseModule, rows: RowsWithStates) -> None:
    """Raise ValueError unless the first row's states are those of this target."""
    known = rows[0]["document"] >= 0
    ours, theirs = computed(module, rows, range(1))[0, known].float(), rows.states(0)[known].float()
    if (ours - theirs).norm() > TOLERANCE * ours.norm():
        raise ValueError(
            f"{rows.states_folder} has hidden states of another target than "
            f"{rows.made_by['target']} is now: remove that folder, or give data.folder=..."
        )

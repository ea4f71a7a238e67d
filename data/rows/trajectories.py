"""Jacobi trajectories: how they are stored, read and packed for pcLLM's training.

A trajectory is every state of a block of n tokens, from random tokens to the fixed point. It is
stored as its first state and, for each pass, the tokens that the pass changed.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data.corpora.answers import read_manifest, shard_path
from data.corpora.fingerprints import input_fingerprint
from data.corpora.stdlib import check_split, is_held_out
from data.corruption.schedules import progressive_times
from data.files import atomic_write
from data.text.tokenizer import fingerprint

# Columns of a row beside its id, prompt and answer; the lists of all blocks one after another.
CHANGES = ("start", "passes", "changes", "at", "to")


class Answer(NamedTuple):
    """A prompt and the trajectories of its answer of at most N blocks of n tokens.

    prompt: [P], padded on the left; prompt_size of its tokens are real. clean: [N, n], the
    fixed points, of which the first `size` tokens are real. states: for each block [passes+1, n].
    """

    prompt: Tensor
    prompt_size: int
    clean: Tensor
    size: int
    states: list[Tensor]


class NoisyBlocks:
    """Corruption of an answer: each block at the noise ratio that the schedule gives it (Eq. 7).

    window: w, blocks of a window. order: 'linear', 'random' or 'reverse'.
    """

    def __init__(self, window: int, order: str, tokenizer: PreTrainedTokenizerBase):
        progressive_times(1, window, order, Generator())  # a mistake is to show before training
        self.window, self.order = window, order
        self.pad_id = tokenizer.pad_token_id or 0

    def __call__(self, answer: Answer, generator: Generator, number: int = 0) -> dict[str, Tensor]:
        """An answer of `Trajectories` -> one sample of the batch (see `interleave`)."""
        times = progressive_times(len(answer.clean), self.window, self.order, generator)
        noisy = answer.clean.clone()
        n = noisy.shape[1]
        for i, (states, t) in enumerate(zip(answer.states, times.tolist())):
            size = min(n, answer.size - i * n)
            noisy[i] = nearest_state(states, answer.clean[i], size, t)
        return interleave(answer, noisy, self.pad_id)


def nearest_state(states: Tensor, clean: Tensor, size: int, t: float) -> Tensor:
    """The state [n] of [k, n] whose count of wrong tokens is nearest to ceil(t size).

    size: how many tokens of the block the answer has; the others do not count.
    """
    wrong = (states != clean)[:, :size].sum(1)
    wanted = math.ceil(t * size - 1e-6)  # less a rounding error: 0.1 * 10 is to be 1
    return states[(wrong - wanted).abs().argmin()]


def interleave(answer: Answer, noisy: Tensor, pad_id: int) -> dict[str, Tensor]:
    """Prompt, then each block twice, noisy [N, n] and clean, at the same positions (Figure 1b).

    Returns the fields of `models.masks.Layout` and input_ids, position_ids, [P + 2 N n] each:
    `index` counts from the answer's first token, `block` is 0 for noisy and 1 for clean tokens.
    target, present: [N, n], the clean tokens and whether the answer has them; noised: bool [N, n],
    from the first wrong token of the block on.

    Example: prompt a, block b c, noisy x c: a | x c | b c at positions 0 | 1 2 | 1 2.
    """
    N, n = noisy.shape
    P = len(answer.prompt)
    ahead = torch.arange(-P, 0)
    index = torch.arange(N * n).view(N, 1, n).expand(N, 2, n).flatten()
    index = torch.cat([ahead, index])
    block = torch.tensor([0, 1]).view(1, 2, 1).expand(N, 2, n).flatten()
    there = (index >= -answer.prompt_size) & (index < answer.size)
    tokens = torch.cat([answer.prompt, torch.stack([noisy, answer.clean], 1).flatten()])
    present = torch.arange(N * n).view(N, n) < answer.size
    return {
        "input_ids": torch.where(there, tokens, pad_id),
        "position_ids": (index + answer.prompt_size).clamp_min(0),
        "document": there.long() - 1,
        "index": index,
        "block": torch.cat([torch.full((P,), -1), block]),
        "target": torch.where(present, answer.clean, pad_id),
        "present": present,
        "noised": ((noisy != answer.clean) & present).cumsum(1).bool() & present,
    }


def replay(row: dict, n: int) -> list[Tensor]:
    """All states of each block of a stored row: [passes + 1, n] a block.

    >>> row = dict(start=[7, 8], passes=[2], changes=[2, 1], at=[0, 1, 1], to=[5, 9, 6])
    >>> replay(row, 2)[0].tolist()
    [[7, 8], [5, 9], [5, 6]]
    """
    start = torch.tensor(row["start"]).view(-1, n)
    changes, change, found = iter(row["changes"]), iter(zip(row["at"], row["to"])), []
    for state, passes in zip(start, row["passes"]):
        states = [state]
        for _ in range(passes):
            state = state.clone()
            for _ in range(next(changes)):
                at, to = next(change)
                state[at] = to
            states.append(state)
        found.append(torch.stack(states))
    return found


class Trajectories(Dataset):
    """The answers of a collection, mapped into memory from one Arrow file."""

    def __init__(self, file: Path, prompt_length: int, blocks: int, block_size: int):
        import pyarrow

        self.file, self.shape = file, (prompt_length, blocks, block_size)
        self._table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> Answer:
        (row,) = self._table.slice(i, 1).to_pylist()
        P, N, n = self.shape
        prompt, answer = row["prompt_ids"], row["answer_ids"]
        clean = torch.tensor(answer + [0] * (N * n - len(answer))).view(N, n)
        padded = torch.tensor([0] * (P - len(prompt)) + prompt)
        return Answer(padded, len(prompt), clean, len(answer), replay(row, n))

    def __reduce__(self) -> tuple:
        # A spawned worker maps the file again.
        return Trajectories, (self.file, *self.shape)


def rows(
    source: str,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: str = "train",
) -> Trajectories:
    """The trajectories of a collection (`python -m decoding.collect recipe=pcllm_trajectories`).

    source: the collection's folder. model: the model that is trained, which must be the one that
    made them. folder: where the mapped file is kept. split: 'train' or 'heldout'.
    """
    manifest = read_manifest(source)
    ours = {"tokenizer": fingerprint(tokenizer), "weights": weights_fingerprint(model)}
    for what, here in ours.items():
        if manifest.get(what) != here:
            raise ValueError(
                f"{source} was collected with another model than {model} ({what} "
                f"{manifest.get(what)}, here {here}): collect it again, under another name=..., "
                f"with python -m decoding.collect recipe={manifest['recipe']}"
            )
    n = manifest["block_size"]
    blocks = -(-manifest["max_new_tokens"] // n)
    key = json.dumps([manifest, split], sort_keys=True).encode()
    file = Path(folder) / f"{hashlib.sha256(key).hexdigest()[:16]}.arrow"
    if not file.exists():
        _write(file, Path(source), split)
    return Trajectories(file, manifest["prompts"]["length"], blocks, n)


def _write(file: Path, source: Path, split: str) -> None:
    """The rows of a split as one Arrow file, which appears whole or not at all."""
    import pyarrow
    import pyarrow.parquet as parquet

    check_split(split)
    shards = sorted(shard_path(source, 0).parent.glob("*.parquet"))
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with atomic_write(file) as temporary:
        with pyarrow.OSFile(str(temporary), "wb") as sink:
            writer = None
            for shard in shards:
                table = parquet.read_table(shard)
                writer = writer or pyarrow.ipc.new_file(sink, table.schema)
                # Prompts come from training documents: their ids alone are never held out.
                ids = table["id"].to_pylist()
                held_out = [is_held_out(f"answers to {id}") == (split == "heldout") for id in ids]
                table = table.filter(pyarrow.array(held_out))
                writer.write_table(table)
                count += len(table)
            if writer:
                writer.close()
        if not count:
            raise ValueError(
                f"{source} holds no trajectories of split {split!r}: collect more prompts with "
                "python -m decoding.collect recipe=pcllm_trajectories prompts.count=..."
            )


def weights_fingerprint(model: str) -> str:
    """That of a folder's model; a Hub id is its own."""
    return input_fingerprint(model) if Path(model).is_dir() else model

"""Jacobi trajectories for pcLLM's training: storage format, data set and packing.

A trajectory is the sequence of states of a block of n tokens, from random tokens to the fixed
point. It is stored as its first state and, for each pass, the tokens that the pass changed.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data.arguments import Small, Split
from data.corpora.answers import IDS, UnfitCollection, chosen_rows
from data.corpora.fingerprints import input_fingerprint, model_fingerprint, same_model
from data.corruption.schedules import NoiseOrder, progressive_times
from data.files import atomic_write, shortened
from data.text.tokenizer import checked_manifest

# Columns of trajectories, besides id, prompt and answer; each concatenates the lists of all blocks.
CHANGES = ("start", "passes", "changes", "at", "to")


class Answer(NamedTuple):
    """A prompt, and its answer's trajectories in at most N blocks of n tokens.

    Attributes:
        prompt: [P], left-padded.
        prompt_size: Tokens of the prompt without padding.
        clean: [N, n], the fixed points, right-padded.
        size: Tokens of the answer without padding.
        states: Each block's trajectory, [passes + 1, n].
    """

    prompt: Tensor
    prompt_size: int
    clean: Tensor
    size: int
    states: list[Tensor]


class NoisyBlocks:
    """The training sample of pcLLM: each block at the noise ratio of the schedule (Eq. 7).

    Args:
        window: w, blocks per cycle of the noise schedule.
        order: 'linear', 'random' or 'reverse'.
        tokenizer: Gives the padding id.
        state: How a trajectory's state is chosen: 'wrong' by its number of wrong tokens, as in the
            paper's text; 'tail' by its tokens from the first wrong one on, as in the authors' code;
            'any' at random, whatever the ratio (CLLM, Eq. 5).
    """

    def __init__(
        self,
        window: Small,
        order: NoiseOrder,
        tokenizer: PreTrainedTokenizerBase,
        state: Literal["wrong", "tail", "any"] = "wrong",
    ):
        self.window, self.order, self.state = window, order, state
        self.pad_id = tokenizer.pad_token_id or 0

    def __call__(self, answer: Answer, generator: Generator, number: int = 0) -> dict[str, Tensor]:
        """Return the training sample (see `interleave`) of an item of `Trajectories`."""
        blocks = len(answer.clean)
        times = progressive_times(blocks, self.window, self.order, generator)
        noisy = answer.clean.clone()
        n = noisy.shape[1]
        for i, (states, t) in enumerate(zip(answer.states, times.tolist())):
            size = min(n, answer.size - i * n)
            if self.state == "any":
                noisy[i] = states[torch.randint(len(states), (), generator=generator)]
            else:
                noisy[i] = nearest_state(states, answer.clean[i], size, t, self.state == "tail")
        return interleave(answer, noisy, self.pad_id)


def nearest_state(states: Tensor, clean: Tensor, size: int, t: float, tail: bool = False) -> Tensor:
    """Return the state [n] of a trajectory [k, n] with closest to ceil(t size) noisy tokens.

    Args:
        states: [k, n].
        clean: The fixed point [n].
        size: Tokens of the block without padding, which is not compared.
        t: Noise ratio, in [0, 1].
        tail: Count every token from the first wrong one on as noisy, not only wrong ones.
    """
    wrong = (states != clean)[:, :size]
    noisy = (wrong.cumsum(1) > 0 if tail else wrong).sum(1)
    wanted = math.ceil(t * size - 1e-6)  # the margin is for rounding: 0.1 * 10 must give 1
    return states[(noisy - wanted).abs().argmin()]


def interleave(answer: Answer, noisy: Tensor, pad_id: int) -> dict[str, Tensor]:
    """Return the packed sequence of pcLLM (Figure 1b): the prompt, then each block noisy and clean.

    Both copies of a block share their positions. Example: prompt a, block b c, noisy x c:
    a | x c | b c at positions 0 | 1 2 | 1 2. `noisy` is [N, n].

    Returns:
        input_ids, position_ids, document, index, block: [P + 2 N n] each, the layout of
        `models.masks.branches`: `index` is 0 at the answer's first token, `block` is 0 for noisy
        and 1 for clean tokens. target: [N, n], clean tokens. present: bool [N, n], tokens of the
        answer (not padding). noised: bool [N, n], from the first wrong token of a block on.
    """
    N, n = noisy.shape
    P = len(answer.prompt)
    index = torch.arange(N * n).view(N, 1, n).expand(N, 2, n).flatten()
    index = torch.cat([torch.arange(-P, 0), index])
    block = torch.tensor([0, 1]).view(1, 2, 1).expand(N, 2, n).flatten()
    real = (index >= -answer.prompt_size) & (index < answer.size)
    tokens = torch.cat([answer.prompt, torch.stack([noisy, answer.clean], 1).flatten()])
    present = torch.arange(N * n).view(N, n) < answer.size
    return {
        "input_ids": torch.where(real, tokens, pad_id),
        "position_ids": (index + answer.prompt_size).clamp_min(0),
        "document": real.long() - 1,
        "index": index,
        "block": torch.cat([torch.full((P,), -1), block]),
        "target": torch.where(present, answer.clean, pad_id),
        "present": present,
        "noised": ((noisy != answer.clean) & present).cumsum(1).bool() & present,
    }


def replay(row: dict, n: int) -> list[Tensor]:
    """Return the states of each block of a stored row, [passes + 1, n] per block.

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
    """A data set of answers with trajectories, memory-mapped from one Arrow file.

    Prompts are padded to P tokens, answers to N blocks of n tokens; `shape` is (P, N, n).
    """

    def __init__(self, file: Path, prompt_length: int, blocks: int, block_size: int):
        import pyarrow

        self.file, self.shape = file, (prompt_length, blocks, block_size)
        self.fingerprint = file.stem  # of all that they were made from
        self._table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()

    @property
    def largest_id(self) -> int:
        """The largest token id of the trajectories, which a network must know."""
        from pyarrow import compute

        columns = (self._table[name] for name in (*IDS, "start", "to"))
        found = (compute.max(compute.list_flatten(column)).as_py() for column in columns)
        return max((id for id in found if id is not None), default=0)

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
        # A spawned worker maps the file itself.
        return Trajectories, (self.file, *self.shape)


def rows(
    source: str,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: Split = "train",
    where: str | None = None,
) -> Trajectories:
    """Return the trajectories of a collection (`decoding.collect recipe=pcllm_trajectories`).

    Args:
        source: The collection's folder.
        model: The trained model, which must have made the trajectories.
        tokenizer: The model's.
        folder: Cache of the memory-mapped file.
        split: 'train' or 'heldout', by a hash of the prompt's id.
        where: As in `data.corpora.answers.read_answers`.
    """
    manifest = checked_manifest(source, tokenizer)
    if not same_model(model, manifest.get("weights")):
        raise UnfitCollection(
            source,
            f"another model than {model} (weights {manifest.get('weights')}, here "
            f"{model_fingerprint(model)})",
        )
    n, length, new = _sizes(source, manifest)
    blocks = -(-new // n)
    key = json.dumps([input_fingerprint(source), split, where], sort_keys=True).encode()
    file = Path(folder) / f"{hashlib.sha256(key).hexdigest()[:16]}.arrow"
    if not file.exists():
        _write(file, Path(source), split, where, (length, blocks, n))
    return Trajectories(file, length, blocks, n)


def _sizes(source: str, manifest: dict) -> tuple[int, int, int]:
    """Return tokens of a block, of a prompt and of an answer, as a manifest of trajectories has."""
    prompts = manifest.get("prompts")
    length = prompts.get("length") if isinstance(prompts, dict) else None
    sizes: Any = (manifest.get("block_size"), length, manifest.get("max_new_tokens"))
    if any(type(size) is not int or not 1 <= size <= 2**20 for size in sizes):
        raise ValueError(
            f"{source} is no collection of trajectories: its manifest.json has no integers as "
            f"block_size, prompts.length and max_new_tokens, but {shortened(sizes)}"
        )
    return sizes


def _check_row(row: dict, shape: tuple[int, int, int], source: Path) -> None:
    """Check that `replay` can follow a stored row, of `shape` (P, N, n)."""
    P, N, n = shape
    blocks, size = len(row["passes"]), len(row["answer_ids"])
    whole = (
        len(row["prompt_ids"]) <= P
        and size <= blocks * n <= N * n
        and len(row["start"]) == blocks * n
        and sum(row["passes"]) == len(row["changes"])
        and sum(row["changes"]) == len(row["at"]) == len(row["to"])
        and max(row["at"], default=0) < n
    )
    if not whole:
        raise ValueError(
            f"{source}: the trajectory of the prompt {row['id']!r} is damaged: its lists do not "
            "fit each other or the manifest"
        )


def _write(
    file: Path, source: Path, split: str, where: str | None, shape: tuple[int, int, int]
) -> None:
    """Write the rows of a split into one Arrow file, atomically."""
    import pyarrow

    file.parent.mkdir(parents=True, exist_ok=True)
    count = answered = 0
    with atomic_write(file) as temporary:
        with pyarrow.OSFile(str(temporary), "wb") as sink:
            writer = None
            for table, found in chosen_rows(source, split, where, CHANGES):
                for row in found:
                    _check_row(row, shape, source)
                    answered += len(row["answer_ids"])
                writer = writer or pyarrow.ipc.new_file(sink, table.schema)
                writer.write_table(table)
                count += len(table)
            if writer:
                writer.close()
        if not answered:
            raise ValueError(
                f"{source} holds no {'answer' if count else 'trajectories'} of split {split!r}"
                f"{'' if where is None else f' with where={where!r}'}: collect more prompts with "
                "python -m decoding.collect recipe=pcllm_trajectories prompts.count=..."
            )

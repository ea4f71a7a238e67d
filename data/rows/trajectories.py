"""Jacobi trajectories for pcLLM's training: storage format, data set and packing.

A trajectory is the sequence of states of a block of n tokens, from random tokens to the fixed
point. It is stored as its first state and, for each pass, the tokens that the pass changed.
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

from data.corpora.answers import in_split, read_manifest, read_shards
from data.corpora.conditions import conditions, keeps
from data.corpora.fingerprints import input_fingerprint
from data.corpora.stdlib import check_split
from data.corruption.schedules import progressive_times
from data.files import atomic_write
from data.text.tokenizer import fingerprint

# Columns of trajectories, besides id, prompt and answer; each concatenates the lists of all blocks.
CHANGES = ("start", "passes", "changes", "at", "to")


# How the noisy state of a block is chosen from its trajectory (`NoisyBlocks`).
STATES = ("wrong", "tail", "any")


class Answer(NamedTuple):
    """A prompt, and its answer's trajectories in at most N blocks of n tokens.

    Attributes:
        prompt: [P], left-padded.
        prompt_size: tokens of the prompt without padding.
        clean: [N, n], the fixed points, right-padded.
        size: tokens of the answer without padding.
        states: for each block the states of its trajectory, [passes + 1, n].
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
        tokenizer: gives the padding id.
        state: which state of a block's trajectory is its noisy one, of STATES. 'wrong': by its
            number of wrong tokens, as the paper's text says. 'tail': by the tokens from its first
            wrong one on, as the authors' code has it. 'any': drawn from all, whatever the ratio
            (CLLM, Eq. 5).
        t_max: noise ratio of a cycle's noisiest block; None: (w - 1) / w, as in Eq. 7. The ablation
            of Table 4 has 1.

    Raises:
        ValueError: for a window below 1, an unknown order or state, or a t_max outside (0, 1].
    """

    def __init__(
        self,
        window: int,
        order: str,
        tokenizer: PreTrainedTokenizerBase,
        state: str = "wrong",
        t_max: float | None = None,
    ):
        progressive_times(1, window, order, Generator(), t_max)  # raises now and not in training
        if state not in STATES:
            raise ValueError(f"unknown state {state!r}. Choose from {list(STATES)}")
        self.window, self.order, self.state, self.t_max = window, order, state, t_max
        self.pad_id = tokenizer.pad_token_id or 0

    def __call__(self, answer: Answer, generator: Generator, number: int = 0) -> dict[str, Tensor]:
        """One training sample, made from an item of `Trajectories`. Returns: see `interleave`."""
        blocks = len(answer.clean)
        times = progressive_times(blocks, self.window, self.order, generator, self.t_max)
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
    """The state of a trajectory whose number of noisy tokens is nearest to ceil(t size).

    Args:
        states: [k, n].
        clean: the fixed point [n].
        size: tokens of the block without padding; the others are not compared.
        t: noise ratio, in [0, 1].
        tail: whether every token from the first wrong one on is noisy, and not only wrong ones.

    Returns:
        [n].
    """
    wrong = (states != clean)[:, :size]
    noisy = (wrong.cumsum(1) > 0 if tail else wrong).sum(1)
    wanted = math.ceil(t * size - 1e-6)  # the margin is for rounding: 0.1 * 10 must give 1
    return states[(noisy - wanted).abs().argmin()]


def interleave(answer: Answer, noisy: Tensor, pad_id: int) -> dict[str, Tensor]:
    """The packed sequence of pcLLM (Figure 1b): the prompt, then each block noisy and clean.

    The noisy and the clean copy of a block share their positions. Example: prompt a, block b c,
    noisy x c: a | x c | b c at positions 0 | 1 2 | 1 2.

    Args:
        answer: prompt and clean blocks.
        noisy: noisy blocks [N, n].
        pad_id: token id of padding.

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
    """The states of each block of a stored row, [passes + 1, n] per block.

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

    Args:
        file: the Arrow file.
        prompt_length: P, to which prompts are padded.
        blocks: N, to which answers are padded.
        block_size: n.
    """

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
        # A spawned worker maps the file itself.
        return Trajectories, (self.file, *self.shape)


def rows(
    source: str,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: str = "train",
    where: str | None = None,
) -> Trajectories:
    """The trajectories of a collection (`python -m decoding.collect recipe=pcllm_trajectories`).

    Args:
        source: the collection's folder.
        model: the model that is trained; it must be the one that the trajectories are of.
        tokenizer: the model's.
        folder: cache of the memory-mapped file.
        split: 'train' or 'heldout', by a hash of the prompt's id.
        where: take only the answers that meet these conditions, as in
            `data.corpora.answers.read_answers`.

    Raises:
        ValueError: for a missing collection, one of another model or tokenizer, or one without
            answers of the split (that meet the conditions).
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
    made_from = [manifest, split, *([where] if where is not None else [])]
    key = json.dumps(made_from, sort_keys=True).encode()
    file = Path(folder) / f"{hashlib.sha256(key).hexdigest()[:16]}.arrow"
    if not file.exists():
        _write(file, Path(source), split, where)
    return Trajectories(file, manifest["prompts"]["length"], blocks, n)


def _write(file: Path, source: Path, split: str, where: str | None) -> None:
    """Write the rows of a split into one Arrow file, atomically."""
    import pyarrow

    check_split(split)
    asked = conditions(where)
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with atomic_write(file) as temporary:
        with pyarrow.OSFile(str(temporary), "wb") as sink:
            writer = None
            for shard, table in read_shards(source):
                writer = writer or pyarrow.ipc.new_file(sink, table.schema)
                chosen = [in_split(id, split) for id in table["id"].to_pylist()]
                if asked:
                    rows = table.to_pylist()
                    met = [keeps(row, asked, f"{shard}, row {i}") for i, row in enumerate(rows)]
                    chosen = [here and so for here, so in zip(chosen, met)]
                table = table.filter(pyarrow.array(chosen))
                writer.write_table(table)
                count += len(table)
            if writer:
                writer.close()
        if not count:
            raise ValueError(
                f"{source} holds no trajectories of split {split!r}"
                f"{'' if where is None else f' with where={where!r}'}: collect more prompts with "
                "python -m decoding.collect recipe=pcllm_trajectories prompts.count=..."
            )


def weights_fingerprint(model: str) -> str:
    """The fingerprint of a model folder's files; of a Hub id, the id itself."""
    return input_fingerprint(model) if Path(model).is_dir() else model

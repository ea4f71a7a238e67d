"""Jacobi trajectories: the training data of pcLLM (its paper, section 2.2)."""

from torch import Tensor

from data.arguments import BlockSize, Count, Seed, Tokens
from data.corpora.fingerprints import model_fingerprint
from data.rows.trajectories import CHANGES
from data.text.tokenizer import fingerprint
from decoding.collectors.chats import Turns
from decoding.collectors.teachers import decoded
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed
from decoding.loading import for_inference, load_tokenizer
from decoding.samplers.jacobi import JacobiSampler
from models import causal


class JacobiTrajectories:
    """Collector of a teacher's greedy answers, with every Jacobi state of every block.

    A trajectory depends only on the seed and the prompt's id, so a collection that was killed and
    resumed equals one that was not.

    Args:
        teacher: Folder or Hub id of a causal LM.
        block_size: Tokens of a block.
        max_new_tokens: Longest answer, in tokens.
        seed: Of the collection.
        dtype, device, device_map: Type and place of the weights, as in `decoding.load`.
        at_once: Prompts that are decoded together, which bounds the memory of keys and values;
            None: a whole shard.
    """

    def __init__(
        self,
        teacher: str,
        block_size: BlockSize,
        max_new_tokens: Tokens,
        seed: Seed,
        dtype: str = "bfloat16",
        device: str = "cpu",
        device_map: str | None = None,
        at_once: Count | None = None,
    ):
        if not 1 <= block_size <= max_new_tokens:
            raise ValueError(
                f"block_size={block_size} is not allowed: it must be in 1..{max_new_tokens} "
                "(max_new_tokens)"
            )
        self.teacher, self.block_size, self.seed = teacher, block_size, seed
        self.params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        self.tokenizer, self.at_once = load_tokenizer(teacher), at_once
        self.placing: dict = {"dtype": dtype, "device": device, "device_map": device_map}
        self._sampler: Recorder | None = None
        self.left_out: dict[str, str] = {}

    def made_with(self) -> dict:
        """Return the options that the trajectories depend on, for the collection's manifest."""
        return {
            "teacher": self.teacher,
            "weights": model_fingerprint(self.teacher),
            "tokenizer": fingerprint(self.tokenizer),
            "block_size": self.block_size,
            "max_new_tokens": self.params.most,
            "dtype": self.placing["dtype"],
            "seeds": "blake2b",  # a collection is not continued with seeds of another kind
        }

    def bytes_of(self, prompt_ids: list[int]) -> int:
        """Return an upper bound of the bytes of a prompt's trajectory on disk, with a margin."""
        tokens = self.params.most
        # Token i of a block cannot change after pass i: at most (n + 1) / 2 changes on average.
        changes = tokens * (self.block_size + 1) // 2
        return 4 * (len(prompt_ids) + 4 * tokens + 2 * changes) + 256

    number = 1  # answer to a prompt

    @property
    def most(self) -> int:
        """The longest answer, in tokens."""
        return self.params.most

    @property
    def emitted(self) -> int:
        """The tokens that the teacher has decoded so far."""
        return 0 if self._sampler is None else self._sampler.emitted

    def seed_of(self, prompt: str, turn: int = 0) -> int:
        """Return the seed of a trajectory, by the prompt's id and the chat's turn."""
        return derived_seed(self.seed, prompt, *([turn] if turn else []))

    def collect(self, prompts: list[dict], first: int = 0) -> list[dict]:
        """Decode prompts {"id", "prompt_ids"}; return rows for `data.rows.trajectories.replay`.

        `left_out` says then why prompts have no trajectory. No trajectory depends on `first`.
        """
        if self._sampler is None:
            network = causal.load(self.teacher, **self.placing)
            for_inference(network)
            options = {"block_size": self.block_size, "running": False}
            self._sampler = Recorder(network, self.tokenizer, **options)
        chats = Turns(self.tokenizer)
        prompts = chats.ask(prompts, self.seed, self.most, self._write)
        rows = chats.collect(prompts, self._trajectories)
        self.left_out = chats.left_out
        return rows

    def _write(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]
    ) -> list[tuple[list[int], bool]]:
        """Return what the teacher writes after prompts, and whether it ends there."""
        assert self._sampler is not None
        found = decoded(self._sampler, prompts, params, seeds, self.at_once)
        results = [None if isinstance(f, str) else f[1] for f in found]
        return [(r.token_ids, r.finish_reason == "eos") if r else ([], False) for r in results]

    def _trajectories(self, prompts: list[dict]) -> list[dict | str]:
        """Return the rows of prompts, or why there is none."""
        assert self._sampler is not None
        given = [p["prompt_ids"] for p in prompts]
        seeds = [self.seed_of(p["id"], p.get("turn", 0)) for p in prompts]
        results = decoded(self._sampler, given, self.params, seeds, self.at_once)
        return [
            found
            if isinstance(found, str)
            else {
                "id": prompt["id"],
                "prompt_ids": prompt["prompt_ids"],
                "answer_ids": found[1].token_ids,
                "finish_reason": found[1].finish_reason,
                **self._sampler.found[found[0]],
            }
            for prompt, found in zip(prompts, results)
        ]


class Recorder(JacobiSampler):
    """A Jacobi sampler that records the changes of every pass, for each sequence in `found`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.found: dict[int, dict[str, list[int]]] = {}

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        super().begin(batch, params)
        self.found |= {n: {name: [] for name in CHANGES} for n in batch.requests}

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        n = self.block_size
        done = (batch.lengths - batch.state.prompt).tolist()
        opening = [length - d % n for length, d in zip(batch.lengths.tolist(), done)]
        before = [row[a : a + n] for row, a in zip(batch.tokens.tolist(), opening)]
        choice, emitted = super().cycle(batch, params)
        for b, new in enumerate(choice.tolist()):
            found, first = self.found[batch.requests[b]], done[b] % n
            # The target's own token that opens the next block belongs to that block's first state.
            if len(found["passes"]) == done[b] // n:
                found["start"] += before[b]
                found["passes"].append(0)
            changed = [i for i in range(first, n) if before[b][i] != new[i - first]]
            found["passes"][-1] += 1
            found["changes"].append(len(changed))
            found["at"] += changed
            found["to"] += [new[i - first] for i in changed]
        return choice, emitted

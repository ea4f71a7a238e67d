"""Jacobi trajectories: the training data of pcLLM (its paper, section 2.2)."""

from torch import Tensor

from data.rows.trajectories import CHANGES, weights_fingerprint
from data.text.tokenizer import fingerprint
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed
from decoding.loading import for_inference, load_tokenizer
from decoding.samplers.jacobi import JacobiSampler
from models import causal


class JacobiTrajectories:
    """Collector of a teacher's greedy answers, with every Jacobi state of every block.

    A trajectory depends on the seed and the prompt's id only, so a collection that was killed and
    resumed equals one that was not.

    Args:
        teacher: Folder or Hub id of a causal LM.
        block_size: Tokens of a block.
        max_new_tokens: Longest answer, in tokens.
        seed: Of the collection.
        dtype: Of the weights.
        device: Where to run.
        device_map: Spreads the teacher over devices, as in `decoding.load`.
        at_once: Prompts that are decoded together, which bounds the memory of keys and values;
            None: all of a shard.

    Raises:
        ValueError: `block_size` is not in 1..max_new_tokens.
    """

    def __init__(
        self,
        teacher: str,
        block_size: int,
        max_new_tokens: int,
        seed: int,
        dtype: str = "bfloat16",
        device: str = "cpu",
        device_map: str | None = None,
        at_once: int | None = None,
    ):
        if not 1 <= block_size <= max_new_tokens:
            raise ValueError(
                f"block_size={block_size} is not allowed: it must be in 1..{max_new_tokens} "
                "(max_new_tokens)"
            )
        self.teacher, self.block_size, self.seed = teacher, block_size, seed
        self.params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        self.tokenizer = load_tokenizer(teacher)
        self.dtype, self.at_once = dtype, at_once
        self.placing = {"dtype": dtype, "device": device, "device_map": device_map}
        self._sampler: Recorder | None = None

    def made_with(self) -> dict:
        """The options that the trajectories depend on, for the collection's manifest."""
        return {
            "teacher": self.teacher,
            "weights": weights_fingerprint(self.teacher),
            "tokenizer": fingerprint(self.tokenizer),
            "block_size": self.block_size,
            "max_new_tokens": self.params.max_new_tokens,
            "dtype": self.dtype,
            "seeds": "blake2b",  # a collection is not continued with seeds of another kind
        }

    def bytes_of(self, prompt_ids: list[int]) -> int:
        """Upper bound of the bytes of a prompt's trajectory on disk, with a margin."""
        tokens = self.params.max_new_tokens
        # Token i of a block cannot change after pass i: at most (n + 1) / 2 changes on average.
        changes = tokens * (self.block_size + 1) // 2
        return 4 * (len(prompt_ids) + 4 * tokens + 2 * changes) + 256

    def seed_of(self, prompt: str) -> int:
        """The seed of a prompt's trajectory, by the prompt's id."""
        return derived_seed(self.seed, prompt)

    def collect(self, prompts: list[dict]) -> list[dict]:
        """Decode prompts and record their trajectories.

        Args:
            prompts: {"id", "prompt_ids"} of each prompt.

        Returns:
            Rows of a table that `data.rows.trajectories.replay` reads.
        """
        if self._sampler is None:
            network = causal.load(self.teacher, **self.placing)
            for_inference(network)
            self._sampler = Recorder(
                network, self.tokenizer, block_size=self.block_size, running=False
            )
        seeds = [self.seed_of(p["id"]) for p in prompts]
        results = self._sampler.generate(
            [p["prompt_ids"] for p in prompts], self.params, seeds=seeds, at_once=self.at_once
        )
        return [
            {
                "id": prompt["id"],
                "prompt_ids": prompt["prompt_ids"],
                "answer_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                **self._sampler.found[row],
            }
            for row, (prompt, result) in enumerate(zip(prompts, results))
        ]


class Recorder(JacobiSampler):
    """A Jacobi sampler that records the changes of every pass.

    Attributes:
        found: The columns `data.rows.trajectories.CHANGES` of each sequence, by number.
    """

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

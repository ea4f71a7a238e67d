"""Jacobi trajectories: what pcLLM is trained on (section 2.2)."""

from zlib import crc32

from torch import Tensor

from data.rows.trajectories import CHANGES, weights_fingerprint
from data.text.tokenizer import fingerprint
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Rows
from decoding.loading import load_tokenizer
from decoding.samplers.jacobi import JacobiSampler
from models import causal


class JacobiTrajectories:
    """Greedy answers of a teacher, block by block, with every state of every block.

    teacher: a folder or Hub id. The trajectory of a prompt depends on the seed and the prompt's id
    only, so a collection that was killed and started again is the collection that was not.
    """

    def __init__(
        self,
        teacher: str,
        block_size: int,
        max_new_tokens: int,
        seed: int,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        if not 1 <= block_size <= max_new_tokens:
            raise ValueError(
                f"block_size={block_size} is not allowed: it must be in 1..{max_new_tokens}, "
                "the longest answer"
            )
        self.teacher, self.block_size, self.seed = teacher, block_size, seed
        self.params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        self.tokenizer = load_tokenizer(teacher)
        self.dtype, self.device = dtype, device
        self._sampler: Recorder | None = None

    def made_with(self) -> dict:
        """What the trajectories depend on, for the manifest."""
        return {
            "teacher": self.teacher,
            "weights": weights_fingerprint(self.teacher),
            "tokenizer": fingerprint(self.tokenizer),
            "block_size": self.block_size,
            "max_new_tokens": self.params.max_new_tokens,
            "dtype": self.dtype,
        }

    def bytes_of(self, prompt_ids: list[int]) -> int:
        """An upper bound of what a prompt's trajectories take on disk, and a margin."""
        tokens = self.params.max_new_tokens
        # Token i of a block cannot change after pass i: on average (n + 1) / 2 changes a token.
        changes = tokens * (self.block_size + 1) // 2
        return 4 * (len(prompt_ids) + 4 * tokens + 2 * changes) + 256

    def collect(self, prompts: list[dict]) -> list[dict]:
        """Rows for prompts {"id", "prompt_ids"}: see `data.rows.trajectories.replay`."""
        if self._sampler is None:
            network = causal.load(self.teacher, dtype=self.dtype).to(self.device)
            self._sampler = Recorder(
                network, self.tokenizer, block_size=self.block_size, running=False
            )
        seeds = [crc32(f"{self.seed}/{p['id']}".encode()) for p in prompts]
        results = self._sampler.generate(
            [p["prompt_ids"] for p in prompts], self.params, seeds=seeds
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
    """Keeps the changes of every pass: found[row], the columns `data.rows.trajectories.CHANGES`."""

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """See `JacobiSampler`."""
        super().begin(rows, params)
        self.found = [{name: [] for name in CHANGES} for _ in rows.row]

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """See `JacobiSampler`."""
        n = self.block_size
        done = (rows.lengths - rows.state.prompt).tolist()
        opening = [length - d % n for length, d in zip(rows.lengths.tolist(), done)]
        before = [row[a : a + n] for row, a in zip(rows.tokens.tolist(), opening)]
        choice, emitted = super().cycle(rows, params)
        for b, new in enumerate(choice.tolist()):
            found, first = self.found[rows.row[b]], done[b] % n
            # The token of its own that opens the next block belongs to that block's first state.
            if len(found["passes"]) == done[b] // n:
                found["start"] += before[b]
                found["passes"].append(0)
            changed = [i for i in range(first, n) if before[b][i] != new[i - first]]
            found["passes"][-1] += 1
            found["changes"].append(len(changed))
            found["at"] += changed
            found["to"] += [new[i - first] for i in changed]
        return choice, emitted

"""Teacher answers: the training data of DEER's drafters (arXiv 2512.15176, section 3.1.1)."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from data.corpora.answers import TEACHER
from data.text.tokenizer import fingerprint
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed
from decoding.engine.sampler import Batch, Sampler
from decoding.loading import load, load_tokenizer
from decoding.samplers.plain import PlainSampler


class TeacherAnswers:
    """Collector of teacher answers.

    An answer depends on the seed, the prompt's id and the answer's number only, so a collection
    that was killed and resumed equals one that was not.

    Args:
        teacher: Folder or Hub id of a model, which decodes with its own sampler: a causal LM
            token by token, an export (of a masked diffusion LM, a drafter) with its method.
        number: Answers for each prompt.
        temperatures: Taken in turn: answer j of a shard's i-th prompt has number i + j, modulo
            their count.
        max_new_tokens: Longest answer, in tokens.
        seed: Of the collection.
        top_p: Of nucleus sampling.
        dtype: Of the weights.
        device: Where to run.
        device_map: Spreads the teacher over devices, as in `decoding.load`.
        top_k: How many of the teacher's most probable tokens are stored with each token of an
            answer, with their probabilities (at temperature 1), so that training on the teacher's
            distributions needs no teacher; 0 stores none.

    Raises:
        ValueError: `number` or `temperatures` asks for no answer, or `top_k` is negative.
    """

    def __init__(
        self,
        teacher: str,
        number: int,
        temperatures: Sequence[float],
        max_new_tokens: int,
        seed: int,
        top_p: float = 1.0,
        dtype: str = "bfloat16",
        device: str = "cpu",
        top_k: int = 0,
        device_map: str | None = None,
    ):
        if top_k < 0:
            raise ValueError(f"top_k={top_k} is not allowed: it must be 0 (none) or more")
        if number < 1 or not temperatures:
            raise ValueError(
                f"number={number} and temperatures={list(temperatures)} give no answer: number "
                "must be at least 1 and temperatures must not be empty"
            )
        self.teacher, self.number, self.seed = teacher, number, seed
        self.params = [
            SamplingParams(max_new_tokens=max_new_tokens, temperature=t, top_p=top_p, seed=seed)
            for t in temperatures
        ]
        self.tokenizer = load_tokenizer(teacher)
        self.dtype, self.top_k = dtype, top_k
        self.placing = {"dtype": dtype, "device": device, "device_map": device_map}
        self._sampler: Sampler | None = None

    def made_with(self) -> dict:
        """The options that the answers depend on, for the collection's manifest."""
        return {
            "teacher": self.teacher,
            "tokenizer": fingerprint(self.tokenizer),
            "number": self.number,
            "temperatures": [p.temperature for p in self.params],
            "top_p": self.params[0].top_p,
            "max_new_tokens": self.params[0].max_new_tokens,
            "dtype": self.dtype,
            # A collection is not continued with seeds, or turns, of another kind.
            "seeds": "blake2b",
            "turns": "prompts and answers",
            **({"top_k": self.top_k} if self.top_k else {}),
        }

    def bytes_of(self, prompt_ids: list[int]) -> int:
        """Upper bound of the bytes of a prompt's answers on disk: 4 per token, and a margin.

        Of each of a token's `top_k` the id and the probability take 6 bytes.
        """
        new = self.params[0].max_new_tokens
        return self.number * (4 * (len(prompt_ids) + new) + 6 * self.top_k * new + 64)

    def seed_of(self, prompt: str, answer: int) -> int:
        """The seed of a prompt's answer, by the prompt's id and the answer's number."""
        return derived_seed(self.seed, prompt, answer)

    def collect(self, prompts: list[dict]) -> list[dict]:
        """Decode `number` answers for each prompt, those of one temperature together.

        Args:
            prompts: {"id", "prompt_ids"} of each prompt.

        Returns:
            Rows of a table: id, answer, temperature, prompt_ids, answer_ids [n], finish_reason;
            with `top_k` also teacher_ids and teacher_probs [n * top_k].

        Raises:
            ValueError: The teacher does not continue text.
        """
        if self._sampler is None:
            self._sampler = load(self.teacher, **self.placing)
            if not self._sampler.continues:
                raise ValueError(
                    f"collector.teacher={self.teacher} does not continue text, so it cannot answer "
                    "a prompt: give a causal or masked diffusion LM"
                )
            if self.top_k:
                self._sampler = Recording(self._sampler, self.top_k)
        answers = [(i, j) for j in range(self.number) for i in range(len(prompts))]
        rows = {}
        for turn, params in enumerate(self.params):
            mine = [(i, j) for i, j in answers if (i + j) % len(self.params) == turn]
            for start in range(0, len(mine), len(prompts)):
                batch = mine[start : start + len(prompts)]
                asked = [prompts[i] for i, _ in batch]
                rows |= dict(zip(batch, self._answer(asked, [j for _, j in batch], params)))
        return [rows[answer] for answer in answers]

    def _answer(
        self, prompts: list[dict], numbers: list[int], params: SamplingParams
    ) -> Iterator[dict]:
        """Rows of these prompts' answers of these numbers, decoded as one batch."""
        seeds = [self.seed_of(p["id"], j) for p, j in zip(prompts, numbers)]
        results = self._sampler.generate([p["prompt_ids"] for p in prompts], params, seeds=seeds)
        recorded = self._sampler.recorded if self.top_k else [{}] * len(results)
        for prompt, number, result, found in zip(prompts, numbers, results, recorded):
            yield {
                "id": prompt["id"],
                "answer": number,
                "temperature": params.temperature,
                "prompt_ids": prompt["prompt_ids"],
                "answer_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                **{k: np.concatenate(v[: len(result.token_ids)]) for k, v in found.items()},
            }


class Recording(PlainSampler):
    """Plain decoding that keeps the target's most probable tokens at each token it emits.

    Args:
        sampler: Plain decoding with the same target.
        top_k: How many tokens are kept.

    Attributes:
        recorded: For each request of the last call `teacher_ids` and `teacher_probs`, a list of
            arrays [top_k] each, one for each token.

    Raises:
        ValueError: The sampler is not plain decoding: a pass does not give one token's
            distribution, or gives those of drafts that were not accepted.
    """

    def __init__(self, sampler: Sampler, top_k: int):
        if not isinstance(sampler, PlainSampler):
            raise ValueError(
                f"collector.top_k={top_k} needs plain decoding: give collector.teacher the target "
                "itself, whose answers have the same distribution, or top_k=0"
            )
        super().__init__(sampler.target, sampler.tokenizer)
        self.top_k = top_k
        self.recorded: list[dict[str, list[np.ndarray]]] = []

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        self.recorded = [{name: [] for name in TEACHER} for _ in batch.requests]
        super().begin(batch, params)

    def warped(
        self, logits: Tensor, batch: Batch, draft: Tensor, params: SamplingParams, before=None
    ) -> Tensor:
        """Record the distributions at temperature 1, before anything changes them."""
        probs, ids = logits[:, -1].float().softmax(-1).topk(self.top_k)
        columns = zip(batch.requests, ids.int().cpu().numpy(), probs.half().cpu().numpy())
        for request, *found in columns:
            for name, values in zip(TEACHER, found):
                self.recorded[request][name].append(values)
        return super().warped(logits, batch, draft, params, before)

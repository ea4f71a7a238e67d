"""Teacher answers: the training data of DEER's drafters (arXiv 2512.15176, section 3.1.1)."""

from collections.abc import Sequence

from data.text.tokenizer import fingerprint
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed
from decoding.engine.sampler import Sampler
from decoding.loading import load, load_tokenizer


class TeacherAnswers:
    """Collector of teacher answers.

    An answer depends on the seed, the prompt's id and the answer's number only, so a collection
    that was killed and resumed equals one that was not.

    Args:
        teacher: Folder or Hub id of a model, which decodes with its own sampler: a causal LM
            token by token, an export (of a masked diffusion LM, a drafter) with its method.
        number: Answers for each prompt.
        temperatures: Answer j is decoded at temperature j mod their count.
        max_new_tokens: Longest answer, in tokens.
        seed: Of the collection.
        top_p: Of nucleus sampling.
        dtype: Of the weights.
        device: Where to run.

    Raises:
        ValueError: `number` or `temperatures` asks for no answer.
    """

    columns = ("id", "answer", "temperature", "prompt_ids", "answer_ids", "finish_reason")

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
    ):
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
        self.dtype, self.device = dtype, device
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
            "seeds": "blake2b",  # a collection is not continued with seeds of another kind
        }

    def bytes_of(self, prompt_ids: list[int]) -> int:
        """Upper bound of the bytes of a prompt's answers on disk: 4 per token, and a margin."""
        return self.number * (4 * (len(prompt_ids) + self.params[0].max_new_tokens) + 64)

    def seed_of(self, prompt: str, answer: int) -> int:
        """The seed of a prompt's answer, by the prompt's id and the answer's number."""
        return derived_seed(self.seed, prompt, answer)

    def collect(self, prompts: list[dict]) -> list[dict]:
        """Decode `number` answers for each prompt, one batch for each answer's number.

        Args:
            prompts: {"id", "prompt_ids"} of each prompt.

        Returns:
            Rows of a table with the columns `columns`.

        Raises:
            ValueError: The teacher does not continue text.
        """
        if self._sampler is None:
            self._sampler = load(self.teacher, dtype=self.dtype, device=self.device)
            if not self._sampler.continues:
                raise ValueError(
                    f"collector.teacher={self.teacher} does not continue text, so it cannot answer "
                    "a prompt: give a causal or masked diffusion LM"
                )
        rows = []
        for j in range(self.number):
            params = self.params[j % len(self.params)]
            seeds = [self.seed_of(p["id"], j) for p in prompts]
            results = self._sampler.generate(
                [p["prompt_ids"] for p in prompts], params, seeds=seeds
            )
            rows += [
                {
                    "id": prompt["id"],
                    "answer": j,
                    "temperature": params.temperature,
                    "prompt_ids": prompt["prompt_ids"],
                    "answer_ids": result.token_ids,
                    "finish_reason": result.finish_reason,
                }
                for prompt, result in zip(prompts, results)
            ]
        return rows

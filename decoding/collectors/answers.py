"""Teacher answers: what DEER's drafters are trained on (arXiv 2512.15176, section 3.1.1)."""

from collections.abc import Sequence
from zlib import crc32

from data.text.tokenizer import fingerprint
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load, load_tokenizer


class TeacherAnswers:
    """Answers of a teacher, `number` a prompt; answer j is drawn at temperature j mod count.

    teacher: a folder or Hub id, which answers by its own sampler: a causal LM token by token, what
    parade trained (a masked diffusion LM, a parallel decoder) in its own way. The answer
    to a prompt depends on the seed and the prompt's id only, so a collection that was killed and
    started again is the collection that was not.
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
                f"number={number} and temperatures={list(temperatures)} ask for no answer"
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
        """What the answers depend on, for the manifest."""
        return {
            "teacher": self.teacher,
            "tokenizer": fingerprint(self.tokenizer),
            "number": self.number,
            "temperatures": [p.temperature for p in self.params],
            "top_p": self.params[0].top_p,
            "max_new_tokens": self.params[0].max_new_tokens,
            "dtype": self.dtype,
        }

    def bytes_of(self, prompt_ids: list[int]) -> int:
        """An upper bound of what a prompt's answers take on disk (4 bytes a token, a margin)."""
        return self.number * (4 * (len(prompt_ids) + self.params[0].max_new_tokens) + 64)

    def collect(self, prompts: list[dict]) -> list[dict]:
        """Rows of `columns` for prompts {"id", "prompt_ids"}, one batch an answer."""
        if self._sampler is None:
            self._sampler = load(self.teacher, dtype=self.dtype, device=self.device)
            if not self._sampler.continues:
                raise ValueError(f"{self.teacher} answers no prompts: give a model that goes on")
        rows = []
        for j in range(self.number):
            params = self.params[j % len(self.params)]
            seeds = [crc32(f"{self.seed}/{p['id']}/{j}".encode()) for p in prompts]
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

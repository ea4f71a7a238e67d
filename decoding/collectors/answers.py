"""Teacher answers: the training data of DEER's drafters (arXiv 2512.15176, section 3.1.1)."""

from collections.abc import Iterator, Sequence

from data.text.tokenizer import fingerprint
from decoding.collectors.teachers import ENGINES, Teacher, is_server, open_teacher
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed
from decoding.loading import load_tokenizer


class TeacherAnswers:
    """Collector of teacher answers.

    An answer depends on the seed, the prompt's id and the answer's number only, so a collection
    that was killed and resumed equals one that was not.

    Args:
        teacher: Folder or Hub id of a model, which decodes with its own sampler: a causal LM
            token by token, an export (of a masked diffusion LM, a drafter) with its method. Or the
            address of an OpenAI-compatible server, http://host:port/v1.
        target: The model that a server serves, for its tokenizer; None: the teacher itself.
        engine: What decodes a teacher that is no server: 'parade', or 'vllm', in an environment
            of its own (`make vllm`).
        options: Of the server's client, such as {concurrency: 32, retries: 5, model: its name}
            (`decoding.external.openai_client`); of vLLM, such as {python: ..., threads: 8,
            max_model_len: 4096} (`decoding.external.vllm_engine`).
        number: Answers for each prompt.
        temperatures: Taken in turn: answer j of a shard's i-th prompt has number i + j, modulo
            their count.
        max_new_tokens: Longest answer, in tokens.
        seed: Of the collection.
        top_p: Of nucleus sampling.
        dtype: Of the weights.
        device: Where to run.
        device_map: Spreads the teacher over devices, as in `decoding.load`.
        at_once: Prompts that a model decodes together, which bounds the memory of keys and values:
            where an answer ends the next prompt begins. None: all of a shard. Servers and other
            engines make batches of their own.
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
        target: str | None = None,
        engine: str = "parade",
        options: dict | None = None,
        at_once: int | None = None,
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
        self.target = target if target and is_server(teacher) else teacher
        if is_server(self.target):
            raise ValueError(
                f"collector.teacher={teacher} is a server: give target= the model that it serves, "
                "for its tokenizer"
            )
        self.tokenizer = load_tokenizer(self.target)
        self.dtype, self.top_k = dtype, top_k
        self.engine, self.options = engine, dict(options or {})
        self.placing = {"dtype": dtype, "device": device, "device_map": device_map}
        self.at_once = at_once
        self._teacher: Teacher | None = None

    def made_with(self) -> dict:
        """The options that the answers depend on, for the collection's manifest."""
        decoder = "server" if is_server(self.teacher) else self.engine
        return {
            # A server's address may change on the way; what it serves may not.
            "teacher": self.target,
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
            **({} if decoder == ENGINES[0] else {"engine": decoder}),
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
        if self._teacher is None:
            self._teacher = open_teacher(
                self.teacher,
                self.target,
                self.tokenizer,
                self.top_k,
                engine=self.engine,
                placing=self.placing,
                options=self.options,
                at_once=self.at_once,
            )
        answers = [(i, j) for j in range(self.number) for i in range(len(prompts))]
        rows = {}
        for turn, params in enumerate(self.params):
            mine = [(i, j) for i, j in answers if (i + j) % len(self.params) == turn]
            for start in range(0, len(mine), len(prompts)):
                batch = mine[start : start + len(prompts)]
                asked = [prompts[i] for i, _ in batch]
                rows |= dict(zip(batch, self._answer(asked, [j for _, j in batch], params)))
        found = [rows[answer] for answer in answers]
        known = [row for row in found if row["answer_ids"] is not None]
        if not known:
            raise ValueError(
                f"collector.teacher={self.teacher} gives texts whose tokens cannot be known, as it "
                "counts others than the tokenizer: give a server that returns token ids, as vLLM"
            )
        if len(known) < len(found):
            left = len(found) - len(known)
            print(f"{left} of {len(found)} answers left out: the server counts other tokens")
        return known

    def _answer(
        self, prompts: list[dict], numbers: list[int], params: SamplingParams
    ) -> Iterator[dict]:
        """Rows of these prompts' answers of these numbers, decoded as one batch."""
        seeds = [self.seed_of(p["id"], j) for p, j in zip(prompts, numbers)]
        found = self._teacher.answer([p["prompt_ids"] for p in prompts], params, seeds)
        for prompt, number, answer in zip(prompts, numbers, found):
            yield {
                "id": prompt["id"],
                "answer": number,
                "temperature": params.temperature,
                "prompt_ids": prompt["prompt_ids"],
                "answer_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                **answer.distributions,
            }

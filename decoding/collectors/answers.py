"""Teacher answers: the training data of DEER's drafters (arXiv 2512.15176, section 3.1.1)."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from data.arguments import Count, Seed, Several, Share, Temperature, Tokens
from data.corpora.fingerprints import model_fingerprint
from data.text.tokenizer import fingerprint
from decoding.collectors.chats import Turns
from decoding.collectors.teachers import EngineTeacher, SamplerTeacher, end_ids
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed
from decoding.external.openai_client import OpenAIClient
from decoding.external.vllm_engine import ON_CPU, Vllm
from decoding.loading import load_tokenizer
from models import causal

ENGINES = ("parade", "vllm")  # the decoders of a teacher that is no server
SERVER = ("http://", "https://")  # how the name of a server begins


class TeacherAnswers:
    """Collector of teacher answers.

    An answer depends only on the seed, the prompt's id and the answer's number, so a collection
    that was killed and resumed equals one that was not.

    Args:
        teacher: Folder or Hub id of a model, which decodes with its own sampler: a causal LM token
            by token, an export with its method. Or the address of an OpenAI-compatible server,
            http://host:port/v1.
        target: The model that a server serves, for its tokenizer; None: the teacher itself.
        engine: For a teacher that is no server: 'parade', or 'vllm' in its own environment
            (`sh examples/smollm2/vllm_environment.sh`).
        options: Of the server's client, such as {concurrency: 32, retries: 5, model: its name}
            (`decoding.external.openai_client`); of vLLM, such as {python: ..., threads: 8,
            max_model_len: 4096} (`decoding.external.vllm_engine`).
        number: Answers for each prompt.
        temperatures: Used in turn: answer j of the collection's i-th prompt has temperature number
            i + j, modulo their count.
        max_new_tokens: Longest answer, in tokens.
        seed: Of the collection.
        top_p: Of nucleus sampling.
        dtype, device, device_map: Type and place of the weights, as in `decoding.load`.
        at_once: Prompts that a model decodes together, which bounds the memory of keys and values;
            None: a whole shard. Servers and other engines make their own batches.
        top_k: How many of the teacher's most probable tokens are stored with each token of an
            answer, with their probabilities (at temperature 1), for training on the teacher's
            distributions without the teacher; 0: none.
    """

    def __init__(
        self,
        teacher: str,
        number: Annotated[int, Field(ge=1, le=1024)],
        temperatures: Several[Temperature],
        max_new_tokens: Tokens,
        seed: Seed,
        top_p: Share = 1.0,
        dtype: str = "bfloat16",
        device: str = "cpu",
        top_k: Annotated[int, Field(ge=0, le=4096)] = 0,
        device_map: str | None = None,
        target: str | None = None,
        engine: Literal[*ENGINES] = "parade",
        options: dict | None = None,
        at_once: Count | None = None,
    ):
        self.teacher, self.number, self.seed = teacher, number, seed
        self.params = [
            SamplingParams(max_new_tokens=max_new_tokens, temperature=t, top_p=top_p, seed=seed)
            for t in temperatures
        ]
        self.target = target if target and teacher.startswith(SERVER) else teacher
        if self.target.startswith(SERVER):
            raise ValueError(
                f"collector.teacher={teacher} is a server: give target= the model that it serves, "
                "for its tokenizer"
            )
        self.tokenizer = load_tokenizer(self.target)
        self.engine, self.options = engine, dict(options or {})
        self.placing = {"dtype": dtype, "device": device, "device_map": device_map}
        self.top_k, self.at_once = top_k, at_once
        self.left_out: dict[str, str] = {}

    def made_with(self) -> dict:
        """Return the options that the answers depend on, for the collection's manifest."""
        decoder = "server" if self.teacher.startswith(SERVER) else self.engine
        return {
            # A server's address may change on the way; what it serves may not.
            "teacher": self.target,
            # What a server serves is not on this machine, or need not be.
            **({} if decoder == "server" else {"weights": model_fingerprint(self.target)}),
            "tokenizer": fingerprint(self.tokenizer),
            "number": self.number,
            "temperatures": [p.temperature for p in self.params],
            "top_p": self.params[0].top_p,
            "max_new_tokens": self.params[0].most,
            "dtype": self.placing["dtype"],
            # A collection is not continued with seeds, or turns, of another kind.
            "seeds": "blake2b",
            "turns": "prompts and answers",
            **({"top_k": self.top_k} if self.top_k else {}),
            **({} if decoder == ENGINES[0] else {"engine": decoder}),
        }

    def bytes_of(self, prompt_ids: list[int]) -> int:
        """Return an upper bound of the bytes of a prompt's answers on disk, with a margin."""
        new = self.params[0].most  # 4 bytes a token, 6 each of its `top_k`
        return self.number * (4 * (len(prompt_ids) + new) + 6 * self.top_k * new + 64)

    @property
    def most(self) -> int:
        """The longest answer, in tokens."""
        return self.params[0].most

    @property
    def emitted(self) -> int:
        """The tokens that the teacher has decoded so far; 0 while another engine has not said."""
        return self._teacher.emitted if "_teacher" in vars(self) else 0

    def seed_of(self, prompt: str, answer: int, turn: int = 0) -> int:
        """Return the seed of an answer, by the prompt's id, its own number, and the chat's turn."""
        return derived_seed(self.seed, prompt, answer, *([turn] if turn else []))

    def collect(self, prompts: list[dict], first: int = 0) -> list[dict]:
        """Decode `number` answers for each prompt {"id", "prompt_ids"}; `first`: its number there.

        Returns rows of a table: id, answer, temperature, prompt_ids, answer_ids [n], finish_reason,
        turn; with `top_k` also teacher_ids and teacher_probs [n * top_k]. `left_out` says then
        why prompts have no answer.
        """
        asked = [
            prompt | {"answer": j, "params": self.params[(i + j) % len(self.params)]}
            for j in range(self.number)
            for i, prompt in enumerate(prompts, first)
        ]
        chats = Turns(self.tokenizer)
        asked = chats.ask(asked, self.seed, self.most, self._write)
        found = chats.collect(asked, lambda asked: self._answers(asked, len(prompts)))
        self.left_out = chats.left_out
        known = [row for row in found if row["answer_ids"] is not None]
        if found and not known:
            raise ValueError(
                f"collector.teacher={self.teacher} gives texts whose tokens cannot be known, as it "
                "counts others than the tokenizer: give a server that returns token ids, as vLLM"
            )
        if len(known) < len(found):
            left = len(found) - len(known)
            print(f"{left} of {len(found)} answers left out: the server counts other tokens")
        return known

    def _write(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]
    ) -> list[tuple[list[int], bool]]:
        """Return what the teacher writes after prompts, and whether it ends there."""
        found = self._teacher.answer(prompts, params, seeds)
        return [(a.token_ids or [], a.finish_reason == "eos") for a in found]

    def _answers(self, asked: list[dict], most: int) -> list[dict | str]:
        """Return the rows of prompts, decoded in batches of one temperature, or why there is none.

        A batch has at the `most` as many prompts.
        """
        rows: dict[int, dict | str] = {}
        for params in self.params:
            mine = [n for n, prompt in enumerate(asked) if prompt["params"] is params]
            for start in range(0, len(mine), most):
                batch = mine[start : start + most]
                rows |= zip(batch, self._answer([asked[n] for n in batch], params))
        return [rows[n] for n in range(len(asked))]

    def _answer(self, asked: list[dict], params: SamplingParams) -> Iterator[dict | str]:
        """Yield the rows of prompts, decoded as one batch."""
        seeds = [self.seed_of(p["id"], p["answer"], p.get("turn", 0)) for p in asked]
        found = self._teacher.answer([p["prompt_ids"] for p in asked], params, seeds)
        for prompt, answer in zip(asked, found):
            if answer.refused:
                yield answer.finish_reason
                continue
            yield {
                "id": prompt["id"],
                "answer": prompt["answer"],
                "temperature": params.temperature,
                "prompt_ids": prompt["prompt_ids"],
                "answer_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                **answer.distributions,
            }

    @cached_property
    def _teacher(self) -> SamplerTeacher | EngineTeacher:
        """Open the teacher."""
        server = self.teacher.startswith(SERVER)
        if not server and self.engine == "parade":
            if self.options:
                raise ValueError(
                    f"collector.options={self.options} is for a server or for "
                    "collector.engine=vllm: leave it out"
                )
            return SamplerTeacher(self.teacher, self.top_k, self.at_once, **self.placing)
        path = causal.local_path(self.target)
        if server:
            given = {"target": self.target, **self.options}
            engine: OpenAIClient | Vllm = OpenAIClient(self.teacher, self.tokenizer, **given)
        else:
            given = {"dtype": self.placing["dtype"], "max_logprobs": max(self.top_k, 1)}
            device = ON_CPU if self.placing["device"] == "cpu" else {}
            engine = Vllm(path, **{**given, **device, **self.options})
        return EngineTeacher(engine, self.top_k, end_ids(path, self.tokenizer))

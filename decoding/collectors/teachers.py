"""Teachers: what answers prompts for a collection, a sampler of ours or an engine of others."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from data.corpora.answers import TEACHER
from decoding.commands.values import unknown
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.external.openai_client import OpenAIClient
from decoding.external.vllm_engine import ON_CPU, Vllm
from decoding.loading import load
from decoding.samplers.plain import PlainSampler
from models import causal

ENGINES = ("parade", "vllm")  # what decodes a teacher that is no server


class Answer(NamedTuple):
    """An answer to a prompt.

    Attributes:
        token_ids: Its tokens; None where the teacher cannot tell them.
        finish_reason: 'eos' or 'length'.
        distributions: {'teacher_ids', 'teacher_probs'}: arrays [n * top_k] of the most probable
            tokens at each of n tokens; empty where none are asked for.
    """

    token_ids: list[int] | None
    finish_reason: str
    distributions: dict[str, np.ndarray]


class Teacher(Protocol):
    """What answers prompts."""

    def answer(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]
    ) -> list[Answer]:
        """The answers to prompts, token ids, each with its own seed."""


class SamplerTeacher:
    """A model that decodes with its own sampler.

    Args:
        name: Folder or Hub id.
        top_k: Most probable tokens that are kept at each token.
        at_once: Prompts that are decoded together; None: all that are given.
        **placing: Arguments of `decoding.load`: type and place of the weights.

    Raises:
        ValueError: The teacher does not continue text, or cannot be loaded.
    """

    def __init__(self, name: str, top_k: int, at_once: int | None = None, **placing):
        self.sampler, self.top_k, self.at_once = load(name, **placing), top_k, at_once
        if not self.sampler.continues:
            raise ValueError(
                f"collector.teacher={name} does not continue text, so it cannot answer a prompt: "
                "give a causal or masked diffusion LM"
            )
        if top_k:
            self.sampler = Recording(self.sampler, top_k)

    def answer(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]
    ) -> list[Answer]:
        """Decode the prompts; where one ends the next one takes its place."""
        results = self.sampler.generate(prompts, params, seeds=seeds, at_once=self.at_once)
        recorded = [self.sampler.recorded.pop(n) if self.top_k else {} for n in range(len(results))]
        return [
            Answer(
                r.token_ids,
                r.finish_reason,
                {k: np.concatenate(v[: len(r.token_ids)]) for k, v in found.items()},
            )
            for r, found in zip(results, recorded)
        ]


class EngineTeacher:
    """A model in an engine that others wrote.

    Args:
        engine: The engine, or the client of a server.
        top_k: Most probable tokens that are kept at each token.
        eos: Tokens that end an answer.
    """

    def __init__(self, engine: Vllm | OpenAIClient, top_k: int, eos: Sequence[int]):
        self.engine, self.top_k, self.eos = engine, top_k, eos

    def answer(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]
    ) -> list[Answer]:
        """Decode the prompts together; the engine makes its own batches."""
        reply = self.engine.generate(
            prompts, params, eos=self.eos, seeds=seeds, logprobs=self.top_k
        )
        tops = reply.top or [None] * len(prompts)
        return [
            Answer(ids, reason, {} if ids is None or top is None else self._columns(top))
            for ids, reason, top in zip(reply.token_ids, reply.finish_reasons, tops)
        ]

    def _columns(self, top: list[list[tuple[int, float]]]) -> dict[str, np.ndarray]:
        """The distributions of an answer; where an engine gives fewer than top_k, padding."""
        found = np.zeros((len(top), self.top_k, 2))
        for i, step in enumerate(top):
            kept = np.array(step[: self.top_k])
            found[i, : len(kept), 0], found[i, : len(kept), 1] = kept[:, 0], np.exp(kept[:, 1])
        columns = found[..., 0].astype(np.int32), found[..., 1].astype(np.float16)
        return {name: column.reshape(-1) for name, column in zip(TEACHER, columns)}


def open_teacher(
    name: str,
    target: str,
    tokenizer: PreTrainedTokenizerBase,
    top_k: int,
    *,
    engine: str,
    placing: dict,
    options: dict,
    at_once: int | None = None,
) -> Teacher:
    """The teacher of a collection, ready to answer.

    Args:
        name: Folder or Hub id of a model, or the address of a server, http://...
        target: Folder or Hub id of the model; of a server, of the one that it serves.
        tokenizer: The model's.
        top_k: Most probable tokens that are kept at each token.
        engine: What decodes a model here, one of ENGINES.
        placing: Arguments of `decoding.load`: type and place of the weights.
        options: Of the server's client (`OpenAIClient`), or of `Vllm`.
        at_once: Prompts that a model here decodes together; None: all that are given.

    Raises:
        ValueError: The teacher is not there, or has no such option; one line.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    server = is_server(name)
    if not server and engine == "parade":
        if options:
            raise ValueError(
                f"collector.options={options} is for a server or for collector.engine=vllm: leave "
                "it out"
            )
        return SamplerTeacher(name, top_k, at_once, **placing)
    path = causal.local_path(target)
    eos = end_ids(path, tokenizer)
    if server:
        return EngineTeacher(OpenAIClient(name, tokenizer, target=target, **options), top_k, eos)
    defaults = {"dtype": placing["dtype"], "max_logprobs": max(top_k, 1)}
    device = ON_CPU if placing["device"] == "cpu" else {}
    vllm = Vllm(path, **{**defaults, **device, **options})
    return EngineTeacher(vllm, top_k, eos)


def is_server(name: str) -> bool:
    """Whether a teacher's name is a server's address."""
    return name.startswith(("http://", "https://"))


def end_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a model's answers, as its sampler would have them."""
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # it has none
        eos = None
    eos = tokenizer.eos_token_id if eos is None else eos
    return [eos] if isinstance(eos, int) else sorted(eos or [])


class Recording(PlainSampler):
    """Plain decoding that keeps the target's most probable tokens at each token it emits.

    Args:
        sampler: Plain decoding with the same target.
        top_k: How many tokens are kept.

    Attributes:
        recorded: Of each request, by its number, `teacher_ids` and `teacher_probs`, a list of
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
        self.recorded: dict[int, dict[str, list[np.ndarray]]] = {}

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        self.recorded |= {n: {name: [] for name in TEACHER} for n in batch.requests}
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

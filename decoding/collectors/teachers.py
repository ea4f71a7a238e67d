"""Teachers, which answer a collection's prompts: a sampler of ours or another engine."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from data.corpora.answers import TEACHER
from decoding.engine.batch import Batch
from decoding.engine.params import Result, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.engine.vocabulary import end_tokens
from decoding.external.reply import Engine
from decoding.loading import load
from decoding.samplers.plain import PlainSampler


class Answer(NamedTuple):
    """An answer to a prompt.

    Attributes:
        token_ids: Its tokens; None if the teacher cannot tell them.
        finish_reason: 'eos' or 'length'; or why the prompt has no answer.
        distributions: {'teacher_ids', 'teacher_probs'}: arrays [n * top_k] of the most probable
            tokens at each of n tokens; empty if none are asked for.
    """

    token_ids: list[int] | None
    finish_reason: str
    distributions: dict[str, np.ndarray]
    refused: bool = False


def decoded(
    sampler: Sampler,
    prompts: list[list[int]],
    params: SamplingParams,
    seeds: list[int],
    at_once: int | None,
) -> list[tuple[int, Result] | str]:
    """Decode prompts together; return each result with its number in the call to the sampler.

    In place of a result there is the reason why a prompt cannot be decoded: it is too long, mostly.
    """
    found: list[tuple[int, Result] | str] = []
    asked: list[int] = []
    for prompt in prompts:
        try:
            sampler.encode(prompt, params)
            asked.append(len(found))
            found.append("")
        except ValueError as error:
            found.append(str(error))
    if asked:
        results = sampler.generate(
            [prompts[n] for n in asked], params, seeds=[seeds[n] for n in asked], at_once=at_once
        )
        for number, (n, result) in enumerate(zip(asked, results)):
            found[n] = number, result
    return found


class SamplerTeacher:
    """A model that decodes with its own sampler; arguments as of `TeacherAnswers`."""

    def __init__(self, name: str, top_k: int, at_once: int | None = None, **placing):
        self.sampler, self.at_once = load(name, **placing), at_once
        if not self.sampler.continues:
            raise ValueError(
                f"collector.teacher={name} does not continue text, so it cannot answer a prompt: "
                "give a causal or masked diffusion LM"
            )
        if top_k:
            self.sampler = Recording(self.sampler, top_k)

    @property
    def emitted(self) -> int:
        """The tokens so far."""
        return self.sampler.emitted

    def answer(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]
    ) -> list[Answer]:
        """Decode the prompts; the next prompt takes the slot of one that has ended."""
        answers = []
        for found in decoded(self.sampler, prompts, params, seeds, self.at_once):
            if isinstance(found, str):
                answers.append(Answer(None, found, {}, refused=True))
                continue
            n, r = found
            kept = self.sampler.recorded.pop(n) if isinstance(self.sampler, Recording) else {}
            columns = {k: np.concatenate(v[: len(r.token_ids)]) for k, v in kept.items()}
            answers.append(Answer(r.token_ids, r.finish_reason, columns))
        return answers


class EngineTeacher:
    """A model in another engine or on a server; `eos` are the tokens that end an answer.

    `emitted` counts the tokens so far.
    """

    def __init__(self, engine: Engine, top_k: int, eos: Sequence[int]):
        self.engine, self.top_k, self.eos, self.emitted = engine, top_k, eos, 0

    def answer(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]
    ) -> list[Answer]:
        """Decode the prompts together; the engine makes its own batches."""
        asked = self.engine.generate
        reply = asked(
            prompts, params, eos=self.eos, seeds=seeds, logprobs=self.top_k, set_aside=True
        )
        self.emitted += sum(len(ids or ()) for ids in reply.token_ids)
        tops: Sequence[list | None] = reply.top or [None] * len(prompts)
        answers = [
            Answer(ids, reason, {} if ids is None or top is None else self._columns(top))
            for ids, reason, top in zip(reply.token_ids, reply.finish_reasons, tops)
        ]
        for n, why in reply.refused.items():
            answers[n] = Answer(None, why, {}, refused=True)
        return answers

    def _columns(self, top: list[list[tuple[int, float]]]) -> dict[str, np.ndarray]:
        """Return an answer's distributions, padded if an engine gives fewer than top_k."""
        found = np.zeros((len(top), self.top_k, 2))
        for i, step in enumerate(top):
            kept = np.array(step[: self.top_k])
            found[i, : len(kept), 0], found[i, : len(kept), 1] = kept[:, 0], np.exp(kept[:, 1])
        ids, probs = found[..., 0].astype(np.int32), found[..., 1].astype(np.float16)
        return dict(zip(TEACHER, (ids.reshape(-1), probs.reshape(-1))))


def end_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end the answers of a folder's or Hub id's model, as its sampler."""
    try:
        config = GenerationConfig.from_pretrained(path)
    except OSError:  # it has none, or it is damaged, and then the model says so
        model = AutoConfig.from_pretrained(path, trust_remote_code=False)
        config = GenerationConfig.from_model_config(model)
    return end_tokens(config, tokenizer)


class Recording(PlainSampler):
    """Plain decoding that keeps the target's `top_k` most probable tokens at each emitted token.

    `sampler` must be plain decoding with the same target, whose passes give one token each.

    Attributes:
        recorded: {request: {'teacher_ids', 'teacher_probs': an array [top_k] for each token}}.
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
        """Record the distributions at temperature 1, before they are warped."""
        probs, ids = logits[:, -1].float().softmax(-1).topk(self.top_k)
        for name, column in zip(TEACHER, (ids.int(), probs.half())):
            for request, values in zip(batch.requests, column.cpu().numpy()):
                self.recorded[request][name].append(values)
        return super().warped(logits, batch, draft, params, before)

"""Any sampler as a model of lm-evaluation-harness, registered there as `parade`.

lm-eval is an optional dependency (`pip install lm_eval`), so functions import this module.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import chunks, maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.text.chat import encode_text, render_chat
from data.text.special import encode
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import request_seeds
from decoding.engine.sampler import Sampler
from decoding.loading import load
from decoding.samplers.asarm import AsarmSampler
from terminal.progress import track

ASSUMED_CONTEXT = 2048  # of a model that names none, as lm-eval assumes it
COPIED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


@register_model("parade")
class ParadeLM(TemplateLM):
    """A sampler as a model of lm-eval.

    Args:
        model: A sampler, or what `decoding.load` takes.
        batch_size: Requests that are decoded or scored together.
        seed: Each sampled request has a seed derived from it and from the request's number.
        verify: The verification rule.
        max_gen_toks: The most tokens of an answer if the task does not say.
        options: Further ones of `decoding.load`.

    Attributes:
        emitted: Tokens emitted by each target pass of every answer so far.
    """

    def __init__(
        self,
        model: str | Sampler,
        *,
        batch_size: int = 8,
        seed: int = 0,
        verify: str = SamplingParams.verify,
        max_gen_toks: int = 256,
        **options,
    ):
        super().__init__()
        sampler = load(model, **options) if isinstance(model, str) else model
        fills = isinstance(sampler, AsarmSampler)  # a continuation is a hole at the end
        if not isinstance(sampler, Sampler) or not (sampler.continues or fills):
            raise ValueError(f"{model} goes on from no prompt: lm-eval asks language models")
        self._name = model if isinstance(model, str) else sampler.target.name_or_path
        self.sampler, self.tokenizer = sampler, sampler.tokenizer
        self._device = sampler.device
        self._batch_size, self._seed = int(batch_size), int(seed)
        self._params = SamplingParams(max_new_tokens=int(max_gen_toks), verify=verify)
        self.emitted: list[int] = []

    @property
    def acceptance_length(self) -> float | None:
        """Return the tokens emitted per target pass in all answers so far; None without answers."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else None

    @property
    def max_length(self) -> int:
        """Return the model's context in tokens."""
        return self.sampler.context or ASSUMED_CONTEXT

    @property
    def eot_token_id(self) -> int | None:
        """Return the end-of-text token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text without context: the model's start or end token."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError(
            "this tokenizer has neither a start nor an end token, so a text without context "
            "cannot be scored: choose other tasks"
        )

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's name, for lm-eval's caches."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt's text; without add_generation_prompt the last message is continued."""
        ends = {"add_generation_prompt": add_generation_prompt}
        ends["continue_final_message"] = not add_generation_prompt
        return render_chat(self.tokenizer, chat_history, **ends)

    def get_model_info(self) -> dict:
        """Return lm-eval's entries about the model."""
        method = type(self.sampler).__module__.rpartition(".")[2]
        about = {"model": self._name, "method": method, "verify": self._params.verify}
        return about | {"acceptance_length": self.acceptance_length}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        """Return token ids, with the start token if the model expects it and the text lacks it."""
        if add_special_tokens is False:
            return encode(self.tokenizer, string)
        return encode_text(self.tokenizer, string)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the sampler's answer to each `(context, generation_kwargs)`.

        If both do not fit the model's context, the answer is shortened, but not below half of the
        context; if that is not enough, the beginning of the prompt is left out.
        """
        if not self.sampler.continues:
            raise ValueError(
                "an any-subset model fills holes of a known length: choose tasks that score "
                "(output_type: multiple_choice or loglikelihood)"
            )
        texts = [""] * len(requests)
        groups: dict[SamplingParams, list[tuple[int, list[int]]]] = {}
        for n, request in enumerate(requests):
            prompt, given = request.args
            params = self._sampling(given)
            most, ids = params.most, self.tok_encode(prompt)
            limits = most, self.max_length, min(most, self.max_length // 2)
            ids, room = maybe_truncate(ids, *limits, shrink_gen_toks=True)
            groups.setdefault(replace(params, max_new_tokens=room), []).append((n, ids))
        seeds = request_seeds(self._seed, len(requests))
        for params, group in groups.items():
            numbers, prompts = zip(*group)
            given = {"seeds": [seeds[n] for n in numbers], "at_once": self._batch_size}
            chunks = self.sampler.stream(prompts, params, **given, text=False)
            for _, chunk in zip(track(range(len(group)), "answers"), chunks):
                n, result = numbers[chunk.request], chunk.result
                assert result is not None  # `text` is false
                texts[n] = result.text
                self.emitted += result.stats.emitted
                self.cache_hook.add_partial("generate_until", requests[n].args, result.text)
        return texts

    def _sampling(self, given: dict) -> SamplingParams:
        """Return a task's generation_kwargs as parameters."""
        asked = dict(normalize_gen_kwargs(given, self._params.most))
        until, room, sampled = asked.pop("until"), asked.pop("max_gen_toks"), asked.pop("do_sample")
        if asked.get("num_beams") == 1:
            del asked["num_beams"]
        if unknown := sorted(asked.keys() - {*COPIED}):
            raise ValueError(
                f"generation_kwargs has {unknown}, which samplers do not offer. Choose from "
                f"{['do_sample', 'max_gen_toks', 'until', *COPIED]}"
            )
        asked |= {} if sampled else {"temperature": 0}
        stop = tuple(filter(None, until))
        return replace(self._params, max_new_tokens=room, stop=stop, **asked)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of each whole text in nats; a long text is split by the context's length."""
        pairs, totals = [], [0.0] * len(requests)
        for n, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs += [(n, (None, *make_disjoint_window(window))) for window in windows]
        scores = self._loglikelihood_tokens([pair for _, pair in pairs])
        for (n, _), (log_prob, _) in zip(pairs, scores):
            totals[n] += log_prob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"a continuation of {longest} tokens is longer than the model's context of "
                f"{self.max_length}: choose other tasks"
            )
        if isinstance(self.sampler, AsarmSampler):
            return self._scores_of_holes(self.sampler, requests)
        if not self.sampler.predicts_next:
            raise ValueError(
                "a masked diffusion LM has no next-token likelihood: choose tasks that generate "
                "(output_type: generate_until)"
            )
        # Choices of one token share their input, and with it the forward.
        asked: dict[tuple[int, ...], list[int]] = {}
        for n, (_, context, continuation) in enumerate(requests):
            given = (context + continuation)[-(self.max_length + 1) :][:-1]
            asked.setdefault(tuple(given), []).append(n)
        inputs, answers = sorted(asked, key=len, reverse=True), [(0.0, True)] * len(requests)
        for start in track(range(0, len(inputs), self._batch_size), "likelihoods"):
            batch = inputs[start : start + self._batch_size]
            lengths = [max(len(requests[n][2]) for n in asked[ids]) for ids in batch]
            for ids, log_probs in zip(batch, self._log_probs(batch, lengths)):
                for n in asked[ids]:
                    texts, _, continuation = requests[n]
                    answers[n] = score(log_probs, continuation)
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answers[n])
        return answers

    def _scores_of_holes(
        self, sampler: AsarmSampler, requests: list[Pair]
    ) -> list[tuple[float, bool]]:
        """Score continuations as holes at the end of their texts (AS-ARM, Table 10)."""
        rows = [(context + new)[-self.max_length :] for _, context, new in requests]
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]), reverse=True)
        alike = groupby(order, key=lambda n: len(rows[n]))
        batches = [batch for _, group in alike for batch in chunks(group, self._batch_size)]
        answers = [(0.0, True)] * len(rows)
        for batch in track(batches, "likelihoods"):
            texts = [rows[n] for n in batch]
            holes = [len(requests[n][2]) for n in batch]
            given = [[i < len(ids) - h for i in range(len(ids))] for ids, h in zip(texts, holes)]
            for n, log_probs in zip(batch, sampler.log_probs(texts, given)):
                pair, _, continuation = requests[n]
                answers[n] = score(log_probs, continuation)
                if pair is not None:
                    self.cache_hook.add_partial("loglikelihood", pair, answers[n])
        return answers

    @torch.inference_mode()
    def _log_probs(self, inputs: list[tuple[int, ...]], lengths: list[int]) -> Iterable[Tensor]:
        """Yield each input's log p [length, V] of the tokens after its last `length` positions."""
        # Padding comes after the text, so a causal model sees none of it.
        ids = pad_sequence([torch.tensor(x) for x in inputs], batch_first=True).to(self._device)
        first = min(len(x) - max(1, n) for x, n in zip(inputs, lengths))
        output = self.sampler.target(ids, use_cache=False, logits_to_keep=ids.shape[1] - first)
        exact = torch.promote_types(output.logits.dtype, torch.float32)
        return [
            row[len(x) - n - first : len(x) - first].to(exact).log_softmax(-1)
            for row, x, n in zip(output.logits, inputs, lengths)
        ]


def score(log_probs: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Return log p of a continuation in nats, and whether greedy decoding writes it.

    `log_probs` [n, V] are of the last n tokens of the input with its continuation.
    """
    log_probs = log_probs[len(log_probs) - len(continuation) :]
    ids = torch.tensor(continuation, dtype=torch.long, device=log_probs.device)
    greedy = bool((log_probs.argmax(-1) == ids).all())
    return float(log_probs.gather(1, ids[:, None]).sum()), greedy

"""The decode loop: a method supplies `begin` (prefill) and `cycle` (propose and verify)."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine.cache import CachedNetwork, TargetOutput
from decoding.engine.detokenize import Detokenizer
from decoding.engine.params import Chunk, Result, SamplingParams, Stats
from decoding.engine.randomness import KeyedRandomness, Randomness, fresh_seed, request_seeds
from decoding.engine.warp import seen_tokens, warp
from models.attention import DENSE
from models.masks import causal
from models.placement import input_device

_FEW = 2**16  # numbers of keyed noise whose making costs little more than the call


@dataclass
class State:
    """What a method keeps of its unfinished requests between cycles; each method has its own.

    A field is a tensor [B, ...], a list of B items on the host, or None.
    """

    def select(self, rows: Tensor) -> None:
        """Keep only these rows [B'] of every field."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                setattr(self, f.name, value[rows])
            elif value is not None:
                setattr(self, f.name, [value[b] for b in rows.tolist()])


class Batch:
    """The unfinished requests of a batch, a row of each tensor for each of them.

    Attributes:
        requests: The number of each row's request in the call.
        tokens: [B, capacity], committed tokens and, after them, guesses or nothing.
        lengths: [B], how many tokens are committed.
        randomness: Where all draws come from.
        networks: The method's cached networks by name ('target', 'drafter').
        state: The method's own `State`.
        drafted: Tokens a row that the last pass verified.
    """

    def __init__(self, prompts: list[list[int]], capacity: int, randomness: Randomness, device):
        self.requests = list(range(len(prompts)))
        self.tokens = torch.zeros(len(prompts), capacity, dtype=torch.long, device=device)
        for b, prompt in enumerate(prompts):
            self.tokens[b, : len(prompt)] = torch.tensor(prompt, device=device)
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)
        self.randomness = randomness
        self.networks: dict[str, CachedNetwork] = {}
        self.state: Any = State()
        self.drafted = 0

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Commit the first counts [B] of tokens [B, m] to each row."""
        slots = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        # After a row's length there is nothing yet, or guesses: the surplus is written too.
        self.tokens.scatter_(1, slots, tokens)
        self.lengths = self.lengths + counts

    def select(self, keep: list[int]) -> None:
        """Drop the finished requests."""
        rows = torch.tensor(keep, device=self.tokens.device)
        self.requests = [self.requests[b] for b in keep]
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]
        self.state.select(rows)
        self.randomness.select(rows)
        for network in self.networks.values():
            network.cache.select(rows)


@dataclass
class _Answer:
    """One request's answer so far, on the host. prompt: what `_encode` made of its prompt."""

    prompt: Any
    token_ids: list[int]
    stats: Stats
    text: Detokenizer
    printed: int = 0  # characters already streamed
    sent: int = 0  # tokens already streamed


class Sampler(ABC):
    """Decodes with a target model, losslessly: the output distribution is plain decoding's.

    A rule that is not lossless must be named by `lossy`, and runs only for a user who gives
    lossy=true.

    Args:
        target: Any transformers causal LM that takes a 4-D attention mask.
        tokenizer: The target's own.

    Attributes:
        rules: Values of `verify` that this sampler tells apart.
        drafts: Values of `draft`, where it drafts in several ways.
        continues: Whether the text goes on from the prompt, which is not part of it.
        bench: The command that measures it against its plain counterpart.
        hidden_layers: Target layers whose outputs its passes return (`TargetOutput`).
        device: Where the tokens of its batches are.
    """

    rules: tuple[str, ...] = ("coupled", "rejection")
    drafts: tuple[str, ...] = ()
    continues = True
    bench = "decoding.bench"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.check(target)
        self.target, self.device = target.eval(), input_device(target)
        self.tokenizer = tokenizer
        self.vocabulary = target.config.get_text_config().vocab_size
        settings = getattr(target, "generation_config", None)
        eos = settings.eos_token_id if settings else None
        eos = tokenizer.eos_token_id if eos is None else eos
        self.eos = frozenset([eos] if isinstance(eos, int) else eos or [])

    @property
    def context(self) -> int | None:
        """The most tokens that a prompt and its answer may have together; None: any number."""
        config = self.target.config.get_text_config()
        names = ("max_position_embeddings", "sliding_window")
        return min((n for x in names if (n := getattr(config, x, None)) is not None), default=None)

    @abstractmethod
    def begin(self, batch: Batch, params: SamplingParams) -> None:
        """Make the caches, prefill them, and set `batch.state`."""

    @abstractmethod
    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One target pass: tokens [B, m] of which the first counts [B] (at least 1) are emitted."""

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | None = None,
        *,
        seeds: list[int] | None = None,
        randomness: Randomness | None = None,
    ) -> list[Result]:
        """Decode every prompt to its end, as one batch.

        Args:
            prompts: Texts, or token ids.
            params: How to sample; None takes the defaults of `SamplingParams`.
            seeds: One a prompt, in place of those derived from params.seed.
            randomness: Replaces the keyed randomness, in tests.

        Returns:
            One `Result` a prompt, in their order.

        Raises:
            ValueError: A prompt or a parameter that this sampler cannot decode with.
        """
        results: list[Result | None] = [None] * len(prompts)
        for chunk in self.stream(prompts, params, seeds=seeds, randomness=randomness, text=False):
            if chunk.result is not None:
                results[chunk.request] = chunk.result
        return results

    def stream(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | None = None,
        *,
        seeds: list[int] | None = None,
        randomness: Randomness | None = None,
        text: bool = True,
    ) -> Iterator[Chunk]:
        """Decode, yielding a `Chunk` whenever the committed text of a request grows.

        Between two chunks nothing of torch's modes is changed, so the reader may train, or hold
        several streams and close them in any order.

        Args:
            prompts, params, seeds, randomness: See `generate`. The first request has the seed
                params.seed, the others seeds that are derived from it.
            text: False yields finished requests only, and detokenises nothing on the way.

        Raises:
            ValueError: As `generate`; also where the model's logits are not numbers.
        """
        params = params or SamplingParams()
        lossy = self._check(params)
        prompts = [self._encode(p, params) for p in prompts]
        if not prompts:
            raise ValueError("no prompt was given")
        if seeds is None:
            seeds = request_seeds(
                fresh_seed() if params.seed is None else params.seed, len(prompts)
            )
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds were given for {len(prompts)} prompts")
        answers = [_Answer(p, [], Stats(lossy=lossy), Detokenizer(self.tokenizer)) for p in prompts]
        started = time.perf_counter()
        with torch.inference_mode():
            randomness = randomness or KeyedRandomness(seeds, self.device)
            batch = self._batch(prompts, params, randomness)
            self.begin(batch, params)
        prefills = {name: n.passes for name, n in batch.networks.items()}
        while batch.requests:
            # Never across a yield: the mode is the thread's, not this generator's.
            with torch.inference_mode():
                tokens, counts = self.cycle(batch, params)
                batch.append(tokens, counts)
                emitted = zip(tokens.tolist(), counts.tolist())
            keep = []
            for b, (new, count) in enumerate(emitted):
                answer = answers[batch.requests[b]]
                answer.stats.drafted += batch.drafted
                chunk = self._commit(batch.requests[b], answer, new[:count], params, text)
                if chunk is None or chunk.result is None:
                    keep.append(b)
                else:
                    self._account(answer.stats, batch, prefills, time.perf_counter() - started)
                if chunk is not None:
                    paused = time.perf_counter()
                    yield chunk
                    started += time.perf_counter() - paused  # the reader's time is not ours
            if not keep:
                return
            if len(keep) < len(batch.requests):
                with torch.inference_mode():
                    batch.select(keep)

    def _check(self, params: SamplingParams) -> str:
        """Refuse what this sampler does not offer; returns what makes the request lossy, or ''."""
        if params.draft is not None and params.draft not in self.drafts:
            raise ValueError(
                f"draft={params.draft!r} is not allowed: this sampler drafts in "
                f"{list(self.drafts) or 'one way only, so leave it out'}"
            )
        if params.temperature > 0 and params.verify not in self.rules:
            raise ValueError(
                f"verify={params.verify!r} is not offered by this sampler. "
                f"Choose from {list(self.rules)}"
            )
        if (lossy := self.lossy(params)) and not params.lossy:
            raise ValueError(
                f"{lossy} is lossy: the text would not have the distribution of plain decoding. "
                "Leave it out, or allow it with lossy=true"
            )
        return lossy

    def lossy(self, params: SamplingParams) -> str:
        """What makes a request's distribution another than plain decoding's; '' for nothing."""
        return ""

    def start(self, prompt: list[int]) -> tuple[Batch, SamplingParams]:
        """One greedy request that has not begun, for looking at a single pass."""
        params = SamplingParams(max_new_tokens=1, temperature=0)
        return self._batch([prompt], params, KeyedRandomness([0], self.device)), params

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError for a target that this sampler cannot decode with."""
        check_attention(target)

    def margin(self, params: SamplingParams) -> int:
        """Slots needed after the last token that is kept: a cycle's overshoot, and scratch."""
        return 1

    def prefill(self, batch: Batch, name: str, network: CachedNetwork) -> tuple[Tensor, ...]:
        """Give a network all prompt tokens but the last, which the first cycle brings.

        Returns:
            The outputs [B, n - 1, H] of the network's `hidden_layers`, n the longest prompt; those
            of padding mean nothing. Empty where no layer is asked for, or no prompt has two tokens.
        """
        batch.networks[name] = network
        width = int(batch.lengths.max()) - 1
        if not width:
            return ()
        positions = torch.arange(width, device=batch.tokens.device).expand(len(batch.requests), -1)
        padding = positions >= batch.lengths[:, None] - 1
        return network(
            batch.tokens[:, :width],
            positions,
            keep=1,
            padding=padding if padding.any() else None,
        ).hidden_states

    def target_pass(self, batch: Batch, draft: Tensor, params: SamplingParams) -> TargetOutput:
        """One pass of the target over the last committed token and a draft.

        Args:
            draft: [B, k], drafted tokens.

        Returns:
            Warped logits [B, k+1, V] at the drafted positions and at the one after them, and the
            outputs [B, k+1, H] of `hidden_layers` at the last committed token and the draft.
        """
        batch.drafted = draft.shape[1]
        last = batch.lengths[:, None] - 1
        tokens = torch.cat([batch.tokens.gather(1, last), draft], 1)
        positions = last + torch.arange(tokens.shape[1], device=tokens.device)
        output = batch.networks["target"](tokens, positions, keep=tokens.shape[1])
        return output._replace(logits=self.warped(output.logits, batch, draft, params))

    def warped(
        self,
        logits: Tensor,
        batch: Batch,
        draft: Tensor,
        params: SamplingParams,
        before: Tensor | None = None,
    ) -> Tensor:
        """Target logits [B, k+1, V] at draft [B, k] and after it, as they are sampled from.

        before: [B, k+1, k], which drafted tokens each position follows, where they are no chain.
        """
        seen = None
        if params.repetition_penalty != 1.0:
            seen = seen_tokens(batch.tokens, batch.lengths, draft, self.vocabulary, before)
        return warp(logits, params, seen)

    def cached_target(self, batch: Batch) -> CachedNetwork:
        """The target with a cache that has room for these requests."""
        return CachedNetwork(self.target, causal, batch.tokens.shape[1], self.hidden_layers)

    def noise(self, batch: Batch, count: int, params: SamplingParams) -> Tensor | None:
        """Keyed noise [B, count, V] of the next absolute positions; None at temperature 0."""
        if params.temperature == 0:
            return None
        # Of few rows and a small vocabulary a position costs less than the calls that make it, so
        # they are made `step` at a time, and the next cycles ask for the same ones.
        step = min(max(1, _FEW // (self.vocabulary * len(batch.requests))), 16)
        skipped = batch.lengths % step
        steps = torch.arange(step * (1 + -(-(count - 1) // step)), device=batch.tokens.device)
        noise = batch.randomness.gumbel((batch.lengths - skipped)[:, None] + steps, self.vocabulary)
        if step == 1:
            return noise
        row = torch.arange(len(noise), device=noise.device)[:, None]
        return noise[row, skipped[:, None] + steps[:count]]

    def _batch(self, prompts: list[list[int]], params: SamplingParams, randomness) -> Batch:
        capacity = max(map(len, prompts)) + params.max_new_tokens + self.margin(params)
        return Batch(prompts, capacity, randomness, self.device)

    def _encode(self, prompt: str | list[int], params: SamplingParams) -> list[int]:
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        bad = [t for t in ids if not 0 <= t < self.vocabulary]
        if bad:
            raise ValueError(
                f"prompt token {bad[0]} is outside the target's vocabulary of {self.vocabulary}"
            )
        if self.context is not None and len(ids) + params.max_new_tokens > self.context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_new_tokens={params.max_new_tokens}, "
                f"together more than the target's context of {self.context}: shorten one of them"
            )
        return ids

    def _commit(
        self, row: int, answer: _Answer, new: list[int], params: SamplingParams, text: bool
    ) -> Chunk | None:
        """Take a cycle's tokens up to the end of the answer; None: nothing to show yet."""
        reason, count = None, len(new)
        room = params.max_new_tokens - len(answer.token_ids)
        if not params.ignore_eos:
            end = next((i for i, t in enumerate(new) if t in self.eos), None)
            if end is not None and end < room:
                new, reason = new[: end + 1], "eos"
        if reason is None and len(new) >= room:
            new, reason = new[:room], "length"
        before = len(answer.token_ids)
        answer.token_ids += new
        decoded = None
        if params.stop:
            known = answer.text.extend(new)
            start = max(0, known - max(map(len, params.stop)))
            if any(answer.text.text.find(s, start) >= 0 for s in params.stop):
                answer.token_ids = self._tokens_until(answer.token_ids, params.stop, before)
                # Cut what these tokens say: a later token may complete an earlier stop string.
                decoded, reason = self._decode(answer.token_ids), "stop"
                decoded = decoded[: min(at for s in params.stop if (at := decoded.find(s)) >= 0)]
        elif text:
            answer.text.extend(new)
        answer.stats.emitted.append(len(answer.token_ids) - before)
        answer.stats.beyond = count - answer.stats.emitted[-1]
        if reason is None and not text:
            return None
        if decoded is None and (text or params.stop):
            decoded = answer.text.text
        elif decoded is None:
            decoded = self._decode(answer.token_ids)
        return self._chunk(row, answer, decoded, reason, params)

    def _chunk(
        self, row: int, answer: _Answer, decoded: str, reason: str | None, params: SamplingParams
    ) -> Chunk | None:
        """What a request's text so far adds to what was shown of it; None: nothing yet."""
        safe = decoded if reason else decoded[: _safe_length(decoded, params.stop)]
        piece, answer.printed = safe[answer.printed :], max(answer.printed, len(safe))
        result = None
        if reason:
            result = Result(decoded, answer.token_ids, reason, answer.stats)
        elif not piece:
            return None
        new, answer.sent = answer.token_ids[answer.sent :], len(answer.token_ids)
        return Chunk(row, piece, new, result)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _tokens_until(self, token_ids: list[int], stop: tuple[str, ...], before: int) -> list[int]:
        """Tokens up to the one that completes a stop string; the first `before` hold none."""
        for n in range(before + 1, len(token_ids)):
            if any(s in self._decode(token_ids[:n]) for s in stop):
                return token_ids[:n]
        return token_ids

    def _account(
        self, stats: Stats, batch: Batch, prefills: dict[str, int], seconds: float
    ) -> None:
        """Fill in the passes and the split of the seconds when a request ends."""
        spent = {name: n.seconds for name, n in batch.networks.items()}
        passes = {name: n.passes - prefills[name] for name, n in batch.networks.items()}
        stats.target_passes, stats.drafter_passes = passes["target"], passes.get("drafter", 0)
        stats.target_s, stats.drafter_s = spent["target"], spent.get("drafter", 0.0)
        stats.sampler_s = seconds - stats.target_s - stats.drafter_s


def check_attention(network: PreTrainedModel) -> None:
    """Raise ValueError for a network that would not follow the masks that decoding gives it."""
    config = network.config.get_text_config()
    # A sliding window does no harm before a text outgrows it, which `Sampler._encode` checks.
    allowed = {"full_attention", "sliding_attention"}
    kinds = {*(getattr(config, "layer_types", None) or [])} - allowed
    if kinds:
        raise ValueError(
            f"this {config.model_type!r} model has layers of {sorted(kinds)}: only full attention "
            "takes the masks of a draft block"
        )
    if config._attn_implementation not in DENSE:
        raise ValueError(
            f"attention implementation {config._attn_implementation!r} would misread a boolean "
            "mask: load the model with attn_implementation='sdpa'"
        )


def _safe_length(text: str, stop: tuple[str, ...]) -> int:
    """How much of a growing text can be shown: no half character, no start of a stop string."""
    safe = len(text.rstrip("�"))
    for s in stop:
        for n in range(min(len(s) - 1, safe), 0, -1):
            if text[:safe].endswith(s[:n]):
                safe -= n
                break
    return safe

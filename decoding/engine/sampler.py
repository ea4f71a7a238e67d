"""The decode loop: a method supplies `begin` (prefill) and `cycle` (propose and verify)."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.text.chat import encode_text
from decoding.engine.answer import Answer
from decoding.engine.batch import Batch
from decoding.engine.cache import CachedNetwork, RaggedCache, TargetOutput
from decoding.engine.grammar import Constraint, Grammars, caught_up, exclude
from decoding.engine.params import USUAL, Chunk, Result, SamplingParams
from decoding.engine.prefixes import Prefixes
from decoding.engine.randomness import KeyedRandomness, Randomness, fresh_seed, request_seeds
from decoding.engine.recurrent import RecurrentNetwork, cached
from decoding.engine.running import Running
from decoding.engine.verify import choose
from decoding.engine.vocabulary import end_tokens
from decoding.engine.warp import preceding, warp
from models.attention import DENSE, check_masks
from models.context import context, why
from models.masks import Predicate, causal
from models.placement import input_device
from models.recurrent import is_recurrent

_FEW = 2**16  # numbers of keyed noise whose making costs little more than the call


class Sampler(ABC):
    """Decodes with a target model, losslessly: the output distribution is plain decoding's.

    `lossy` must name a rule that is not lossless; it runs only for a user who gives lossy=true.

    Args:
        target: Any transformers causal LM that takes a 4-D attention mask.
        tokenizer: The target's own.

    Attributes:
        rules: Values of `verify` that this sampler tells apart.
        drafts: Values of `draft`, where it drafts in several ways.
        starts_alone: Whether new requests have their first cycle before they join others.
        continues: Whether the text goes on from the prompt, which is not part of it.
        predicts_next: Whether the target gives the next token's distribution.
        bench: The command that measures it against its plain counterpart.
        hidden_layers: Target layers whose outputs its passes return (`TargetOutput`).
        chains: Whether it decodes targets with recurrent layers, which verify chains alone.
        device: Where the tokens of its batches are.
        reads_prefixes: Whether it goes on from keys and values of earlier prompts.
        emitted: Tokens of all requests so far.
        prefixes: What is kept of them.
    """

    rules: tuple[str, ...] = ("coupled", "rejection")
    drafts: tuple[str, ...] = ()
    starts_alone = False
    continues = True
    predicts_next = True
    bench = "decoding.bench"
    hidden_layers: tuple[int, ...] = ()
    chains = False
    reads_prefixes = False
    emitted = 0
    prefixes: Prefixes | None = None

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.check(target)
        self.target, self.device = target.eval(), input_device(target)
        self.tokenizer = tokenizer
        self.vocabulary = target.config.get_text_config().vocab_size
        self.grammars = Grammars(self.vocabulary)

    @cached_property
    def eos(self) -> frozenset[int]:
        """Return the tokens that end an answer; another set may be assigned."""
        config = getattr(self.target, "generation_config", None)
        return frozenset(end_tokens(config, self.tokenizer))

    @property
    def context(self) -> int | None:
        """Return the most tokens of a prompt and its answer together; None: any number."""
        return context(self.target.config)

    @abstractmethod
    def begin(self, batch: Batch, params: SamplingParams) -> None:
        """Make the caches, prefill them, and set `batch.state`."""

    @abstractmethod
    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Run one target pass: tokens [B, m], and how many of each row are emitted (at least 1)."""

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: list[int] | None = None,
        randomness: Randomness | None = None,
        at_once: int | None = None,
    ) -> list[Result]:
        """Decode every prompt to its end; return one `Result` a prompt, in their order.

        Args:
            prompts: Texts, or token ids.
            params: How to sample; a list has one a prompt, which may differ in how answers end
                (max_new_tokens, min_tokens, stop, ignore_eos) and in their grammar. None: the
                defaults of `SamplingParams`.
            seeds: One a prompt, in place of those derived from params.seed.
            randomness: Replaces the keyed randomness, in tests.
            at_once: The most prompts that are decoded together: where one ends the next one joins,
                the longest `max_new_tokens` first. None: all, as one batch.

        Raises:
            ValueError: A prompt or a parameter that this sampler cannot decode with.
        """
        results: dict[int, Result] = {}
        for chunk in self.stream(
            prompts, params, seeds=seeds, randomness=randomness, at_once=at_once, text=False
        ):
            if chunk.result is not None:
                results[chunk.request] = chunk.result
        return [results[n] for n in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: list[int] | None = None,
        randomness: Randomness | None = None,
        at_once: int | None = None,
        text: bool = True,
    ) -> Iterator[Chunk]:
        """Decode, yielding a `Chunk` whenever the committed text of a request grows.

        Between two chunks nothing of torch's modes is changed, so the reader may train, or hold
        several streams and close them in any order.

        Args:
            prompts, params, seeds, randomness, at_once: See `generate`.
            text: False yields finished requests only, and detokenises nothing before.

        Raises:
            ValueError: As `generate`; also where the model's logits are not numbers.
        """
        if not prompts:
            raise ValueError("no prompt was given")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} parameters were given for {len(prompts)} prompts")
        own, params = params, params[0]
        if any(self.shared(p) != self.shared(params) for p in own):
            raise ValueError(
                "parameters that differ in more than grammar, min_tokens, max_new_tokens, stop and "
                "ignore_eos cannot be decoded in one call: make one for each"
            )
        for asked in own:
            self.check_params(asked)
        prompts = [self.encode(p, each) for p, each in zip(prompts, own)]
        own = [self.with_room(p, each) for p, each in zip(prompts, own)]
        if seeds is None:
            seeds = request_seeds(
                fresh_seed() if params.seed is None else params.seed, len(prompts)
            )
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds were given for {len(prompts)} prompts")
        if at_once is not None and at_once < 1:
            raise ValueError(f"at_once={at_once} is not allowed: it must be at least 1")
        assert randomness is None or at_once is None  # it is of one batch
        most = len(prompts) if at_once is None else at_once
        capacity = max(self.capacity([p], each) for p, each in zip(prompts, own))
        running = Running(self, params, capacity)
        waiting = deque(range(len(prompts)))
        if at_once is not None:  # the longest first, so that none of them runs alone at the end
            waiting = deque(sorted(waiting, key=lambda n: -own[n].most))
        while waiting or running:
            room = most - len(running)
            new = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            if new:
                ids, keys, each = zip(*((prompts[n], seeds[n], own[n]) for n in new))
                running.admit(new, ids, keys, each, randomness=randomness)
            # Nothing of torch's modes is changed across a yield: they are the thread's.
            yield from running.step(text)

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that this sampler does not offer."""
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
        if params.steered and not (self.predicts_next and self.continues):
            raise ValueError(
                "grammar, min_tokens, logit_bias, presence_penalty and frequency_penalty are for "
                "models that predict the next token: leave them out"
            )
        if bad := [t for t, _ in params.logit_bias if t >= self.vocabulary]:
            raise ValueError(
                f"logit_bias={bad[0]} is not allowed: the target's tokens are 0 to "
                f"{self.vocabulary - 1}"
            )
        if params.grammar is not None:
            self.grammars.check(params.grammar, self.tokenizer, [*self.eos])
        if (lossy := self.lossy_reason(params)) and not params.lossy:
            raise ValueError(
                f"{lossy} is lossy: the text would not have the distribution of plain decoding. "
                "Leave it out, or allow it with lossy=true"
            )

    def lossy_reason(self, params: SamplingParams) -> str:
        """Name the option that makes the distribution another than plain decoding's; '' if none."""
        return ""

    def told(self, params: SamplingParams) -> str:
        """Return the line that a user needs to know about how a request is decoded; '' if none."""
        return ""

    def start(self, prompt: list[int]) -> tuple[Batch, SamplingParams]:
        """Make a batch of one greedy request that has not begun, to look at a single pass."""
        params = SamplingParams(max_new_tokens=1, temperature=0)
        randomness, capacity = KeyedRandomness([0], self.device), self.capacity([prompt], params)
        return self.new_batch([prompt], params, randomness, capacity), params

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError for a target that this sampler cannot decode with."""
        if not is_recurrent(target.config):
            check_attention(target)
        elif not self.chains:
            raise ValueError(
                f"this {target.config.model_type!r} model has layers with a recurrent state, which "
                "only plain decoding, Jacobi iterations and chains of drafts can go back to"
            )

    def margin(self, params: SamplingParams) -> int:
        """Return the slots needed after the last kept token: a cycle's overshoot, and scratch."""
        return 1

    def prefill(
        self, batch: Batch, name: str, network: CachedNetwork | RecurrentNetwork
    ) -> tuple[Tensor, ...]:
        """Run a network over all prompt tokens but the last, which the first cycle brings.

        With a `batch.chunk` each pass takes so many tokens of a row; `batch.between` follows each.
        Returns the outputs [B, n - 1, H] of `hidden_layers`, n the longest prompt, undefined at
        padding, and without the tokens of an earlier prompt that are not read again; none where no
        layer is asked for, or nothing is read.
        """
        batch.networks[name], network.cache.expected = network, batch.expected
        width = int(batch.lengths.max()) - 1
        if not width:
            return ()
        positions = torch.arange(width, device=batch.tokens.device).expand(len(batch.requests), -1)
        padding = positions >= batch.lengths[:, None] - 1
        first, part = 0, batch.chunk
        if self.prefixes is not None:  # also of those that keep none: all read prompts alike
            first, part = self.restored(batch, network), self.prefixes.part
            batch.reused = first if name == "target" else batch.reused
            if first == width:
                return ()
        found, whole = [], (x[:, first:] for x in (batch.tokens[:, :width], positions, padding))
        for tokens, at, pad in zip(*(x.split(part or width, 1) for x in whole)):
            output = network(tokens, at, keep=1, padding=pad if pad.any() else None)
            found.append(output.hidden_states)
            batch.between()
        return tuple(torch.cat(layer, 1) for layer in zip(*found))

    def restored(self, batch: Batch, network: CachedNetwork | RecurrentNetwork) -> int:
        """Let a network know what is kept of a batch's one prompt; return how many tokens."""
        if len(batch.requests) > 1 or not self.keeps(network):
            return 0
        assert self.prefixes is not None
        assert isinstance(network, CachedNetwork)
        return self.prefixes.give(network, batch.tokens[0, : int(batch.lengths[0]) - 1].tolist())

    def keeps(self, network: Any) -> bool:
        """Return whether a network's keys and values may be those of an earlier prompt's tokens."""
        plain = isinstance(network, CachedNetwork) and isinstance(network.cache, RaggedCache)
        return self.reads_prefixes and plain

    def fresh(self) -> Self:
        """Return a sampler of the same models that has learnt nothing from earlier requests."""
        return copy(self)

    def known_tokens(self, prompt: Any) -> int:
        """Return how many of an encoded prompt's first tokens the target need not read again."""
        if self.prefixes is None or not self.reads_prefixes:
            return 0
        return self.prefixes.common(self.target, prompt[:-1])

    def ended(self, batch: Batch, rows: Sequence[int]) -> None:
        """Keep what later requests can use of rows that end: keys and values of their prompts."""
        if self.prefixes is None:
            return
        for row in rows:
            tokens = batch.tokens[row, : int(batch.starts[row]) - 1].tolist()
            for network in filter(self.keeps, batch.networks.values()):
                self.prefixes.keep(network, row, tokens)

    def target_pass(self, batch: Batch, draft: Tensor, params: SamplingParams) -> TargetOutput:
        """Run the target once over the last committed token and a draft [B, k].

        Returns:
            Warped logits [B, k+1, V] at the drafted positions and the one after them, and the
            outputs [B, k+1, H] of `hidden_layers` at the last committed token and the draft.
        """
        batch.drafted = draft.shape[1]
        last = batch.lengths[:, None] - 1
        tokens = torch.cat([batch.tokens.gather(1, last), draft], 1)
        positions = last + torch.arange(tokens.shape[1], device=tokens.device)
        output = batch.networks["target"](tokens, positions, keep=tokens.shape[1])
        return output._replace(logits=self.warped(output.logits, batch, draft, params))

    def one_token(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, TargetOutput]:
        """Decode one token of each row without drafts; return them, [B, 1], and the pass."""
        output = self.target_pass(batch, batch.tokens[:, :0], params)
        if params.keyed:
            return choose(output.logits, self.noise(batch, 1, params)), output
        return batch.randomness.categorical(output.logits.softmax(-1)), output

    def warped(
        self,
        logits: Tensor,
        batch: Batch,
        draft: Tensor,
        params: SamplingParams,
        before: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Warp target logits [B, k+1, V] at and after draft [B, k]; `before`: see `preceding`."""
        committed = batch.tokens, batch.starts, batch.lengths
        known = preceding(params, *committed, draft, self.vocabulary, before)
        logits = exclude(logits, self.constraints(batch), draft, before)
        return warp(logits, params, known)

    def constraint(self, prompt: Any, params: SamplingParams) -> Constraint | None:
        """Make the constraint of an answer to an encoded prompt; None where it has none."""
        if not params.constrained:
            return None
        own = params.grammar, params.min_tokens, self.tokenizer, [*self.eos]
        return self.grammars.constraint(len(prompt), *own)

    def constraints(self, batch: Batch) -> list[Constraint | None]:
        """Return the constraints of a batch, which know all committed tokens."""
        return caught_up(batch.constraints, batch.tokens, batch.lengths)

    def cached_target(
        self, batch: Batch, predicate: Predicate = causal
    ) -> CachedNetwork | RecurrentNetwork:
        """Make the target's network, with a cache that has room for these requests."""
        return cached(self.target, predicate, batch.tokens.shape[1], self.hidden_layers)

    def noise(self, batch: Batch, count: int, params: SamplingParams) -> Tensor | None:
        """Return keyed noise [B, count, V] of the next positions; None at temperature 0."""
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

    def capacity(self, prompts: list, params: SamplingParams) -> int:
        """Return the slots that a row needs, for the longest of these requests."""
        return max(map(len, prompts)) + params.most + self.margin(params)

    def new_batch(
        self, prompts: list, params: SamplingParams, randomness: Randomness, capacity: int
    ) -> Batch:
        """Make a batch of requests that have not begun, with `capacity` tokens of room each."""
        return Batch(prompts, capacity, randomness, self.device)

    def shared(self, params: SamplingParams) -> SamplingParams:
        """Return what requests decoded together must share: all but how they end."""
        one = replace(params, max_new_tokens=1, min_tokens=0, grammar=None)
        return replace(one, stop=(), ignore_eos=False, seed=None)

    def encode(self, prompt: str | list[int], params: SamplingParams) -> Any:
        """Return a prompt's ids, for `new_batch`; ValueError for one that cannot be decoded."""
        ids = encode_text(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        bad = [t for t in ids if not 0 <= t < self.vocabulary]
        if bad:
            raise ValueError(
                f"prompt token {bad[0]} is outside the target's vocabulary of {self.vocabulary}"
            )
        given = params.max_new_tokens
        if self.context is not None and len(ids) + (given or 1) > self.context:
            rule = "no room for an answer in" if given is None else "together more than"
            asked = "" if given is None else f" and max_new_tokens={given}"
            what = "the prompt" if given is None else "one of them"
            raise ValueError(
                f"the prompt has {len(ids)} tokens{asked}, {rule} the target's context of "
                f"{self.context}{why(self.target.config)}: shorten {what}"
            )
        return ids

    def with_room(
        self, prompt: Any, params: SamplingParams, usual: int = USUAL, longest: int | None = None
    ) -> SamplingParams:
        """Return an encoded prompt's parameters, with a `max_new_tokens` that fits its context.

        Where none is given it is `usual`, or what is left of the context and of `longest` tokens.
        """
        if params.max_new_tokens is not None or not self.continues:
            return params
        limits = [n - len(prompt) for n in (self.context, longest) if n is not None]
        return replace(params, max_new_tokens=min([usual, *limits]))

    def commit(self, answer: Answer, new: list[int], text: bool) -> Chunk | None:
        """Add a cycle's tokens to one answer; see `Answer.take`."""
        self.emitted += len(new)
        return answer.take(new, self.eos, text)


def check_attention(network: PreTrainedModel) -> None:
    """Raise ValueError for a network that would not follow the masks of decoding."""
    check_masks(network)
    if network.config._attn_implementation not in DENSE:
        raise ValueError(
            f"attention={network.config._attn_implementation} is for training: give "
            "attention=sdpa, or leave it out"
        )
    stock = type(network).__module__.startswith("transformers.")
    if stock and "position_ids" not in signature(network.forward).parameters:
        raise ValueError(
            f"a {network.config.model_type!r} model cannot be decoded with: transformers' class "
            "takes no positions, but counts its cache. Give a model of another family, such as "
            "llama, qwen3 or gpt2"
        )

"""The interface of another engine, and its reply."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from decoding.engine.params import SamplingParams


@dataclass
class Reply:
    """Answers of an engine.

    Attributes:
        token_ids: The answer to each prompt; None for a text whose tokens cannot be known.
        finish_reasons: 'eos' or 'length', of each answer.
        seconds: Of all of them together, as the engine counted.
        drafts: Increments of the counters of speculative decoding, with vLLM's names: `drafts`,
            `draft_tokens`, `accepted_tokens`, and `accepted_tokens_per_pos`, a list. Empty for
            plain decoding.
        top: If asked for, [[(token id, log-probability)]] of each answer's tokens, most probable
            first; [] for a prompt that is refused.
        refused: Why prompts were refused, by their numbers; their `token_ids` are None.
    """

    token_ids: list[list[int] | None]
    finish_reasons: list[str]
    seconds: float = 0.0
    drafts: dict = field(default_factory=dict)
    top: list[list[list[tuple[int, float]]]] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class Refused(ValueError):
    """An error about one prompt; others may be decoded."""


class Engine(ABC):
    """An engine that decodes prompts of token ids."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        eos: Sequence[int] = (),
        seeds: Sequence[int] | None = None,
        logprobs: int = 0,
        set_aside: bool = False,
    ) -> Reply:
        """Decode prompts of token ids.

        Args:
            prompts: Token ids.
            params: `verify`, `block_size`, `draft` and `lossy` mean nothing to an engine, and stop
                strings are an error, because answers are token ids.
            eos: The target's end-of-text tokens, used with those that the engine finds itself.
            seeds: One for each request; None: params.seed for all.
            logprobs: How many of the most probable tokens come with each token of an answer.
            set_aside: Answer the other prompts where some are refused, which is else an error.
        """
        if params.stop:
            raise ValueError(f"stop={list(params.stop)} is not allowed: answers are token ids here")
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos")
        asked = {name: getattr(params, name) for name in names}
        asked["max_tokens"] = params.most
        asked["stop_token_ids"] = [] if params.ignore_eos else [*eos]
        own: Sequence[int | None] = [params.seed] * len(prompts) if seeds is None else seeds
        # An engine's seed has 64 bits with a sign.
        each = [asked | {"seed": None if seed is None else seed % 2**63} for seed in own]
        reply = self._decode(prompts, each, [*eos], logprobs)
        if reply.refused and not set_aside:
            raise Refused(next(iter(reply.refused.values())))
        return reply

    @abstractmethod
    def _decode(
        self, prompts: Sequence[list[int]], each: list[dict], eos: list[int], logprobs: int
    ) -> Reply:
        """Decode prompts, each with options by the names that vLLM and its server share."""


def first_line(text: str) -> str:
    """Return the first line of a text."""
    return text.strip().partition("\n")[0]

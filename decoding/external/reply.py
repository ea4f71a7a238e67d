"""What an engine that others wrote is asked, and what it gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decoding.engine.params import SamplingParams


@dataclass
class Reply:
    """Answers of an engine.

    Attributes:
        token_ids: The answer to each prompt; None where the engine gave a text that its tokens
            cannot be known of.
        finish_reasons: 'eos' or 'length', of each answer.
        seconds: Of all of them together, as the engine counted.
        drafts: Counters of speculative decoding as they grew, with vLLM's names: `drafts`,
            `draft_tokens`, `accepted_tokens`, and `accepted_tokens_per_pos`, a list. Empty for
            plain decoding.
        top: [[(token id, log-probability)]] of each answer's tokens, the most probable first, where
            they were asked for.
    """

    token_ids: list[list[int] | None]
    finish_reasons: list[str]
    seconds: float = 0.0
    drafts: dict = field(default_factory=dict)
    top: list[list[list[tuple[int, float]]]] = field(default_factory=list)


def request_options(
    count: int, params: SamplingParams, eos: Sequence[int], seeds: Sequence[int] | None
) -> list[dict]:
    """The options of each of `count` requests, with the names that vLLM and its server share.

    Args:
        count: Requests.
        params: Of which `verify`, `block_size`, `draft` and `lossy` mean nothing to an engine.
        eos: The target's end-of-text tokens, beside those that the engine finds itself.
        seeds: One a request; None: params.seed for all.

    Raises:
        ValueError: A stop string: answers are token ids here.
    """
    if params.stop:
        raise ValueError(f"stop={list(params.stop)} is not allowed: answers are token ids here")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos")
    asked = {name: getattr(params, name) for name in names}
    asked["max_tokens"] = params.max_new_tokens
    asked["stop_token_ids"] = [] if params.ignore_eos else [*eos]
    seeds = [params.seed] * count if seeds is None else seeds
    # An engine's seed has 64 bits with a sign.
    return [asked | {"seed": None if seed is None else seed % 2**63} for seed in seeds]


def first_line(text: str) -> str:
    """The first line of a text that may have many."""
    return text.strip().partition("\n")[0]

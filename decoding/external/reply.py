"""What an engine that others wrote gives for some prompts."""

from dataclasses import dataclass, field


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


def first_line(text: str) -> str:
    """The first line of a text that may have many."""
    return text.strip().partition("\n")[0]

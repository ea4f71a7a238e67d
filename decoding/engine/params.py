"""Sampling parameters, and the results, statistics and chunks that a sampler returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

VERIFY = ("coupled", "rejection", "block", "tree")
USUAL = 128  # tokens of an answer, where a request does not say
LONGEST_ANSWER, LONGEST_DRAFT = 2**20, 2**10  # tokens: more is a slip, and would take all memory
# Temperatures that float32 holds, and penalties by which it still holds a logit.
TEMPERATURES, PENALTIES = (1.2e-38, 3.4e38), (1e-20, 1e20)
WHOLE = ("max_new_tokens", "top_k", "seed", "block_size", "min_tokens")
NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
BIAS = 1000.0  # of a logit, and a penalty of an answer's tokens, at the most
KEYED = ("coupled", "tree")  # every choice is argmax(log p + g), with the noise g of its position


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, with the same keys for every sampler and every command.

    Args:
        max_new_tokens: The most tokens that are generated; None: `USUAL`, or as many as the context
            has left (`Sampler.with_room`).
        temperature: Divides the logits; 0 is greedy, and else one of `TEMPERATURES`.
        top_k: Keep the k most probable tokens; 0 is off.
        top_p: Keep the most probable tokens that reach this probability together; 1 is off.
        min_p: Keep tokens with at least this share of the highest probability; 0 is off.
        repetition_penalty: Above 1 makes tokens of the prompt and of the answer less likely; one
            of `PENALTIES`.
        presence_penalty: Subtracted from the logits of the answer's tokens so far.
        frequency_penalty: The same, as often as the token is there.
        logit_bias: What is added to the logits of tokens, ((token, number), ...).
        grammar: What the whole answer matches: a JSON schema, a regular expression between slashes,
            or a Lark grammar as llguidance reads it. An answer may still be cut off by
            `max_new_tokens`, or by `stop`.
        min_tokens: The answer does not end before it has so many.
        stop: The text ends before the first of these strings.
        ignore_eos: Go on after an end-of-sequence token (benches).
        seed: Seed of the first request of a call; the others' are derived
            (`randomness.request_seeds`). A request's text depends on its own seed and on no other
            request. None draws one.
        verify: How drafts are verified, one of `VERIFY`; each is lossless. With `coupled` and
            `tree` the text is that of plain decoding with the same seed, with any drafter or none.
        block_size: Tokens drafted a cycle; None takes the drafter's own.
        draft: How drafts are made, for a sampler with several ways (infilling); None takes its own.
        lossy: Allow options that are not lossless; the result's stats name them.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    verify: str = "coupled"
    block_size: int | None = None
    draft: str | None = None
    lossy: bool = False

    def __post_init__(self):
        for name in (*WHOLE, *NUMBERS):
            value, kind = getattr(self, name), Integral if name in WHOLE else Real
            optional = value is None and name in ("max_new_tokens", "seed", "block_size")
            if not optional and (isinstance(value, bool) or not isinstance(value, kind)):
                raise _not_allowed(name, value, "a whole number" if name in WHOLE else "a number")
        (coldest, hottest), (least, most) = TEMPERATURES, PENALTIES
        allowed = [
            (
                1 <= self.most <= LONGEST_ANSWER,
                "max_new_tokens",
                f"a whole number from 1 to {LONGEST_ANSWER}",
            ),
            (
                self.temperature == 0 or coldest <= self.temperature <= hottest,
                "temperature",
                f"0 (greedy) or a number from {coldest:g} to {hottest:g}",
            ),
            (self.top_k >= 0, "top_k", "0 (off) or a positive whole number"),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]; 1 is off"),
            (0 <= self.min_p < 1, "min_p", "in [0, 1); 0 is off"),
            (
                least <= self.repetition_penalty <= most,
                "repetition_penalty",
                f"a number from {least:g} to {most:g}; 1 is off",
            ),
            *(
                (
                    abs(getattr(self, name)) <= BIAS,
                    name,
                    f"a number from {-BIAS:g} to {BIAS:g}; 0 is off",
                )
                for name in ("presence_penalty", "frequency_penalty")
            ),
            (
                _biases(self.logit_bias),
                "logit_bias",
                f"pairs of a token, once each, and a number from {-BIAS:g} to {BIAS:g}",
            ),
            (
                self.grammar is None or (isinstance(self.grammar, str) and self.grammar.strip()),
                "grammar",
                "a text: a JSON schema, /a regular expression/ or a Lark grammar",
            ),
            (
                0 <= self.min_tokens <= (self.max_new_tokens or LONGEST_ANSWER),
                "min_tokens",
                f"from 0 to max_new_tokens, {self.max_new_tokens or LONGEST_ANSWER}",
            ),
            (
                isinstance(self.stop, tuple | list) and all(isinstance(s, str) for s in self.stop),
                "stop",
                "a tuple of strings",
            ),
            (all(self.stop or ()), "stop", "strings that are not empty"),
            (self.verify in VERIFY, "verify", f"one of {list(VERIFY)}"),
            (
                self.block_size is None or 1 <= self.block_size <= LONGEST_DRAFT,
                "block_size",
                f"a whole number from 1 to {LONGEST_DRAFT}",
            ),
        ]
        for ok, name, rule in allowed:
            if not ok:
                raise _not_allowed(name, getattr(self, name), rule)

    @property
    def most(self) -> int:
        """Return the most tokens that are generated."""
        return USUAL if self.max_new_tokens is None else self.max_new_tokens

    @property
    def constrained(self) -> bool:
        """Return whether some tokens are excluded (`engine.grammar`)."""
        return self.grammar is not None or self.min_tokens > 0

    @property
    def steered(self) -> bool:
        """Return whether anything but temperature and truncation changes the distribution."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(self.constrained or self.logit_bias or penalties)

    @property
    def keyed(self) -> bool:
        """Return whether every token is the keyed choice, plain decoding's with the same seed."""
        return self.temperature == 0 or self.verify in KEYED


def _biases(given: Any) -> bool:
    """Return whether a `logit_bias` is one."""
    if not isinstance(given, tuple | list):
        return False
    whole = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given)
    if not whole or not all(type(t) is int and isinstance(x, Real) for t, x in given):
        return False
    return all(t >= 0 and abs(x) <= BIAS for t, x in given) and len(dict(given)) == len(given)


def _not_allowed(name: str, value: Any, rule: str) -> ValueError:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = f"an integer of {value.bit_length()} bits"
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return ValueError(f"{name}={text} is not allowed: it must be {rule}")


@dataclass
class Stats:
    """Counts and seconds of decoding one request.

    Seconds are those of the whole batch until the request ended.

    Attributes:
        emitted: Tokens emitted by each of the request's target passes, with the bonus or correction
            token; their mean is the acceptance length (as vLLM and `speculators` count).
        beyond: Tokens of the last pass that the answer's end cut off.
        drafted: Tokens that these passes verified.
        target_passes, drafter_passes: Forwards that the request took part in, without the prefill.
        target_s, drafter_s: Seconds in these forwards, prefill included.
        sampler_s: Seconds in everything else.
        reused: Tokens of the prompt that the target did not read again (`engine.prefixes`).
        lossy: The option that changes the distribution, such as 'tolerance=0.05'; '' if lossless.
    """

    emitted: list[int] = field(default_factory=list)
    beyond: int = 0
    drafted: int = 0
    target_passes: int = 0
    drafter_passes: int = 0
    target_s: float = 0.0
    drafter_s: float = 0.0
    sampler_s: float = 0.0
    reused: int = 0
    lossy: str = ""

    @property
    def acceptance_length(self) -> float:
        """Return the tokens emitted per target pass, with the bonus or correction token."""
        return sum(self.emitted) / max(1, len(self.emitted))

    @property
    def passes(self) -> list[int]:
        """Return `emitted`, with all that the last pass accepted: as serving engines count."""
        return [*self.emitted[:-1], *(n + self.beyond for n in self.emitted[-1:])]


def accepted_counts(passes: Sequence[int], positions: int) -> tuple[int, list[int]]:
    """Count a request's drafts, and for each i those of which at least i tokens were accepted.

    `passes` are tokens a target pass (`Stats.passes`), `positions` is the length of a draft.
    Example: passes [1, 3, 4] and 3 positions give (3, [2, 2, 1]).
    """
    return len(passes), [sum(n > i for n in passes) for i in range(1, 1 + positions)]


@dataclass
class Result:
    """A finished request.

    Attributes:
        text: The answer; in infilling, the whole text.
        token_ids: The generated tokens.
        finish_reason: 'eos', 'stop' or 'length'.
        stats: Counts and seconds.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """A piece of a request's text.

    Attributes:
        request: The index of the request in the call.
        text, token_ids: The text and the tokens that are new since the request's last chunk.
        result: The request's result in its last chunk, None before.
    """

    request: int
    text: str
    token_ids: list[int]
    result: Result | None = None


PARAM_NAMES = tuple(f.name for f in fields(SamplingParams))

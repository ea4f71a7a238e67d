"""What a user asks of a sampler (`SamplingParams`) and what comes back (`Result`)."""

from dataclasses import dataclass, field, fields

VERIFY = ("coupled", "rejection", "block", "tree")
KEYED = ("coupled", "tree")  # every choice is argmax(log p + g), with the noise g of its position


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; the same keys for every sampler and every command.

    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: 1 and 0 are off.
    repetition_penalty: above 1 makes tokens of the prompt and of the answer less likely.
    stop: the text ends before the first of these strings.
    ignore_eos: go on after an end-of-sequence token (benches).
    seed: None draws one. The first request of a call has this seed, the others seeds derived from
        it (`randomness.request_seeds`); a request's text depends on its seed and nothing else.
    verify: how drafts are verified, one of `VERIFY`; each is lossless. With `coupled` and `tree`
        the text is the same as plain decoding with the same seed, with any drafter or none.
    block_size: tokens drafted a cycle; None takes the drafter's own.
    draft: how drafts are made, for a sampler with several ways (infilling); None takes its own.
    lossy: allow what is not lossless (see `Sampler.lossy`); the result's stats name it.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    verify: str = "coupled"
    block_size: int | None = None
    draft: str | None = None
    lossy: bool = False

    def __post_init__(self):
        allowed = [
            (self.max_new_tokens >= 1, "max_new_tokens", "a whole number of at least 1"),
            (self.temperature >= 0, "temperature", "0 (greedy) or a positive number"),
            (self.top_k >= 0, "top_k", "0 (off) or a positive whole number"),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]; 1 is off"),
            (0 <= self.min_p < 1, "min_p", "in [0, 1); 0 is off"),
            (self.repetition_penalty > 0, "repetition_penalty", "a positive number; 1 is off"),
            (not isinstance(self.stop, str), "stop", "a tuple of strings"),
            (all(self.stop), "stop", "strings that are not empty"),
            (self.verify in VERIFY, "verify", f"one of {list(VERIFY)}"),
            (self.block_size is None or self.block_size >= 1, "block_size", "at least 1"),
        ]
        for ok, name, rule in allowed:
            if not ok:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not allowed: it must be {rule}"
                )

    @property
    def keyed(self) -> bool:
        """Whether the text is that of plain decoding with the same seed (T=0: greedy)."""
        return self.temperature == 0 or self.verify in KEYED


@dataclass
class Stats:
    """What a decode cost.

    emitted: tokens emitted by each target pass of this row, the bonus or correction token
        included; their mean is the acceptance length (as vLLM and `speculators` count it).
    drafted: tokens that these passes verified.
    target_passes, drafter_passes: forwards that this row took part in, the prefill not counted.
    target_s, drafter_s, sampler_s: seconds in the target's forwards (prefill included), in the
        drafter's, and in everything else; of the whole batch, for each of its rows.
    lossy: what made the law another than plain decoding's, e.g. 'tolerance=0.05'; '' is lossless.
    """

    emitted: list[int] = field(default_factory=list)
    drafted: int = 0
    target_passes: int = 0
    drafter_passes: int = 0
    target_s: float = 0.0
    drafter_s: float = 0.0
    sampler_s: float = 0.0
    lossy: str = ""

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target pass, the bonus or correction token included."""
        return sum(self.emitted) / max(1, len(self.emitted))


@dataclass
class Result:
    """One finished row. finish_reason: 'eos', 'stop' or 'length'."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """A piece of a row's text as it is committed; the last one carries the row's result."""

    row: int
    text: str
    token_ids: list[int]
    result: Result | None = None


PARAM_NAMES = tuple(f.name for f in fields(SamplingParams))

"""`python -m decoding.generate model=runs/deer_stage2/export prompt='def fib(n):'`: one answer."""

from dataclasses import dataclass
from typing import ClassVar

from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import DTYPES, NEEDED, ModelOptions, option
from decoding.engine.params import PARAM_NAMES, VERIFY, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load


@dataclass(frozen=True, kw_only=True)
class Generate(ModelOptions, SamplingParams):
    """Decode one prompt with an export's own sampler; the text is printed as it comes."""

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export prompt='def fib(n):' temperature=0.7"

    prompt: str = option(
        NEEDED, "the text to go on from; for infilling with holes such as <hole:12>", verbatim=True
    )
    target: str | None = option(None, "a target instead of the one that the export names")
    sampler: tuple[str, ...] = option(
        (), "another method or other knobs than the export's, as [method=jacobi,block_size=32]"
    )
    verify: str = option(
        SamplingParams.verify, "how drafts are verified; each is lossless", choices=VERIFY
    )
    dtype: str = option("auto", "of the weights in memory", choices=DTYPES)
    trust_remote_code: bool = option(False, "run the code that a model of the Hub brings")

    def __post_init__(self):
        super().__post_init__()
        SamplingParams.__post_init__(self)
        if not self.prompt:
            raise ValueError("prompt= is empty: give the text to go on from")


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    g = parse(argv, Generate, "decoding.generate")
    sampler = load(
        g.model,
        target=g.target,
        sampler=g.sampler,
        dtype=g.dtype,
        device=g.device,
        trust_remote_code=g.trust_remote_code,
    )
    if not isinstance(sampler, Sampler):
        raise ValueError(f"{g.model!r} makes no text but images: use python -m decoding.images")
    params = SamplingParams(**{name: getattr(g, name) for name in PARAM_NAMES})
    if sampler.continues:
        print(g.prompt, end="", flush=True)
    for chunk in sampler.stream([g.prompt], params):
        print(chunk.text, end="", flush=True)
    s, n = chunk.result.stats, len(chunk.result.token_ids)
    seconds = s.target_s + s.drafter_s + s.sampler_s
    print(
        f"\n\n{n} tokens in {seconds:.2f} s ({n / seconds:.0f} tokens/s), "
        f"{s.target_passes} target passes, {s.drafter_passes} drafter passes, "
        f"{s.acceptance_length:.2f} tokens per target pass, ended by {chunk.result.finish_reason}"
        + (f", lossy: {s.lossy}" if s.lossy else "")
    )


if __name__ == "__main__":
    main(run)

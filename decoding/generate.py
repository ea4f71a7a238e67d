"""`python -m decoding.generate model=runs/deer_stage2/export prompt='def fib(n):'`."""

from dataclasses import dataclass

from decoding.commands.cli import main, parse, quiet
from decoding.engine.params import PARAM_NAMES, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load


@dataclass(frozen=True)
class Generate(SamplingParams):
    """Decode one prompt with an export's own sampler; the text is printed as it comes.

    sampler: another method or other knobs than the export's, e.g. [method=jacobi,block_size=32].
    prompt: the text to go on from; of a model that infills, a text with holes such as <hole:12>.
    """

    model: str = ""
    prompt: str = ""
    target: str | None = None
    sampler: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not self.model:
            raise ValueError("model= is missing: an exported folder or a Hub id")
        if not self.prompt:
            raise ValueError("prompt= is missing: the text to go on from")


def run(argv: list[str]) -> None:
    """The command."""
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

"""`python -m decoding.bench.jacobi_picture model=runs/pcllm_round1/export prompt='def fib(n):'`.

A picture of the Jacobi trajectory of one answer, as in pcLLM's Figure 2: a line for each state of
each block, a cell for each token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from data.rows.trajectories import replay
from decoding.collectors.trajectories import Recorder
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import DTYPES, NEEDED, MeasureOptions, option
from decoding.commands.report import picture
from decoding.engine.params import SamplingParams
from decoding.loading import load_tokenizer
from models import causal

WRONG, GUESSED, ACCEPTED = range(3)


@dataclass(frozen=True, kw_only=True)
class Picture(MeasureOptions):
    """Draw the greedy Jacobi trajectory of one prompt, block by block, and count what it gains."""

    EXAMPLE: ClassVar[str] = "model=runs/pcllm_round1/export prompt='def fib(n):'"

    prompt: str = option(NEEDED, "the text to go on from", verbatim=True)
    block_size: int = option(16, "tokens of a block", least=1)
    max_new_tokens: int = option(64, "tokens of the answer, at the most", least=1)
    dtype: str = option("float32", "of the weights in memory", choices=DTYPES)
    out: str = option("trajectory.png", "the picture's file")


class Counts(NamedTuple):
    """The counts of a block.

    Attributes:
        passes: Of the network.
        fast_forwarded: Tokens that passes accepted beyond one each.
        stationary: Tokens that were right after a wrong one, and stayed so until accepted.
    """

    passes: int
    fast_forwarded: int
    stationary: int


def kinds(states: Tensor, clean: Tensor) -> Tensor:
    """The kind of each token of a trajectory: WRONG, GUESSED or ACCEPTED.

    A guessed token is right and comes after a wrong one.

    Args:
        states: The k states of a block of n tokens, [k, n].
        clean: The block's fixed point, [n].

    Returns:
        [k, n].

    >>> kinds(torch.tensor([[1, 9, 3]]), torch.tensor([1, 2, 3])).tolist()
    [[2, 0, 1]]
    """
    right = (states == clean).long()
    return right + right.cumprod(1)


def counts(states: Tensor, clean: Tensor) -> Counts:
    """The counts of a block from its states [k, n] and the real tokens of its fixed point [n]."""
    found, passes = kinds(states, clean), len(states) - 1
    accepted = (found == ACCEPTED).sum(1)
    beyond = (accepted.diff() - 1).clamp_min(0).sum()
    # Never wrong again after a state in which it was guessed.
    stays = (found != WRONG).flip(0).long().cumprod(0).flip(0).bool()
    stationary = ((found == GUESSED) & stays).any(0).sum()
    return Counts(passes, int(beyond), int(stationary))


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    t = parse(argv, Picture, "decoding.bench.jacobi_picture")
    tokenizer = load_tokenizer(t.model)
    network = causal.load(t.model, **t.placing)
    recorder = Recorder(network, tokenizer, block_size=t.block_size, running=False)
    params = SamplingParams(max_new_tokens=t.max_new_tokens, temperature=0.0)
    (result,) = recorder.generate([t.prompt], params, seeds=[t.seed])
    answer, n = torch.tensor(result.token_ids), t.block_size
    blocks = [
        (states[:, : len(clean)], clean)
        for states, clean in zip(replay(recorder.found[0], n), answer.split(n))
    ]
    print("block  tokens  passes  fast-forwarded  stationary")
    for i, (states, clean) in enumerate(blocks):
        c = counts(states, clean)
        line = (i + 1, len(clean), c.passes, c.fast_forwarded, c.stationary)
        print("{:>5}  {:>6}  {:>6}  {:>14}  {:>10}".format(*line))
    passes = sum(len(states) - 1 for states, _ in blocks)
    print(f"{len(answer)} tokens in {passes} passes: {len(answer) / passes:.2f} tokens a pass")
    draw(blocks, tokenizer, Path(t.out))
    print(f"wrote {t.out}")


def draw(blocks: list[tuple[Tensor, Tensor]], tokenizer, file: Path) -> None:
    """Draw the picture: accepted tokens blue, right guesses red, wrong tokens grey."""
    from matplotlib.colors import ListedColormap

    width = max(states.shape[1] for states, _ in blocks)
    heights = [len(states) for states, _ in blocks]
    size = (0.62 * width + 1, 0.26 * sum(heights) + 0.5 * len(blocks))
    colours = ListedColormap(["#d9d9d9", "#f4a6a0", "#9ec5ea"])
    with picture(file, nrows=len(blocks), figsize=size, height_ratios=heights) as axes:
        for i, (axis, (states, clean)) in enumerate(zip(axes[:, 0], blocks)):
            axis.pcolormesh(
                kinds(states, clean), cmap=colours, vmin=WRONG, vmax=ACCEPTED, edgecolors="white"
            )
            for y, state in enumerate(states.tolist()):
                for x, token in enumerate(state):
                    text = repr(tokenizer.decode([token]))[1:-1].replace("$", r"\$")
                    axis.text(x + 0.5, y + 0.5, text[:8], ha="center", va="center", fontsize=6)
            axis.invert_yaxis()
            axis.set_xlim(0, width)
            axis.set_xticks([])
            axis.set_yticks([0.5, len(states) - 0.5], ["0", str(len(states) - 1)])
            axis.set_ylabel(f"block {i + 1}", fontsize=8)
            axis.spines[:].set_visible(False)


if __name__ == "__main__":
    main(run)

"""Spiffy: speculative masked diffusion decoding; draft states of a block are verified in one pass.

Source: Spiffy, arXiv 2509.18085, section 4 and Algorithm 1. A pass evaluates the current state of a
block and D draft states, some steps ahead. The current state's logits determine the next state, as
in `denoise`; if it is among the drafts, its logits determine the state after it, and so on. The
output is that of `denoise`, token for token, for any drafts.

    drafts                                            from
    a calibrated graph                                the last evaluated state's ranking (Spiffy)
    graph=chain:N                                     the same, as FreeDave (arXiv 2510.00294)

A block begins as masks, after a known text. Where the block before it may end within a pass, that
pass also evaluates the next block's first state, after the most likely end (ours: `next_block`);
with a graph alone every block begins with a pass that has no drafts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.masked.draft_graph import DraftGraph, chain_graph, read_graph
from decoding.masked.unmasking import next_state, position_order
from decoding.method import Text
from decoding.samplers.denoise import DenoiseMethod, DenoiseSampler, DenoiseState

AHEAD = 8  # steps whose noise ranks the drafts, at most


@dataclass
class SpiffyState(DenoiseState):
    """The denoising state, and the ranking that the next drafts are made from."""

    order: Tensor  # positions of the block, the most likely to be decided next first, [B, L]
    best: Tensor  # the most probable tokens of each position, [B, L, width]
    left: Tensor  # masked positions of the ranked state, [B]


class SpiffySampler(DenoiseSampler):
    """Speculative sampler of a masked diffusion LM.

    With block-causal attention the draft states are appended to the cached sequence, as in Fig. 2.
    With bidirectional attention or guidance that would not be exact, since other tokens depend on
    the block: each draft state is a sequence of its own in the batch.

    Args:
        graph: The draft graph; ValueError where it does not fit the model.
        next_block: Whether the first state of the next block is drafted too.
        options: Of `DenoiseSampler`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        graph: DraftGraph,
        next_block: bool = True,
        **options,
    ):
        super().__init__(target, tokenizer, **options)
        if graph.block_size != self.block_size:
            raise ValueError(
                f"the draft graph was calibrated for block_size={graph.block_size}, but the model "
                f"decodes with block_size={self.block_size}: calibrate one with python -m "
                "trainers.fit recipe=spiffy_calibrate model=<the model>"
            )
        self.graph, self.next_block = graph, next_block
        self.states = 1 + len(graph.nodes) + 2 * next_block
        self.reach = graph.reach if self.next_block else 0
        ranks = max((i for node in graph.nodes for i, _ in node), default=1)
        self.simulated = AHEAD if self.next_block else min(AHEAD, ranks)  # steps
        self.width = max((j for node in graph.nodes for _, j in node), default=1)
        if self.width >= self.vocabulary:
            raise ValueError(
                f"the draft graph has vocabulary rank {self.width}, but the model has only "
                f"{self.vocabulary - 1} tokens beside its mask"
            )
        self.formulas = formulas(graph, self.device)

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        # Without a ranking yet, the first cycle has no drafts.
        super().begin(batch, params)
        block = batch.state.block
        batch.state = SpiffyState(
            **vars(batch.state),
            order=torch.zeros_like(block),
            best=block[..., None].expand(-1, -1, self.width),
            left=torch.zeros_like(batch.lengths),
        )

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Run one pass over the current state and the drafts; take the steps that are verified."""
        states = torch.cat([batch.state.block[:, None], self.draft_states(batch, params)], 1)
        end, there = self.block_end(batch)
        begins = there.any()
        asked = (states, end) if begins else (states,)
        logits = batch.networks["target"].ask(batch, *asked)
        self.verify(batch, states, logits[:, : states.shape[1]], params)
        right = there & (batch.state.block == end).all(1)
        found = self.finished(batch)
        if begins:
            self.begin_next(batch, right, logits[:, -1], params)
        return found

    def block_end(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Guess how each block ends [B, L], and where one step may fill it [B] (`reach`)."""
        s, L = batch.state, self.block_size
        there = (s.left > 0) & (s.left <= self.reach) & (s.start + 2 * L <= s.end)
        return s.block.where(s.block != self.mask_id, s.best[..., 0]), there

    def begin_next(
        self, batch: Batch, rows: Tensor, logits: Tensor, params: SamplingParams
    ) -> None:
        """Take the next block's first step, and rank, where its first state was evaluated.

        `rows` [B] are those whose blocks ended as drafted; logits [B, L, V] are of the first state.
        """
        if not rows.any():
            return
        s = batch.state
        scores, confidence = self.judge(batch, logits, params)
        new = next_state(s.block, scores, confidence, self.mask_id, self.rule)
        # A cycle emits one block: a step that fills the next one waits for the next pass.
        rows = rows & (new == self.mask_id).any(1)
        s.block, s.step = new.where(rows[:, None], s.block), s.step + rows
        order, best, left = s.order, s.best, s.left
        self.rank(batch, logits, params)
        s.order = s.order.where(rows[:, None], order)
        s.best = s.best.where(rows[:, None, None], best)
        s.left = s.left.where(rows, left)

    def draft_states(self, batch: Batch, params: SamplingParams) -> Tensor:
        """Make the draft states [B, D', L], of the nodes that fit at least one sequence.

        A node fits if its positions are masked and it leaves a mask (a full block needs no pass).
        Where it does not fit, a sequence has its current state.
        """
        i, j, there = self.formulas
        block, left, L = batch.state.block, batch.state.left[:, None], self.block_size
        row = torch.arange(len(block), device=block.device)[:, None, None]
        at = batch.state.order[:, i]  # [B, D, tokens of the largest formula]
        fits = ((i * there).amax(1) < left) & (there.sum(1) < left)  # [B, D]
        # Padding of a formula is written to a spare column after the block.
        spare = pad(block[:, None].expand(-1, len(i), -1), (0, 1))
        drafted = spare.scatter(
            2, at.where(there & fits[..., None], L), batch.state.best[row, at, j]
        )
        return drafted[:, fits.any(0), :L]

    def verify(self, batch: Batch, states: Tensor, logits: Tensor, params: SamplingParams) -> None:
        """Take steps while the next state is among the drafts, `states` [B, M, L] (Algorithm 1)."""
        row = torch.arange(len(states), device=states.device)
        at, going = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)
        while going.any():
            block = batch.state.block
            scores, confidence = self.judge(batch, logits[row, at], params)
            new = next_state(block, scores, confidence, self.mask_id, self.rule)
            batch.state.block = block = new.where(going[:, None], block)
            batch.state.step = batch.state.step + going
            same = (states == block[:, None]).all(-1)
            going = going & same.any(1) & (block == self.mask_id).any(1)
            at = torch.where(going, same.int().argmax(1), at)
        self.rank(batch, logits[row, at], params)

    def rank(self, batch: Batch, logits: Tensor, params: SamplingParams) -> None:
        """Rank positions and tokens for the next drafts (Eq. 10-13).

        The next steps are simulated on logits [B, L, V] of the last evaluated state, each with its
        own noise. Without noise one step gives the whole ranking, the paper's order by confidence.
        """
        state, L = batch.state.block, self.block_size
        left = (state == self.mask_id).sum(1)
        when, sure = torch.full_like(state, L), logits.new_zeros(state.shape, dtype=torch.float64)
        best = state[..., None].expand(-1, -1, self.width)
        for step in range(self.simulated if self.rule.noisy(params) else 1):
            scores, confidence = self.judge(batch, logits, params, step)
            new = next_state(state, scores, confidence, self.mask_id, self.rule)
            decided, masked = new != state, state == self.mask_id
            when = when.masked_fill(decided, step)
            sure = sure.where(~masked, confidence.to(sure.dtype))
            best = best.where(~masked[..., None], scores.topk(self.width).indices)
            state = new
        # By the step at which a position was decided, and then by confidence.
        order = position_order(sure, batch.state.block == self.mask_id)
        order = order.gather(1, when.gather(1, order).argsort(dim=1, stable=True))
        batch.state.order, batch.state.best, batch.state.left = order, best, left


def formulas(graph: DraftGraph, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a graph's position ranks and vocabulary ranks, from 0, and which are no padding.

    Each is [D, longest formula].

    >>> graph = graph_of(4, 1, [[(1, 1)], [(1, 1), (2, 3)]])
    >>> [x.tolist() for x in formulas(graph, torch.device("cpu"))]
    [[[0, 0], [0, 1]], [[0, 0], [0, 2]], [[True, False], [True, True]]]
    """
    longest = max(map(len, graph.nodes), default=1)
    padded = [[*node, *[(0, 0)] * (longest - len(node))] for node in graph.nodes]
    pairs = torch.tensor(padded, dtype=torch.long, device=device).view(-1, longest, 2)
    return (*(pairs - 1).clamp_min(0).unbind(-1), pairs[..., 0] > 0)


def graph_for(source: str | dict, options: dict) -> DraftGraph:
    """Return the graph of a file or of its JSON, or for 'chain:N' a chain of N drafts."""
    if not isinstance(source, str) or not source.startswith("chain:"):
        return read_graph(source)
    if not (length := source.removeprefix("chain:")).isdecimal():
        raise ValueError(f"graph={source!r} is no chain of drafts: give their number, chain:4")
    S = None if options.get("threshold") else options.get("tokens_per_step", 1)
    return chain_graph(options["block_size"], S, int(length))


class SpiffyMethod(DenoiseMethod):
    """A method with the drafts of a graph."""

    def arguments(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, entry: dict
    ) -> dict[str, Any]:
        options = super().arguments(target, tokenizer, entry)
        if "graph" not in entry:
            raise ValueError(
                "this model has no draft graph: calibrate one with python -m trainers.fit "
                "recipe=spiffy_calibrate model=<it>, or give a file or a chain of drafts, "
                "sampler=[method=spiffy,graph=chain:4]"
            )
        return {**options, "graph": graph_for(entry["graph"], options)}


METHOD = SpiffyMethod(SpiffySampler, keys={"graph": dict | Text})

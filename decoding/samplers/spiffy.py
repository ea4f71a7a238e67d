"""Spiffy: masked diffusion decoding that guesses the states to come and checks them in one pass.

Source: Spiffy, arXiv 2509.18085, section 4 and Algorithm 1. A pass evaluates the present state of a
block and D guessed later ones. The present state's logits decide the next state as always; if it
was guessed, its logits are there already, and decide the one after it. The text is that of
`denoise`, token for token, whatever the guesses: they only say which states are evaluated early.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Rows
from decoding.masked.block_evaluators import AppendedBlocks, CachedBlocks, WholeTexts
from decoding.masked.draft_graph import DraftGraph, read_graph
from decoding.masked.unmasking import next_state, position_order
from decoding.samplers import denoise
from decoding.samplers.denoise import DenoiseSampler
from models.blockwise import is_foreign

KNOBS = {**denoise.KNOBS, "graph": str, "pass": str}

PASSES = ("appended", "batched")
AHEAD = 8  # steps, at most, that are taken ahead to rank by their noise


class SpiffySampler(DenoiseSampler):
    """graph: the draft graph. pass_: 'appended' or 'batched'; None takes the exact one.

    appended: guesses stand behind the text in one row, each seeing the text and itself; exact where
    no other block depends on this one (block-causal attention), and cached. batched: each guess is
    a text of its own. On a bidirectional model 'appended' is lossy.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        graph: DraftGraph,
        pass_: str | None = None,
        **options,
    ):
        super().__init__(target, tokenizer, **options)
        if pass_ not in (None, *PASSES):
            raise ValueError(f"unknown pass {pass_!r}. Choose from {list(PASSES)}")
        self.appended = pass_ == "appended" or (pass_ is None and self.causal)
        if self.appended and is_foreign(target):
            raise ValueError(
                "pass=appended needs masks, which a model of remote code does not take"
            )
        if self.appended and self.guidance:
            raise ValueError("guidance needs pass=batched: the text without its prompt is another")
        self.graph = graph.for_blocks(self.block_size)
        self.reach = max((i for node in graph.nodes for i, _ in node), default=1)
        self.width = max((j for node in graph.nodes for _, j in node), default=1)
        if self.width >= self.vocabulary:
            raise ValueError(
                f"the draft graph asks for token number {self.width} of a place, but the model has "
                f"{self.vocabulary - 1} beside its mask"
            )
        self.formulas = formulas(graph, self.target.device)

    def lossy(self, params: SamplingParams) -> str:
        """See `Sampler`. Other blocks of a bidirectional text have seen one state of this one."""
        exact = self.causal or not self.appended
        return "" if exact else "pass=appended with bidirectional attention"

    def network(self, rows: Rows) -> WholeTexts | CachedBlocks:
        """See `DenoiseSampler`."""
        if not self.appended:
            kind = WholeTexts
        elif not self.causal:
            kind = AppendedBlocks
        else:
            capacity = rows.tokens.shape[1] + len(self.graph.nodes) * self.block_size
            return CachedBlocks(self.target, self.block_size, capacity)
        return kind(self.target, self.attention, self.block_size, self.mask_id, self.guidance)

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """See `DenoiseSampler`; nothing is known yet to guess from."""
        super().begin(rows, params)
        block = rows.state["block"]
        rows.state |= {
            "order": torch.zeros_like(block),
            "best": block[..., None].expand(-1, -1, self.width),
            "left": torch.zeros_like(rows.lengths),
        }

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One pass over the present state and the drafts, and as many steps as they allow."""
        states = torch.cat([rows.state["block"][:, None], self.drafts(rows)], 1)
        logits = rows.networks["target"].ask(rows, states)
        self.verify(rows, states, logits, params)
        return self.finished(rows)

    def drafts(self, rows: Rows) -> Tensor:
        """The guessed states [B, D', L] of the formulas that fit; a row that one does not fit has
        its present state there. A full block is not worth a guess.
        """
        i, j, there = self.formulas
        block, left, L = rows.state["block"], rows.state["left"][:, None], self.block_size
        row = torch.arange(len(block), device=block.device)[:, None, None]
        at = rows.state["order"][:, i]  # [B, D, tokens of the largest formula]
        fits = ((i * there).amax(1) < left) & (there.sum(1) < left)  # [B, D]
        # What is not there is written behind the block.
        spare = pad(block[:, None].expand(-1, len(i), -1), (0, 1))
        drafted = spare.scatter(
            2, at.where(there & fits[..., None], L), rows.state["best"][row, at, j]
        )
        return drafted[:, fits.any(0), :L]

    def verify(self, rows: Rows, states: Tensor, logits: Tensor, params: SamplingParams) -> None:
        """Algorithm 1: steps from the present state on while the state that comes was evaluated.

        states [B, M, L], the present one first, and their logits [B, M, L, V].
        """
        row = torch.arange(len(states), device=states.device)
        at, going = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)
        while going.any():
            block = rows.state["block"]
            scores, confidence = self.judge(rows, logits[row, at], params)
            new = next_state(block, scores, confidence, self.mask_id, self.rule)
            rows.state["block"] = block = new.where(going[:, None], block)
            rows.state["step"] = rows.state["step"] + going
            same = (states == block[:, None]).all(-1)
            going = going & same.any(1) & (block == self.mask_id).any(1)
            at = torch.where(going, same.int().argmax(1), at)
        self.rank(rows, logits[row, at], params)

    def rank(self, rows: Rows, logits: Tensor, params: SamplingParams) -> None:
        """Order places and tokens for the next drafts (Eq. 10-13).

        logits [B, L, V]: of the last state that was evaluated, one step before the present one. The
        steps to come are taken on them as they are, each by its own noise. Without noise that is
        the paper's order by confidence, and one step tells it.
        """
        state, L = rows.state["block"], self.block_size
        left = (state == self.mask_id).sum(1)
        when, sure = torch.full_like(state, L), logits.new_zeros(state.shape, dtype=torch.float64)
        best = state[..., None].expand(-1, -1, self.width)
        for step in range(min(AHEAD, self.reach) if self.rule.noisy(params) else 1):
            scores, confidence = self.judge(rows, logits, params, step)
            new = next_state(state, scores, confidence, self.mask_id, self.rule)
            decided, masked = new != state, state == self.mask_id
            when = when.masked_fill(decided, step)
            sure = sure.where(~masked, confidence.to(sure.dtype))
            best = best.where(~masked[..., None], scores.topk(self.width).indices)
            state = new
        # By the step at which a place was decided, and then by confidence.
        order = position_order(sure, rows.state["block"] == self.mask_id)
        order = order.gather(1, when.gather(1, order).argsort(dim=1, stable=True))
        rows.state |= {"order": order, "best": best, "left": left}


def formulas(graph: DraftGraph, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Place ranks and token ranks from 0, and which entries there are: [D, longest formula] each.

    >>> graph = graph_of(4, 1, [[(1, 1)], [(1, 1), (2, 3)]])
    >>> [x.tolist() for x in formulas(graph, torch.device("cpu"))]
    [[[0, 0], [0, 1]], [[0, 0], [0, 2]], [[True, False], [True, True]]]
    """
    longest = max(map(len, graph.nodes), default=1)
    padded = [[*node, *[(0, 0)] * (longest - len(node))] for node in graph.nodes]
    pairs = torch.tensor(padded, dtype=torch.long, device=device).view(-1, longest, 2)
    return (*(pairs - 1).clamp_min(0).unbind(-1), pairs[..., 0] > 0)


def from_export(target, tokenizer, drafter, config: dict) -> SpiffySampler:
    """The sampler of an export that has a draft graph; config: its `parade` entry."""
    if "graph" not in config:
        raise ValueError(
            "this export has no draft graph: calibrate one with python -m trainers.fit "
            "recipe=spiffy_calibrate, or give a file, sampler=[method=spiffy,graph=...]"
        )
    return SpiffySampler(
        target,
        tokenizer,
        graph=read_graph(config["graph"]),
        pass_=config.get("pass"),
        **denoise.options(target, tokenizer, config),
    )

"""Calibration of draft graphs: traces of vanilla decoding, objectives, and their exact optimum.

Source: Spiffy, arXiv 2509.18085, Algorithm 2, appendices C and E. For each state of a block but the
first, a trace gives the *chain*: the formulas of the states that followed, in the ranks of that
state. From the traces of an answer the number of passes with any draft graph follows exactly,
without the model (`passes`).
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.masked.draft_graph import Formula, graph_of, may_follow, reach_of
from decoding.samplers.spiffy import SpiffySampler, SpiffyState

Chain = tuple[Formula, ...]
OBJECTIVES = ("degree0", "degree1", "total", "replay")
SECONDS = 300.0  # time limit of the solver, after which its optimum is not proved
ABSENT = -2  # in a trace: the step of a block that was not decoded


@dataclass
class TraceState(SpiffyState):
    """The ranking state, with the record that becomes a block's trace."""

    first: Tensor  # position where the first block begins, [B]
    decided: Tensor  # for how many steps each position has been masked, -1 if given, [B, L]
    ranked: Tensor  # rank of each position after each step, [B, L, L]
    choices: Tensor  # most probable tokens of each position after each step, [B, L, L, width]


class Tracer(SpiffySampler):
    """Vanilla decoding that records each state's ranks of the tokens that were decided after it.

    `width` tokens of each position are ranked; the other arguments are those of `SpiffySampler`.
    """

    def __init__(self, *args, width: int, **options):
        L = options["block_size"]
        graph = graph_of(L, None, [[(L, width)]])
        super().__init__(*args, graph=graph, next_block=False, **options)
        self.formulas = tuple(x[:0] for x in self.formulas)  # it ranks, but drafts nothing

    def trace(self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]) -> Tensor:
        """Decode prompts; return int16 traces [prompts, blocks, 1 + 2 L, L], padded with ABSENT."""
        L = self.block_size
        blocks = -(-params.most // L) + self.causal
        self.traces = torch.full((len(prompts), blocks, 1 + 2 * L, L), ABSENT, dtype=torch.int16)
        self.generate(prompts, params, seeds=seeds)
        return self.traces

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        super().begin(batch, params)
        block, (B, L) = batch.state.block, batch.state.block.shape
        batch.state = TraceState(
            **vars(batch.state),
            first=batch.state.start,
            decided=torch.where(block == self.mask_id, 0, -1),
            ranked=block.new_zeros(B, L, L),
            choices=block.new_zeros(B, L, L, self.width),
        )

    def finished(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Record this state's ranks, and the trace of each block that is full."""
        s, L = batch.state, self.block_size
        row = torch.arange(len(batch.requests), device=s.block.device)
        masked = s.block == self.mask_id
        # decided: for how many steps each position has been masked.
        s.decided = s.decided + (masked & (s.decided >= 0))
        full = ~masked.any(1)
        at = s.step.where(~full, 0)  # a full block has no drafts, nor has a new one
        s.ranked[row, at] = (s.order.argsort(-1) + 1) * masked
        s.choices[row, at] = s.best
        for b in full.nonzero().flatten().tolist():
            same = s.choices[b] == s.block[b, :, None]
            tokens = torch.where(same.any(-1), same.int().argmax(-1) + 1, 0)
            number = int(s.start[b] - s.first[b]) // L
            trace = torch.cat([s.decided[b, None], s.ranked[b], tokens])
            self.traces[batch.requests[b], number] = trace.to(torch.int16)
        s.decided = s.decided * ~full[:, None]
        return super().finished(batch)


def chains_of(trace: Tensor, lookahead: int) -> list[Chain]:
    """Return the chain, of at most `lookahead` formulas, of each of a block's states 1, 2, ...

    Row 0 of a trace [1 + 2 L, L] has for how many steps each position stayed masked (-1: given by
    the prompt). Then follow L rows of position ranks and L rows of vocabulary ranks, row s of each
    after s steps; rank 0 is a position decided before, or a token that was not ranked. A chain ends
    before the full block, which needs no pass.
    """
    L = trace.shape[1]
    decided, ranks, tokens = trace[0].tolist(), trace[1 : 1 + L].tolist(), trace[1 + L :].tolist()
    T = max(decided) + 1
    chains = []
    for s in range(1, T):
        chain, formula = [], []
        for step in range(s, min(T - 1, s + lookahead)):
            formula += [(ranks[s][n], tokens[s][n]) for n in range(L) if decided[n] == step]
            if any(j == 0 for _, j in formula):
                break
            chain.append(tuple(sorted(formula)))
        chains.append(tuple(chain))
    return chains


@dataclass(frozen=True)
class TracedBlock:
    """A block, as far as its drafts depend on it; entry s is of its state after s + 1 steps."""

    chains: list[Chain]  # as of `chains_of`
    left: list[int]  # masks of the state
    certain: list[bool]  # whether the most probable tokens of that state end the block as it ended
    followed: bool  # whether the answer has a next block


def blocks_of(traces: Tensor, lookahead: int) -> list[TracedBlock]:
    """Return an answer's blocks in their order, from traces [blocks, 1 + 2 L, L]."""
    decoded, L = [t for t in traces if int(t[0, 0]) != ABSENT], traces.shape[-1]
    blocks = []
    for n, trace in enumerate(decoded, 1):
        decided, tokens = trace[0], trace[1 + L :]
        chains = chains_of(trace, lookahead)
        later = [decided >= s for s in range(1, len(chains) + 1)]
        certain = [bool((tokens[s][m] == 1).all()) for s, m in enumerate(later, 1)]
        left = [int(m.sum()) for m in later]
        blocks.append(TracedBlock(chains, left, certain, followed=n < len(decoded)))
    return blocks


def passes(graph: Iterable[Formula], blocks: Iterable[TracedBlock], reach: float = 0) -> int:
    """Count the network passes that Spiffy takes over traced blocks of whole answers, exactly.

    An empty graph gives vanilla decoding. `reach` is `DraftGraph.reach` if the next block's first
    state is drafted, else 0.
    """
    nodes, count, known = {*graph}, 0, False
    for block in blocks:
        chains = block.chains
        s = 0  # the chain of the state after s + 1 steps; the first pass leads there
        # A step that fills the block at once is not taken before its own pass.
        count += not (known and chains)
        known = False
        while s < len(chains):
            at, s = s, s + 1 + accepted(nodes, chains[s])
            count += 1
            known = block.followed and block.certain[at] and block.left[at] <= reach
    return count


def accepted(nodes: set[Formula], chain: Chain) -> int:
    """Count the accepted drafts: states of the chain that are nodes, up to the first gap."""
    return next((n for n, formula in enumerate(chain) if formula not in nodes), len(chain))


@dataclass
class Candidates:
    """The formulas that a graph may contain (Algorithm 2, part 2)."""

    tokens_per_step: int | None  # S, or None with a threshold
    counts: dict[Formula, int]  # how often each formula occurred
    chains: Counter[Chain]  # each cut before its first formula outside of `counts`
    parents: dict[Formula, list[Formula]] = field(init=False)  # possible ones in `counts`

    def __post_init__(self):
        self.parents = {
            node: [p for p in self.counts if may_follow(p, node, self.tokens_per_step)]
            for node in self.counts
        }

    def begins(self, node: Formula) -> bool:
        """Return whether a single step leads from the current state to a node."""
        return may_follow((), node, self.tokens_per_step)


def candidates_of(blocks: list[TracedBlock], tokens_per_step: int | None, top: int) -> Candidates:
    """Return the `top` most frequent formulas of each level that the current state can reach."""
    levels: dict[int, Counter[Formula]] = {}
    whole = Counter(chain for block in blocks for chain in block.chains)
    for chain, n in whole.items():
        for level, formula in enumerate(chain):
            levels.setdefault(level, Counter())[formula] += n
    counts: Counter[Formula] = Counter()
    for _, found in sorted(levels.items()):
        # Ties are broken by the formula, so that every process takes the same candidates.
        for formula, n in sorted(found.items(), key=lambda item: (-item[1], item[0]))[:top]:
            below = [p for p in ((), *counts) if may_follow(p, formula, tokens_per_step)]
            if below:
                counts[formula] += n
    chains: Counter[Chain] = Counter()
    for chain, n in whole.items():
        chains[chain[: accepted({*counts}, chain)]] += n
    del chains[()]
    return Candidates(tokens_per_step, dict(counts), chains)


class Optimum(NamedTuple):
    """The best graph that the integer program found."""

    nodes: list[Formula]
    value: int  # its objective
    bound: float  # an upper bound of the objective of every graph

    @property
    def proved(self) -> bool:
        """Return whether it is proved that no graph is better. Values are integers."""
        return self.bound < self.value + 1 - 1e-6


def optimum(objective: str, size: int, candidates: Candidates) -> Optimum:
    """Find the best graph of at most `size` nodes, by mixed integer linear programming.

    Every node has a parent in the graph or follows the current state. The objectives are 'degree0',
    'degree1' and 'total' (Eq. 24 to 28), and 'replay': the accepted drafts, summed over every state
    of the traces.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}. Choose from {list(OBJECTIVES)}")
    program, count = Program(), candidates.counts
    taken = {q: program.variable(0, whole=True) for q in count}
    program.at_most(dict.fromkeys(taken.values(), 1.0), size)
    for q, parents in candidates.parents.items():
        if not candidates.begins(q):
            program.at_most({taken[q]: 1.0, **{taken[p]: -1.0 for p in parents}}, 0)
    if objective == "replay":
        _add_chains(program, taken, candidates.chains)
    elif objective == "total":
        _add_totals(program, taken, candidates)
    else:
        for q in count:
            program.gains[taken[q]] += count[q]
            for p in candidates.parents[q] if objective == "degree1" else ():
                program.product(count[p], taken[p], taken[q])
    x, bound = program.solve()
    value = round(sum(gain * found for gain, found in zip(program.gains, x)))
    return Optimum([q for q in count if x[taken[q]] > 0.5], value, bound)


def _add_chains(program: "Program", taken: dict[Formula, int], chains: Counter[Chain]) -> None:
    """Add the 'replay' objective: a prefix of a chain counts if the graph has all of its nodes."""
    prefixes: Counter[Chain] = Counter()
    for chain, n in chains.items():
        for end in range(1, len(chain) + 1):
            prefixes[chain[:end]] += n
    there: dict[Chain, int] = {}
    for prefix in sorted(prefixes, key=len):
        last = taken[prefix[-1]]
        if len(prefix) == 1:
            there[prefix] = last
            program.gains[last] += prefixes[prefix]
        else:
            there[prefix] = program.product(prefixes[prefix], there[prefix[:-1]], last)


def _add_totals(program: "Program", taken: dict[Formula, int], candidates: Candidates) -> None:
    """Add Eq. 27: t_q = x_q (count_q + sum of the parents' t); most[q] is its largest value."""
    most: dict[Formula, int] = {}
    totals: dict[Formula, int] = {}
    for q in sorted(candidates.counts, key=len):
        parents, n = candidates.parents[q], candidates.counts[q]
        most[q] = n + sum(most[p] for p in parents)
        totals[q] = program.variable(1, upper=most[q])
        program.at_most({totals[q]: 1.0, taken[q]: -float(most[q])}, 0)
        program.at_most({totals[q]: 1.0, **{totals[p]: -1.0 for p in parents}}, n)


class Program:
    """A mixed integer linear program: maximise a linear function of non-negative variables."""

    def __init__(self):
        self.gains, self.upper, self.whole = [], [], []
        self.rows: list[tuple[dict[int, float], float]] = []

    def variable(self, gain: float, upper: float = 1.0, whole: bool = False) -> int:
        """Add a variable in [0, upper] with a coefficient in the objective; return its index."""
        self.gains.append(gain)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.gains) - 1

    def at_most(self, terms: dict[int, float], limit: float) -> None:
        """Add a constraint: the sum of coefficient times variable is at most the limit."""
        self.rows.append((terms, limit))

    def product(self, gain: float, x: int, y: int) -> int:
        """Add a variable that is the product of binary x and y, for a gain of at least 0."""
        both = self.variable(gain)
        self.at_most({both: 1.0, x: -1.0}, 0)
        self.at_most({both: 1.0, y: -1.0}, 0)
        return both

    def solve(self) -> tuple[list[float], float]:
        """Return the best values found, and an upper bound of the objective."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        if not self.gains:
            return [], 0.0
        entries = [(r, c, v) for r, (terms, _) in enumerate(self.rows) for c, v in terms.items()]
        r, c, v = zip(*entries)
        matrix = coo_array((v, (r, c)), shape=(len(self.rows), len(self.gains))).tocsr()
        found = milp(
            -np.array(self.gains, dtype=float),
            integrality=np.array(self.whole, dtype=int),
            bounds=Bounds(0, np.array(self.upper, dtype=float)),
            constraints=LinearConstraint(matrix, ub=[limit for _, limit in self.rows]),
            options={"mip_rel_gap": 0.0, "time_limit": SECONDS},
        )
        if found.x is None:  # no solution within the time limit: the empty graph is always allowed
            return [0.0] * len(self.gains), sum(g * u for g, u in zip(self.gains, self.upper))
        return found.x.tolist(), -found.mip_dual_bound


def fewest_passes(
    starts: Iterable[Iterable[Formula]],
    size: int,
    candidates: Candidates,
    blocks: list[TracedBlock],
    next_block: bool = False,
) -> list[Formula]:
    """Find the graph of at most `size` nodes with the fewest passes, by local search.

    From the best of the graphs `starts` it adds or exchanges one node at a time while that lowers
    `passes`, up to a local optimum. That differs from the optimum of 'replay', because what one
    pass accepts determines where the next begins. The blocks are those of whole answers;
    `next_block` says if the first state of the next block is drafted too.
    """
    # Numbers instead of formulas, which are slow to hash.
    number = {q: n for n, q in enumerate(candidates.counts)}
    known = {*number}

    def cut(chain: Chain) -> Any:  # whose numbers are compared faster than its formulas
        return tuple(number[q] for q in chain[: accepted(known, chain)])

    numbered = [replace(b, chains=[cut(chain) for chain in b.chains]) for b in blocks]

    def cost(nodes: Collection[Formula]) -> int:
        reach = reach_of(nodes, candidates.tokens_per_step) if next_block else 0
        drawn: Any = [number[q] for q in nodes]
        return passes(drawn, numbered, reach)

    best = min((sorted({*nodes}) for nodes in starts), key=cost)
    fewest = cost(best)
    better = True
    while better:
        better = False
        for new in candidates.counts:
            if new in best:
                continue
            for old in [*best] if len(best) >= size else [None]:
                nodes = sorted({*best, new} - {old})
                if closed(nodes, candidates) and (n := cost(nodes)) < fewest:
                    best, fewest, better = nodes, n, True
                    break
    return best


def closed(nodes: list[Formula], candidates: Candidates) -> bool:
    """Return whether each node has a parent among the nodes, or follows the current state."""
    return all(
        candidates.begins(q) or any(p in nodes for p in candidates.parents[q]) for q in nodes
    )

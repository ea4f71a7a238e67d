"""What draft graph to take: traces of vanilla decoding, objectives on them, and their optimum.

Source: Spiffy, arXiv 2509.18085, Algorithm 2, appendices C and E. A trace of a block is, for each
state on its way but the first, the *chain* of formulas of the states that followed, as that state
would have had to guess them. A graph's walk over a trace is therefore known exactly, without the
model: `passes`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Rows
from decoding.masked.draft_graph import Formula, graph_of, may_follow
from decoding.samplers.spiffy import SpiffySampler

Chain = tuple[Formula, ...]
OBJECTIVES = ("degree0", "degree1", "total", "replay")
SECONDS = 300.0  # that a solver may take; it says then that its optimum is not proved
ABSENT = -2  # as the step of a block that was not decoded


class Tracer(SpiffySampler):
    """Vanilla decoding that notes how each state ranked what came after it.

    width: how many tokens of a place are ranked.
    """

    def __init__(self, *args, width: int, **options):
        L = options["block_size"]
        super().__init__(*args, graph=graph_of(L, None, [[(L, width)]]), **options)
        self.formulas = tuple(x[:0] for x in self.formulas)  # it ranks, but guesses nothing

    def trace(self, prompts: list[list[int]], params: SamplingParams, seeds: list[int]) -> Tensor:
        """[rows, blocks, 1 + 2 L, L], int16: see `chains_of`; `ABSENT` behind an answer's end."""
        L = self.block_size
        blocks = -(-params.max_new_tokens // L) + self.causal
        self.traces = torch.full((len(prompts), blocks, 1 + 2 * L, L), ABSENT, dtype=torch.int16)
        self.generate(prompts, params, seeds=seeds)
        return self.traces

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """See `DenoiseSampler`."""
        super().begin(rows, params)
        block, (B, L) = rows.state["block"], rows.state["block"].shape
        rows.state |= {
            "first": rows.state["start"],
            "decided": torch.where(block == self.mask_id, 0, -1),
            "ranked": block.new_zeros(B, L, L),
            "choices": block.new_zeros(B, L, L, self.width),
        }

    def finished(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Note this state's ranks, and the trace of each block that is full."""
        s, L = rows.state, self.block_size
        row = torch.arange(len(rows.row), device=s["block"].device)
        masked = s["block"] == self.mask_id
        # decided: so many steps a place has been masked for.
        s["decided"] = s["decided"] + (masked & (s["decided"] >= 0))
        full = ~masked.any(1)
        at = s["step"].where(~full, 0)  # a full block has no guesses, nor has one not begun
        s["ranked"][row, at] = (s["order"].argsort(-1) + 1) * masked
        s["choices"][row, at] = s["best"]
        for b in full.nonzero().flatten().tolist():
            same = s["choices"][b] == s["block"][b, :, None]
            tokens = torch.where(same.any(-1), same.int().argmax(-1) + 1, 0)
            number = int(s["start"][b] - s["first"][b]) // L
            trace = torch.cat([s["decided"][b, None], s["ranked"][b], tokens])
            self.traces[rows.row[b], number] = trace.to(torch.int16)
        s["decided"] = s["decided"] * ~full[:, None]
        return super().finished(rows)


def chains_of(trace: Tensor, lookahead: int) -> list[Chain]:
    """The chains of a block's states 1, 2, ... from its trace [1 + 2 L, L].

    Row 0: how many steps each place stayed masked (-1: given). Then L rows of place ranks and L of
    token ranks, row s after s steps; rank 0: decided already, or not among the ranked. A chain ends
    before the full block, which is not worth a guess, and after `lookahead` states.
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


def passes(graph: Iterable[Formula], blocks: list[list[Chain]]) -> int:
    """Network passes of Spiffy with these nodes over traced blocks: exact, by walking them.

    Without nodes: those of vanilla decoding.
    """
    nodes, count = {*graph}, 0
    for chains in blocks:
        s = 0  # the chain of the state after s + 1 steps; the first pass leads there
        count += 1
        while s < len(chains):
            s += 1 + accepted(nodes, chains[s])
            count += 1
    return count


def accepted(nodes: set[Formula], chain: Chain) -> int:
    """How many of the states that followed are guessed, without a gap."""
    return next((n for n, formula in enumerate(chain) if formula not in nodes), len(chain))


@dataclass
class Candidates:
    """The formulas that a graph may have (Algorithm 2, part 2), as {formula: its count}.

    The `top` most frequent of each level that can be reached from the present state; chains: how
    often each chain occurred, cut where it leaves them.
    """

    tokens_per_step: int | None
    counts: dict[Formula, int]
    chains: Counter[Chain]
    parents: dict[Formula, list[Formula]] = field(init=False)

    def __post_init__(self):
        self.parents = {
            node: [p for p in self.counts if may_follow(p, node, self.tokens_per_step)]
            for node in self.counts
        }

    def begins(self, node: Formula) -> bool:
        """Whether a single step leads from the present state to a node."""
        return may_follow((), node, self.tokens_per_step)


def candidates_of(blocks: list[list[Chain]], tokens_per_step: int | None, top: int) -> Candidates:
    """See `Candidates`."""
    levels: dict[int, Counter[Formula]] = {}
    whole = Counter(chain for chains in blocks for chain in chains)
    for chain, n in whole.items():
        for level, formula in enumerate(chain):
            levels.setdefault(level, Counter())[formula] += n
    counts: Counter[Formula] = Counter()
    for _, found in sorted(levels.items()):
        # Equal counts are put in order, so that every process takes the same.
        for formula, n in sorted(found.items(), key=lambda item: (-item[1], item[0]))[:top]:
            below = [p for p in ((), *counts) if may_follow(p, formula, tokens_per_step)]
            if below:
                counts[formula] += n
    chains: Counter[Chain] = Counter()
    for chain, n in whole.items():
        chains[chain[: accepted({*counts}, chain)]] += n
    del chains[()]
    return Candidates(tokens_per_step, dict(counts), chains)


def value(objective: str, nodes: Iterable[Formula], candidates: Candidates) -> int:
    """What an objective says of a graph's nodes: Eq. 24 to 28, or the drafts accepted from every
    state of the traces together ('replay').
    """
    chosen = sorted({*nodes}, key=len)
    count, inside = candidates.counts, {*chosen}
    if objective == "replay":
        return sum(n * accepted(inside, chain) for chain, n in candidates.chains.items())
    total: dict[Formula, int] = {}
    for q in chosen:
        parents = [p for p in candidates.parents[q] if p in inside]
        of_parents = {"degree0": {}, "degree1": count, "total": total}[objective]
        total[q] = count[q] + sum(of_parents.get(p, 0) for p in parents)
    return sum(total.values())


@dataclass
class Optimum:
    """Nodes, their value, and the bound that no graph exceeds: equal when the optimum is proved."""

    nodes: list[Formula]
    value: int
    bound: float

    @property
    def proved(self) -> bool:
        """Whether nothing can be better. Values are whole numbers."""
        return self.bound < self.value + 1 - 1e-6


def optimum(objective: str, size: int, candidates: Candidates) -> Optimum:
    """The best graph of at most `size` nodes, each with a parent, by mixed integer programming."""
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
    nodes = [q for q in count if x[taken[q]] > 0.5]
    return Optimum(nodes, value(objective, nodes, candidates), bound)


def _add_chains(program: "Program", taken: dict[Formula, int], chains: Counter[Chain]) -> None:
    """Each beginning of a chain counts where all of its formulas are taken."""
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
    """Eq. 27, t_q = x_q (count_q + sum of the parents' t); most[q] is t_q if all are taken."""
    most: dict[Formula, int] = {}
    totals: dict[Formula, int] = {}
    for q in sorted(candidates.counts, key=len):
        parents, n = candidates.parents[q], candidates.counts[q]
        most[q] = n + sum(most[p] for p in parents)
        totals[q] = program.variable(1, upper=most[q])
        program.at_most({totals[q]: 1.0, taken[q]: -float(most[q])}, 0)
        program.at_most({totals[q]: 1.0, **{totals[p]: -1.0 for p in parents}}, n)


class Program:
    """A linear function to be made as large as can be, of whole and other numbers from 0 on."""

    def __init__(self):
        self.gains, self.upper, self.whole = [], [], []
        self.rows: list[tuple[dict[int, float], float]] = []

    def variable(self, gain: float, upper: float = 1.0, whole: bool = False) -> int:
        """A new variable's number."""
        self.gains.append(gain)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.gains) - 1

    def at_most(self, terms: dict[int, float], limit: float) -> None:
        """The sum of coefficient times variable does not exceed the limit."""
        self.rows.append((terms, limit))

    def product(self, gain: float, x: int, y: int) -> int:
        """A variable that is x y for x and y of 0 and 1, as far as its gain draws it up."""
        both = self.variable(gain)
        self.at_most({both: 1.0, x: -1.0}, 0)
        self.at_most({both: 1.0, y: -1.0}, 0)
        return both

    def solve(self) -> tuple[list[float], float]:
        """The best values, and a bound on what the function can reach."""
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
        if found.x is None:  # no time: nothing taken is always allowed
            return [0.0] * len(self.gains), sum(g * u for g, u in zip(self.gains, self.upper))
        return found.x.tolist(), -found.mip_dual_bound


def fewest_passes(
    starts: Iterable[Iterable[Formula]],
    size: int,
    candidates: Candidates,
    blocks: list[list[Chain]],
) -> list[Formula]:
    """The best of some graphs by `passes`, then exchanged node for node while that makes fewer.

    What a pass accepts decides where the next one begins, so the fewest passes need not be where
    'replay' is greatest. A local optimum: no single exchange or addition helps.
    """
    # Numbers in the place of formulas, which take long to hash.
    number = {q: n for n, q in enumerate(candidates.counts)}
    known = {*number}
    cut = [
        [tuple(number[q] for q in chain[: accepted(known, chain)]) for chain in chains]
        for chains in blocks
    ]

    def cost(nodes: Iterable[Formula]) -> int:
        return passes([number[q] for q in nodes], cut)

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
    """Whether each node has a parent among them, or begins."""
    return all(
        candidates.begins(q) or any(p in nodes for p in candidates.parents[q]) for q in nodes
    )

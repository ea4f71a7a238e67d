"""`BlockSampler`: speculative decoding with a drafter that drafts a block in one pass.

A drafter's k distributions, independent given the prefix (`block_drafter`), give a chain (`chain`:
`rejection`, `block`, `coupled`) or rank a tree of drafts (`ranked_tree`: `tree`). With a Markov
head each is conditioned on the drafted token before it, with a drafter's tail on all of them.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Self

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting import bigrams as bigram_file
from decoding.drafting import markov as markov_file
from decoding.drafting.bigrams import Bigrams
from decoding.drafting.block_drafter import BlockDrafter, for_requests, nearest, numbered
from decoding.drafting.chain import Chain
from decoding.drafting.pace import Pace
from decoding.drafting.ranked_tree import RankedTree
from decoding.drafting.tree_limits import MAX_NODES
from decoding.engine import vocabulary
from decoding.engine.batch import Batch
from decoding.engine.params import VERIFY, SamplingParams
from decoding.method import Amount, Amounts, ByNumber, Count, FileName, Method
from models.markov import MarkovHead
from models.recurrent import is_recurrent

KEPT_TOKENS = 2**14  # tokens whose bigrams are kept as dictionaries
WAYS = ("plain", "chain", "tree")  # plain drafts nothing
KNOBS = (
    "nodes", "sharpness", "rank_noise", "bigrams", "lookup", "least", "least_gain", "fastest",
    "markov_head",
)  # fmt: skip


class BlockSampler(BlockDrafter):
    """Speculative decoding with chains or ranked trees of a block drafter's tokens.

    Args:
        target, tokenizer, draft_ids, markov: See `BlockDrafter`.
        block_size: k, tokens drafted a cycle unless a request asks for others.
        nodes: The most nodes of the tree of `verify=tree`: a number, or {requests decoded together:
            number}.
        sharpness, rank_noise: See `RankedTree`.
        lengths: See `Chain`.
        bigrams: Bigram scores of the target's answers (`decoding.drafting.bigrams`).
        bigram_weights: The weight of these scores at each depth, {temperature: [...]}.
        lookup: Whether trees use prompt lookup at temperature 0
            (`decoding.drafting.prompt_lookup`).
        least: The least probability of a tree's nodes, a number or one by requests as `nodes`, or
            {requests: {temperature: number}}.
        least_gain: For drafters with a tail: tokens that a further run of it is expected to bring,
            at the least (`grow_trees`), a number or one by requests as `nodes`.
        fewest: For them too: the first nodes of a tree, which need no least probability; given as
            `least` is.
        fastest: What is fastest, of WAYS: in general or by {requests: {temperature: way}}. It is
            what a request gets that asks for no `block_size` and no `verify=tree`, where that does
            not change its text: a chain in place of a tree where the noise is not keyed.

    Attributes:
        chain, tree: How drafts are made and verified: `tree` for `verify=tree`, `chain` otherwise.
        pace: Where there is one, it chooses between drafts and none as it measures them, wherever
            that changes no text.
    """

    pace: Pace | None = None
    fits_machine = True  # whether measuring says what pays here: `decoding.calibrate`, `pace`

    rules: tuple[str, ...] = VERIFY
    chains = True
    reads_prefixes = True

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: Count,
        nodes: Count | ByNumber[Count] = 16,
        sharpness: Amount | ByNumber[Amounts] = 1.5,
        rank_noise: bool = True,
        lengths: ByNumber[ByNumber[Count]] | None = None,
        bigrams: Bigrams | None = None,
        bigram_weights: ByNumber[list[float]] | None = None,
        lookup: bool = True,
        least: Amount | ByNumber[Amount | ByNumber[Amount]] = 0.0,
        least_gain: Amount | ByNumber[Amount] = 0.0,
        fewest: Count | ByNumber[Count | ByNumber[Count]] = 1,
        fastest: Literal[*WAYS] | ByNumber[ByNumber[Literal[*WAYS]]] = "chain",
        draft_ids: Tensor | None = None,
        markov: MarkovHead | None = None,
    ):
        super().__init__(target, tokenizer, draft_ids, markov)
        if is_recurrent(target.config):
            self.rules = tuple(rule for rule in self.rules if rule != "tree")
        self.block_size, self.bigrams = block_size, bigrams
        after = None if bigrams is None else lru_cache(KEPT_TOKENS)(bigrams.after)
        self.chain = Chain(block_size, lengths)
        self.fastest = numbered(fastest if isinstance(fastest, dict) else {1: {0: fastest}})
        self.tree = RankedTree(
            _by_requests(nodes),
            sharpness,
            rank_noise,
            lookup,
            after,
            bigram_weights,
            _by_requests(least),
            _by_requests(least_gain),
            _by_requests(fewest),
            self.device,
        )

    def check_params(self, params: SamplingParams) -> None:
        if params.verify == "tree" and "tree" not in self.rules:
            raise ValueError(
                f"verify=tree is not allowed: this {self.target.config.model_type!r} model has "
                "layers with a recurrent state, which take chains only: give verify="
                f"{' or '.join(self.rules)}"
            )
        super().check_params(params)

    def way(self, requests: int, params: SamplingParams) -> str:
        """Return how so many unfinished requests are decoded, one of WAYS."""
        if params.verify == "tree" or params.block_size is not None:
            return "tree" if params.verify == "tree" else "chain"
        # Only where the noise is keyed is the text the same with other neighbours (`Chain.length`).
        known = for_requests(self.fastest, requests if params.keyed else 1)
        way = nearest(known, params.temperature)
        trees = params.keyed and "tree" in self.rules
        return "chain" if way == "tree" and not trees else way

    def always_drafting(self) -> Self:
        """Return a copy that drafts chains, or trees for `verify=tree`, even where that is slow."""
        new = copy(self)
        new.fastest = {1: {0.0: "chain"}}
        return new

    def drafting(self, params: SamplingParams) -> Chain | RankedTree:
        """Return what a batch begins with: a tree, if any number of requests has one."""
        ways = {self.way(requests, params) for requests in self.fastest}
        return self.tree if "tree" in ways else self.chain

    def margin(self, params: SamplingParams) -> int:
        """Count what a cycle drafts beyond the end, and a slot each for separator and scratch."""
        k = params.block_size or self.block_size
        drafting = self.drafting(params)
        grown = MAX_NODES if self.tail and drafting is self.tree else 0
        return max(k, drafting.most(params), grown) + 3

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        """Prefill both networks."""
        drafting = self.drafting(params)
        target = self.cached_target(batch, drafting.predicate)
        self.begin_drafting(batch, self.prefill(batch, "target", target))
        drafting.begin(self, batch, params)

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Draft, verify in one target pass, and emit the accepted tokens and one more."""
        requests = len(batch.requests)
        way = self.way(requests, params)
        if self.pace is None or not params.keyed or params.block_size is not None:
            return self.taken(way, batch, params)
        drafting = "tree" if self.drafting(params) is self.tree else "chain"
        ways = "plain", drafting if way == "plain" else way
        course = self.pace.course(requests, (params.temperature,), ways, way)
        started, way = perf_counter(), course.way
        tokens, counts = self.taken(way, batch, params)
        course.add(way, int(counts.sum()), perf_counter() - started)
        return tokens, counts

    def taken(self, way: str, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Run a cycle in one of WAYS."""
        if way == "plain":
            return self.undrafted(batch, params)
        return (self.tree if way == "tree" else self.chain).cycle(self, batch, params)

    def told(self, params: SamplingParams) -> str:
        if self.way(1, params) != "plain":
            return ""
        return (
            f"T={params.temperature:g}: decoded without drafts, as that was faster than with them "
            "when decoding.calibrate measured it; sampler=[fastest=chain] drafts"
        )


def _by_requests(knob: Any) -> dict[int, Any]:
    """Return a knob by how many requests are decoded together; a number is for one.

    Where it is by temperature too, these are numbers, as they are text in JSON.
    """
    if not isinstance(knob, dict):
        return {1: knob}
    return {
        int(n): {float(t): y for t, y in x.items()} if isinstance(x, dict) else x
        for n, x in knob.items()
    }


@dataclass(frozen=True, eq=False)
class BlockMethod(Method):
    """A method whose drafter drafts a block in one pass, for a `BlockSampler`."""

    keys: Mapping[str, Any] = field(
        default_factory=lambda: {
            vocabulary.KEY: FileName,
            "markov_head": bool,
            "bigrams": bool | ByNumber[Amounts],
        }
    )
    knobs: tuple[str, ...] | None = KNOBS
    needed: tuple[str, ...] = ("target", "tokenizer_fingerprint", "mask_id", "block_size")
    files: tuple[str, ...] = (bigram_file.FILE, markov_file.FILE, vocabulary.FILE)

    def read_files(self, fetch: Callable[[str], Path], entry: dict) -> dict[str, Any]:
        found = {}
        if entry.get(vocabulary.KEY):
            found["draft_ids"] = vocabulary.read(fetch(entry[vocabulary.KEY]))
        if entry.get("markov_head") and markov_file.FILE in self.files:
            found["markov"] = markov_file.read(fetch(markov_file.FILE))
        if entry.get("bigrams"):
            if not isinstance(entry["bigrams"], dict):
                raise ValueError(
                    "bigrams=true is not allowed: an export that has bigrams uses them. To make "
                    "them: python -m decoding.calibrate model=<the export> answers=..."
                )
            found["bigrams"] = bigram_file.read(fetch(bigram_file.FILE))
            found["bigram_weights"] = entry["bigrams"]
        return found

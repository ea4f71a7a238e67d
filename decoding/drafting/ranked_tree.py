"""Ranked trees: drafts that the target verifies with its keyed noise, in one pass.

The text is that of `coupled`, plain decoding's, for any ranking. So the ranking may use the noise:
the target chooses a token with probability of about softmax(log q + g).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.drafting.block_drafter import BlockDrafter, for_requests, nearest, setting
from decoding.drafting.prompt_lookup import Lookup
from decoding.drafting.tree import (
    Accepted,
    BigramScores,
    Trees,
    draft_trees,
    grow_trees,
    trees_of,
    verify_trees,
)
from decoding.drafting.tree_limits import MAX_NODES, check_tree
from decoding.engine.batch import Batch, State
from decoding.engine.cache import TargetOutput
from decoding.engine.params import SamplingParams
from decoding.method import ByNumber
from models import masks

L = TypeVar("L", bound=Lookup)
UNFILTERED: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class Lookups(State):
    """The prompt lookup of each request; None where trees do not use it."""

    lookups: list[Lookup] | None = None


class RankedTree:
    """Drafts and verifies a tree that is ranked best first.

    Args:
        nodes: Nodes of a tree, by how many requests are decoded together.
        sharpness: Inverse temperature of the drafter in the ranking (`draft_trees`): a number, or
            {temperature: one for each depth}, of which the nearest temperature is taken.
        rank_noise: Whether the target's keyed noise ranks too; False is for comparison.
        lookup: Whether prompt lookup ranks too (with noise: `BlockDrafter.lookup_with_noise`).
        after: Maps a token to its bigram scores (`decoding.drafting.bigrams`), if there are any.
        bigram_weights: The weight of these scores at each depth, {temperature: [...]}.
        least, least_gain: The least probability of a node (`draft_trees`), and what a run of a
            drafter's tail must be expected to bring (`grow_trees`), by how many requests are
            decoded together; `least` by their temperature too, if it depends on it.
        fewest: Nodes of such a drafter's trees that need no least probability, as `least`.
    """

    predicate = staticmethod(masks.tree)

    def __init__(
        self,
        nodes: dict[int, int],
        sharpness: float | ByNumber[list[float]],
        rank_noise: bool,
        lookup: bool,
        after: Callable[[int], Mapping[int, float]] | None,
        bigram_weights: ByNumber[list[float]] | None,
        least: dict[int, float | dict[float, float]],
        least_gain: dict[int, float],
        fewest: dict[int, int | dict[float, int]],
        device: torch.device,
    ):
        for number in nodes.values():
            check_tree(number, sharpness)
        self.nodes, self.rank_noise, self.lookup = nodes, rank_noise, lookup
        self.least, self.least_gain, self.fewest = least, least_gain, fewest
        if isinstance(sharpness, dict):
            by_depth = _by_depth(sharpness)
            self.sharpness = {t: torch.tensor(s, device=device) for t, s in by_depth.items()}
        else:
            self.sharpness = {0.0: sharpness}
        self.scores = {}
        if after is not None:
            weights = _by_depth(bigram_weights or {})
            self.scores = {t: BigramScores(after, weight) for t, weight in weights.items()}

    def most(self, params: SamplingParams) -> int:
        """Return the most tokens that a cycle drafts."""
        return max(self.nodes.values())

    def begin(self, sampler: BlockDrafter, batch: Batch, params: SamplingParams) -> None:
        """Make a batch's prompt lookups, at temperature 0 or if they pay with noise too."""
        batch.drafts = Lookups()
        if self.lookup and (params.temperature == 0 or sampler.lookup_with_noise):
            batch.drafts.lookups = lookups_of(batch, sampler.lookup_of)

    def cycle(
        self, sampler: BlockDrafter, batch: Batch, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Draft a tree, verify it in one pass, emit the accepted path and one token more."""
        k = params.block_size or sampler.block_size
        noise = sampler.noise(batch, k + 1, params)
        catch_up(batch.drafts.lookups, batch)
        if (children := sampler.children(batch, noise)) is not None:
            nodes, _, _, _, least = self._settings(batch, params)
            trees = trees_of(children, nodes, least, sampler.device, 0, _ragged(batch))
            if not trees.token.shape[1]:
                return sampler.undrafted(batch, params)
        elif sampler.tail:
            trees = self.grown(sampler, batch, k, noise, params)
        else:
            # Only with the head's terms is it known what top_p and the others exclude.
            ranked = params if sampler.markov is None else replace(params, **UNFILTERED)
            logits = sampler.draft_pass(batch, k, ranked)
            trees = self.ranked(sampler, batch, logits, noise, params)
        output = tree_pass(sampler, batch, trees, params)
        return accept(sampler, batch, output, verify_trees(trees, output.logits, noise))

    def ranked(
        self,
        sampler: BlockDrafter,
        batch: Batch,
        logits: Tensor,
        noise: Tensor | None,
        params: SamplingParams,
    ) -> Trees:
        """Return the best trees under warped drafter logits [B, k, V] and the other scores."""
        if noise is not None and self.rank_noise:
            logits = logits + noise[:, : logits.shape[1]]
        if any(batch.constraints):  # the first tokens' candidates are such that may follow
            first = sampler.constrained(logits[:, :1], batch, batch.tokens[:, :0])
            logits = torch.cat([first, logits[:, 1:]], 1)
        nodes, sharpness, bigrams, lookups, least = self._settings(batch, params)
        pairs, ids = None, sampler.draft_ids
        if sampler.markov is not None:
            pairs, ids = sampler.markov.pairs(params.temperature), sampler.markov.ids
        if ids is not None:  # no other token has a chance, and a target may have ten times as many
            logits = logits[..., ids]
        given = nodes, sharpness, bigrams, lookups, pairs, ids, least
        return draft_trees(logits, *given, sampler.constraints(batch), _ragged(batch))

    def grown(
        self,
        sampler: BlockDrafter,
        batch: Batch,
        k: int,
        noise: Tensor | None,
        params: SamplingParams,
    ) -> Trees:
        """Return the best trees under a drafter's tail, which is run for each depth."""
        ids = sampler.draft_ids
        penalties = params.presence_penalty or params.frequency_penalty or params.logit_bias
        by_token = penalties or params.repetition_penalty != 1

        def expand(depth: int, tokens: Tensor | None, parent: Tensor | None) -> Tensor:
            drafted = () if tokens is None else (tokens, torch.full_like(tokens, depth), parent)
            logits = sampler.own_logits(batch, k, *drafted)
            if ids is not None and by_token:
                whole = sampler.fitted(logits, [])
                return sampler.warped_draft(whole, batch, params)[..., ids]
            return sampler.warped_draft(logits, batch, params)

        nodes, sharpness, bigrams, lookups, least = self._settings(batch, params)
        number = len(batch.requests)
        fewest = setting(self.fewest, number, params.temperature)
        limits = for_requests(self.least_gain, number), fewest
        given = nodes, sharpness, bigrams, lookups, ids, least, *limits
        others = sampler.constraints(batch), _ragged(batch), noise if self.rank_noise else None
        return grow_trees(expand, min(k, nodes), *given, *others)

    def _settings(self, batch: Batch, params: SamplingParams) -> tuple:
        """Return nodes, sharpness, bigram scores, lookups, least probability of a batch's trees."""
        sharpness = nearest(self.sharpness, params.temperature)
        bigrams = nearest(self.scores, params.temperature) if self.scores else None
        nodes = for_requests(self.nodes, len(batch.requests))
        least = setting(self.least, len(batch.requests), params.temperature)
        return nodes, sharpness, bigrams, batch.drafts.lookups, least


def tree_pass(
    sampler: BlockDrafter, batch: Batch, trees: Trees, params: SamplingParams
) -> TargetOutput:
    """Run the target over the last committed token and N nodes: warped logits [B, N + 1, V]."""
    batch.drafted = trees.sizes
    last, depth = batch.lengths[:, None] - 1, pad(trees.depth, (1, 0))
    output = batch.networks["target"](
        torch.cat([batch.tokens.gather(1, last), trees.token], 1),
        last + depth,
        keep=depth.shape[1],
        padding=trees.padding(),
        branch=pad(trees.path, (1, 0), value=-1),
    )
    logits = sampler.warped(output.logits, batch, trees.token, params, trees.before)
    return output._replace(logits=logits)


def accept(
    sampler: BlockDrafter, batch: Batch, output: TargetOutput, accepted: Accepted
) -> tuple[Tensor, Tensor]:
    """Keep the accepted paths in the caches; return a cycle's tokens and counts."""
    batch.networks["target"].keep_path(batch.lengths, accepted.node)
    counts = accepted.count + 1
    sampler.follow(batch, output.hidden_states, accepted.along, counts)
    return accepted.tokens, counts


def _ragged(batch: Batch) -> bool:
    """Return whether trees of a batch may have different sizes at no cost."""
    return batch.networks["target"].flat


def lookups_of(batch: Batch, kind: Callable[[list[int]], L]) -> list[L]:
    """Make the prompt lookup of each sequence of a batch."""
    texts = zip(batch.tokens.tolist(), batch.lengths.tolist())
    return [kind(tokens[:length]) for tokens, length in texts]


def catch_up(lookups: Sequence[Lookup] | None, batch: Batch) -> None:
    """Give a batch's prompt lookups, if it has any, the tokens that were committed since."""
    if lookups:
        first = min(lookup.length for lookup in lookups)
        texts = batch.tokens[:, first : int(batch.lengths.max())].tolist()
        for lookup, tokens, length in zip(lookups, texts, batch.lengths.tolist()):
            lookup.extend(tokens[lookup.length - first : length - first])


def _by_depth(numbers: ByNumber[list[float]]) -> dict[float, list[float]]:
    """Pad per-depth values to MAX_NODES by repeating the last one."""
    return {float(t): [*row, *[row[-1]] * (MAX_NODES - len(row))] for t, row in numbers.items()}

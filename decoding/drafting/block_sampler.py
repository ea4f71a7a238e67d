"""Block samplers: speculative decoding with a drafter that drafts a block in one pass.

A method's drafter gives k distributions, independent given the prefix; what happens to them is the
same for all such methods. They are verified as a chain (`rejection`, `block`, `coupled`), after
which a rejection ends the block, as the target's distributions after it were conditioned on the
rejected token; or they rank a tree of drafts (`tree`). With a Markov head each is conditioned on
the drafted token before it. Baselines of `tree` verify trees that are drawn (`traversal`,
`multipath`).
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting import bigrams as bigram_file
from decoding.drafting import markov as markov_file
from decoding.drafting.bigrams import Bigrams
from decoding.drafting.drawn_tree import (
    DrawnTrees,
    chains,
    draw_trees,
    equally_likely,
    multipath,
    traversal,
)
from decoding.drafting.markov import MarkovScores
from decoding.drafting.prompt_lookup import Lookup
from decoding.drafting.tree import (
    LIMIT,
    Accepted,
    BigramScores,
    Trees,
    check_tree,
    draft_trees,
    verify_trees,
)
from decoding.engine import verify, vocabulary
from decoding.engine.batch import Batch
from decoding.engine.cache import CachedNetwork, TargetOutput
from decoding.engine.params import VERIFY, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.engine.verify import choose
from decoding.engine.warp import fit_vocabulary, seen_tokens, warp
from models.markov import MarkovHead
from models.masks import causal, tree

KEPT_TOKENS = 2**14  # whose bigrams are kept as dictionaries
# Of a method's module that decodes with such a drafter: see `decoding.loading`.
KNOBS = {
    "nodes": int, "sharpness": float, "rank_noise": bool, "bigrams": bool, "lookup": bool,
    "markov_head": bool,
}  # fmt: skip
# Files beside the weights of an export.
UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
ARTEFACTS = (bigram_file.FILE, markov_file.FILE, vocabulary.FILE)
NEEDED = ("target", "tokenizer_fingerprint", "mask_id", "block_size")  # keys of an export's entry


class BlockSampler(Sampler):
    """Speculative decoding with a drafter that gives k distributions in one pass.

    A method supplies `begin_drafting` and `draft_logits`, and `follow` where its drafter reads the
    target's hidden states.

    Args:
        target, tokenizer: See `Sampler`.
        block_size: k, tokens drafted a cycle unless a request asks for others.
        nodes: Of the tree that `verify=tree` drafts instead of a block: a number, or
            {requests: number} by how many requests are decoded together. Trees that are drawn have
            those of one request, whatever the batch.
        sharpness: Inverse temperature of the drafter in a tree's ranking (`draft_trees`): a number,
            or a number for each depth by temperature, {temperature: [...]}, of which a request
            takes the nearest.
        rank_noise: Whether trees are ranked with the target's keyed noise; without (for comparison)
            by the drafter's distributions alone.
        lengths: k of drafts that are no tree, {requests: {temperature: k}}, of which a cycle takes
            the nearest; None: block_size. Drafts that are accepted by chance take those of one
            request, whatever the batch (see `length`).
        bigrams: Bigram scores of the target's answers (`decoding.drafting.bigrams`).
        bigram_weights: The weight of these scores at each depth, {temperature: [...]}.
        lookup: Whether trees use prompt lookup at temperature 0
            (`decoding.drafting.prompt_lookup`).
        draft_ids: [Vd], the target's tokens that are drafted, where these are not all of them
            (`decoding.engine.vocabulary`): those of which the drafter has logits, or of whose
            logits it computes no others.
        markov: The Markov head of the drafter, over the tokens that it has logits of; None: the
            positions of a block are independent.
    """

    rules = VERIFY

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: int,
        nodes: int | dict[str, int] = 16,
        sharpness: float | dict[str, list[float]] = 1.5,
        rank_noise: bool = True,
        lengths: dict[str, dict[str, int]] | None = None,
        bigrams: Bigrams | None = None,
        bigram_weights: dict[str, list[float]] | None = None,
        lookup: bool = True,
        draft_ids: Tensor | None = None,
        markov: MarkovHead | None = None,
    ):
        super().__init__(target, tokenizer)
        if draft_ids is not None:
            vocabulary.check_vocabulary(None, self.vocabulary, draft_ids)
            draft_ids = draft_ids.to(self.device)
        self.draft_ids, self.markov = draft_ids, None
        if markov is not None:
            self.markov = MarkovScores(markov, self.vocabulary, draft_ids, self.device)
        nodes = nodes if isinstance(nodes, dict) else {1: nodes}
        for number in nodes.values():
            check_tree(number, sharpness)
        self.block_size = block_size
        self.nodes, self.sharpness = {int(rows): n for rows, n in nodes.items()}, sharpness
        self.rank_noise = rank_noise
        self.lengths = {
            int(rows): {float(t): k for t, k in by_temperature.items()}
            for rows, by_temperature in (lengths or {}).items()
        }
        by_depth = _by_depth(sharpness if isinstance(sharpness, dict) else {})
        self._sharpness = {t: torch.tensor(s, device=self.device) for t, s in by_depth.items()}
        self.bigrams, self.scores, self.lookup = bigrams, {}, lookup
        if bigrams is not None:
            after = lru_cache(KEPT_TOKENS)(bigrams.after)
            weights = _by_depth(bigram_weights)
            self.scores = {t: BigramScores(after, weight) for t, weight in weights.items()}

    @abstractmethod
    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        """Prefill the drafter, and set `batch.state`: all that `draft_logits` needs.

        Args:
            batch: The requests; the target has all tokens of their prompts but the last.
            states: The outputs of `hidden_layers` at these tokens (`Sampler.prefill`).
        """

    def states_before(self, batch: Batch) -> tuple[Tensor, ...]:
        """The target's hidden states that `begin_drafting` takes, where it reads any."""
        if not self.hidden_layers:
            return ()
        return self.prefill(batch, "target", self.cached_target(batch))

    @abstractmethod
    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """One pass of the drafter.

        Args:
            batch: The requests.
            k: Tokens to draft.

        Returns:
            Logits [B, k, V] at the next k positions, independent given the prefix; -inf for tokens
            that are never drafted (`fit_vocabulary`).
        """

    def reading_noise(
        self, batch: Batch, k: int, noise: Tensor | None, params: SamplingParams
    ) -> AbstractContextManager:
        """A context in which the drafter's passes read the keyed noise, of a drafter that can.

        Args:
            batch: The requests.
            k: Tokens to draft.
            noise: Keyed noise of the next positions, [B, k or more, V]; None at temperature 0.
            params: How to decode; where drafts are accepted by chance no noise is read.
        """
        return nullcontext()

    def draft_pass(self, batch: Batch, k: int, params: SamplingParams) -> Tensor:
        """Warped drafter logits [B, k, V] at the next k positions, independent given the prefix."""
        return self.warped_draft(self.draft_logits(batch, k), batch, params)

    def forced_pass(self, batch: Batch, tokens: Tensor, params: SamplingParams) -> Tensor:
        """Warped drafter logits [B, k, V] at known tokens [B, k].

        With a Markov head each position is conditioned on the known token before it.
        """
        k = tokens.shape[1]
        if self.markov is None:
            return self.draft_pass(batch, k, params)
        logits = self.draft_logits(batch, k)
        added = pad(self.markov.following(tokens[:, :-1]), (0, 0, 1, 0))
        return self.warped_draft(logits + added, batch, params)

    def draft_chain(
        self, batch: Batch, k: int, noise: Tensor | None, params: SamplingParams
    ) -> tuple[Tensor, Tensor | None]:
        """Draft k tokens in one pass of the drafter; a Markov head then draws them one by one.

        Args:
            batch: The requests.
            k: Tokens to draft.
            noise: Keyed noise of the next positions, [B, k or more, V]; None at temperature 0, or
                where drafts are accepted by chance.
            params: How to decode.

        Returns:
            The draft [B, k], and q [B, k, V], the probabilities that it was drawn from; None where
            it was chosen with keyed noise.
        """
        if self.markov is None:
            return self._drawn(self.draft_pass(batch, k, params), noise, batch, params)
        logits, draft, q = self.draft_logits(batch, k).split(1, 1), [], []
        for i, at in enumerate(logits):
            if i:  # the network has read the token before the first
                at = at + self.markov.following(draft[-1])
            g = None if noise is None else noise[:, i:]
            token, probs = self._drawn(self.warped_draft(at, batch, params), g, batch, params)
            draft.append(token)
            q.append(probs)
        return torch.cat(draft, 1), None if params.keyed else torch.cat(q, 1)

    def _drawn(
        self, logits: Tensor, noise: Tensor | None, batch: Batch, params: SamplingParams
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, n] of warped logits [B, n, V], and the probabilities they were drawn from."""
        if params.keyed:
            return choose(logits, noise), None
        q = logits.softmax(-1)
        return batch.randomness.categorical(q), q

    def follow(
        self, batch: Batch, states: tuple[Tensor, ...], path: Tensor, counts: Tensor
    ) -> None:
        """Take over the target's hidden states of what a cycle has verified.

        Args:
            batch: The requests, before their new tokens are committed.
            states: The outputs [B, Q, H] of `hidden_layers` at the last committed token and at all
                that was drafted.
            path: [B, m], where in a pass the accepted tokens are; 0 is the last committed token.
            counts: [B], of these, how many are accepted.
        """

    def margin(self, params: SamplingParams) -> int:
        """A cycle may overshoot by what it drafts; separator and scratch need a slot each."""
        most = [params.block_size or self.block_size]
        most += [k for by_temperature in self.lengths.values() for k in by_temperature.values()]
        if params.tree:
            most += self.nodes.values()
        return max(most) + 3

    def length(self, requests: int, params: SamplingParams) -> int:
        """Tokens to draft a cycle when so many requests are unfinished. Lossless, whatever it is.

        What is drawn depends on how many tokens are drafted, and a request's text must not depend
        on its neighbours: only where the noise is keyed may their number decide.
        """
        if params.block_size or params.tree or not self.lengths:
            return params.block_size or self.block_size
        by_temperature = nearest(self.lengths, requests if params.keyed else 1)
        return nearest(by_temperature, params.temperature)

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        """Prefill both networks."""
        predicate = tree if params.tree else causal
        capacity = batch.tokens.shape[1]
        target = CachedNetwork(self.target, predicate, capacity, self.hidden_layers)
        self.begin_drafting(batch, self.prefill(batch, "target", target))
        # At other temperatures the noise knows more: there lookups make trees worse.
        if self.lookup and params.verify == "tree" and params.temperature == 0:
            texts = zip(batch.tokens.tolist(), batch.lengths.tolist())
            batch.state.lookups = [Lookup(tokens[:length]) for tokens, length in texts]

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Draft k tokens, verify them, emit the accepted ones and one of the target's own."""
        k = self.length(len(batch.requests), params)
        # Where it is keyed, drafter and target share it.
        noise = self.noise(batch, k + 1, params) if params.keyed else None
        if params.verify == "tree":
            # What top_p and others leave out is known with the head's terms alone.
            ranked = params if self.markov is None else replace(params, **UNFILTERED)
            with self.reading_noise(batch, k, noise, params):
                q_logits = self.draft_pass(batch, k, ranked)
            return self.tree_cycle(batch, q_logits, noise, params)
        if params.tree:
            return self.drawn_tree_cycle(batch, k, params)
        with self.reading_noise(batch, k, noise, params):
            draft, q = self.draft_chain(batch, k, noise, params)
        output = self.target_pass(batch, draft, params)
        if params.keyed:
            accepted, following = verify.coupled(draft, choose(output.logits, noise))
        else:
            rule = {"rejection": verify.rejection, "block": verify.block}[params.verify]
            accepted, following = rule(draft, q, output.logits.softmax(-1), batch.randomness)
        chain = torch.arange(k + 1, device=draft.device).expand(len(draft), -1)
        self.follow(batch, output.hidden_states, chain, accepted + 1)
        tokens = torch.cat([draft, draft[:, :1]], 1)
        tokens.scatter_(1, accepted[:, None], following[:, None])
        return tokens, accepted + 1

    def tree_cycle(
        self, batch: Batch, q_logits: Tensor, noise: Tensor | None, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Verify a tree of drafts in one pass: the output of `coupled`, whatever the tree.

        So the tree may know the noise: a token's chance to be the target's choice is about
        softmax(log q + g), and of that the tree is the best.
        """
        noisy = q_logits
        if noise is not None and self.rank_noise:
            noisy = q_logits + noise[:, :-1]
        sharpness, bigrams = self.ranking_at(params.temperature)
        lookups = batch.state.lookups
        nodes = nearest(self.nodes, len(batch.requests))
        pairs, ids = None, self.draft_ids
        if self.markov is not None:
            pairs, ids = self.markov.pairs(params.temperature), self.markov.ids
        if ids is not None:  # no other token has a chance, and a target may have ten times as many
            noisy = noisy[..., ids]
        trees = draft_trees(noisy, nodes, sharpness, bigrams, lookups, pairs, ids)
        output = self.tree_pass(batch, trees, params)
        tokens, counts = self.accept(batch, output, verify_trees(trees, output.logits, noise))
        if lookups:
            for lookup, new, count in zip(lookups, tokens.tolist(), counts.tolist()):
                lookup.extend(new[:count])
        return tokens, counts

    def drawn_tree_cycle(
        self, batch: Batch, k: int, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Verify a tree that was drawn from the drafter, in one pass and by chance."""
        drawn = self.drawn_trees(batch, k, params)
        output = self.tree_pass(batch, drawn.trees, params)
        rule = {"traversal": traversal, "multipath": multipath}[params.verify]
        return self.accept(batch, output, rule(drawn, output.logits.softmax(-1), batch.randomness))

    def drawn_trees(self, batch: Batch, k: int, params: SamplingParams) -> DrawnTrees:
        """Trees of a fixed shape whose tokens are drawn.

        For `traversal` a tree of paths of up to k tokens, for `multipath` as many paths of k tokens
        as there are nodes for.
        """
        logits, nodes = self.draft_logits(batch, k), nearest(self.nodes, 1)
        q = self.warped_draft(logits, batch, params).softmax(-1)
        row = torch.arange(len(q), device=q.device)

        def following(depth: Tensor, token: Tensor) -> Tensor:
            depth = depth.clamp_max(k - 1)  # the last depth has no children
            if self.markov is None:
                return q[row, depth]
            at = logits[row, depth] + self.markov.following(token)
            return self.warped_draft(at[:, None], batch, params)[:, 0].softmax(-1)

        distinct = params.verify == "traversal"
        if distinct:
            shape = equally_likely(nodes, k, self.vocabulary)
        else:
            length = min(k, nodes)
            shape = chains(nodes // length, length)
        return draw_trees(shape, q[:, 0], following, batch.randomness, distinct)

    def tree_pass(self, batch: Batch, trees: Trees, params: SamplingParams) -> TargetOutput:
        """One pass of the target over the last committed token and N nodes of each tree.

        Returns:
            Warped logits [B, N + 1, V] after the root and after each node, and the outputs
            [B, N + 1, H] of `hidden_layers` there.
        """
        batch.drafted = trees.token.shape[1]
        last, depth = batch.lengths[:, None] - 1, pad(trees.depth, (1, 0))
        output = batch.networks["target"](
            torch.cat([batch.tokens.gather(1, last), trees.token], 1),
            last + depth,
            keep=depth.shape[1],
            branch=pad(trees.path, (1, 0), value=-1),
        )
        logits = self.warped(output.logits, batch, trees.token, params, trees.before())
        return output._replace(logits=logits)

    def accept(
        self, batch: Batch, output: TargetOutput, accepted: Accepted
    ) -> tuple[Tensor, Tensor]:
        """Keep what a pass over trees has accepted: the output of `cycle`."""
        batch.networks["target"].keep_path(batch.lengths, accepted.node)
        counts = accepted.count + 1
        self.follow(batch, output.hidden_states, accepted.along, counts)
        return accepted.tokens, counts

    def fitted(self, logits: Tensor, excluded: list[int]) -> Tensor:
        """A drafter's logits [B, k, Vd] over the target's V tokens; -inf for those `excluded`."""
        return fit_vocabulary(logits, self.vocabulary, excluded, self.draft_ids)

    def warped_draft(self, logits: Tensor, batch: Batch, params: SamplingParams) -> Tensor:
        """Drafter logits [B, n, V] as they are drafted from: warped as the target's are."""
        seen = None
        if params.repetition_penalty != 1.0:
            nothing = batch.tokens[:, :0]
            seen = seen_tokens(batch.tokens, batch.lengths, nothing, self.vocabulary)
        return warp(logits, params, seen)

    def ranking_at(self, temperature: float) -> tuple[float | Tensor, BigramScores | None]:
        """`sharpness` and `bigrams` of `draft_trees`: those of the nearest temperature."""
        sharpness = nearest(self._sharpness, temperature) if self._sharpness else self.sharpness
        return sharpness, nearest(self.scores, temperature) if self.scores else None


def _by_depth(numbers: dict[str, list[float]]) -> dict[float, list[float]]:
    """Of each temperature LIMIT numbers: the last depth's holds for all deeper ones."""
    return {float(t): [*row, *[row[-1]] * (LIMIT - len(row))] for t, row in numbers.items()}


def nearest(known: dict[float, Any], x: float) -> Any:
    """The value of the key that is nearest to x."""
    return known[min(known, key=lambda other: abs(other - x))]


def knobs_of(config: dict, *keys: str) -> dict:
    """The arguments of a `BlockSampler` that an export's `parade` entry gives.

    Args:
        config: The entry, with what `read_artefacts` found.
        keys: Further arguments, of the method's own.
    """
    keys += ("block_size", "nodes", "sharpness", "rank_noise", "lengths", "lookup")
    keys += ("draft_ids", "markov")
    knobs = {key: config[key] for key in keys if key in config}
    if config.get("bigrams") and "table" in config:
        knobs |= {"bigrams": config["table"], "bigram_weights": config["bigrams"]}
    return knobs


def read_artefacts(fetch: Callable[[str], Path], config: dict) -> dict:
    """What lies beside a drafter's weights, for `from_export`.

    Args:
        fetch: Gives the path of a file of the export (`models.causal.files_of`).
        config: The export's `parade` entry, with the user's knobs.

    Returns:
        {'table': bigrams}, {'draft_ids': [Vd]} and {'markov': head}, each where the entry names it.

    Raises:
        ValueError: A file that is missing or damaged; bigrams=true for an export without any.
    """
    found = {}
    if config.get(vocabulary.KEY):
        found["draft_ids"] = vocabulary.read(fetch(config[vocabulary.KEY]))
    if config.get("markov_head"):
        found["markov"] = markov_file.read(fetch(markov_file.FILE))
    if config.get("bigrams"):
        if not isinstance(config["bigrams"], dict):
            raise ValueError(
                "bigrams=true is not allowed: an export that has bigrams uses them. To make them: "
                "python -m decoding.calibrate model=<the export> answers=..."
            )
        found["table"] = bigram_file.read(fetch(bigram_file.FILE))
    return found

"""AS-ARM: any-subset speculative decoding (ASSD), and the sequential decoding that it equals.

Source: arXiv 2504.20456, Algorithms 1 and 2 (the `n == T-1` of line 9 must read N-1). The network
drafts for itself: a query about a later position, conditioned on the decoded tokens only, draws a
token without those in between. Each way of drafting is a cycle of one target pass; they differ in
the tokens that the pass has queries for:

    draft        queries of a pass
    sequential   the next token
    assd         two passes of a request take turns (Algorithm 1). One has the next k tokens: the
                 first is always accepted (Lemma 1), the others are drafts. The other has the
                 drafts, each conditioned on the drafts before it
    assd_ngram   drafts from bigram counts of the context, and the token after them (Algorithm 2;
                 the paper leaves out that last token, which costs nothing)
    assd_fused   the drafts and the token after them; also, for each number a of drafts that may
                 be accepted, the k tokens after the next, conditioned on those a drafts: they are
                 the next drafts, made in the pass that verifies these. With verify=tree the
                 drafts are a tree (`decoding.drafting.tree`), and the next ones are asked for
                 after each of its nodes

Every pass emits at least one token, so passes never exceed the tokens filled in (Theorem 1).
"""

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot, pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corruption.orders import binary_lattice, order_index, two_streams
from decoding.any_subset.infilling import Infiller, InfillState
from decoding.any_subset.two_stream_cache import Branches, TwoStreamNetwork, two_stream
from decoding.drafting.tree import Trees, draft_trees, verify_trees
from decoding.drafting.tree_limits import MAX_NODES
from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.verify import choose
from decoding.engine.warp import Preceding, fit_vocabulary, preceding, warp
from decoding.method import Count, Method, Share, TokenId
from models.twostream import check_prompt, joint_logits

Draft = Literal["sequential", "assd", "assd_ngram", "assd_fused"]
DRAFTS = get_args(Draft)


@dataclass
class AsarmState(InfillState):
    """The orders of a batch, and what the last pass drafted."""

    draft: Tensor  # the drafted tokens, int64 [B, d]; the mask token where a request has none
    q: Tensor | None = None  # what they were drawn from, [B, d, V]; None under keyed noise
    ahead: Tensor | None = None  # warped logits of the next drafts, [B, k, V], with verify=tree


class AsarmSampler(Infiller):
    """Fills holes with an any-subset model, with the distribution of `draft=sequential`.

    Args:
        target, tokenizer, mask_id: An any-subset model (`models.twostream`), its own, its mask.
        draft: The way of drafting, one of `DRAFTS`; a request may name another.
        block_size: k, tokens drafted a cycle; a request may name another.
        cache: Cache the content stream; False (for comparison) runs the whole text in every pass.
        tolerance: Epsilon of appendix F.5, added to the acceptance ratio; above 0 it is lossy.
        nodes, sharpness: Of the trees of verify=tree (`decoding.drafting.tree.draft_trees`).
    """

    rules = ("coupled", "rejection", "block", "tree")
    drafts = DRAFTS

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mask_id: TokenId,
        draft: Draft = "assd_fused",
        block_size: Count = 5,
        cache: bool = True,
        tolerance: Share = 0.0,
        nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 16,
        sharpness: Annotated[float, Field(gt=0)] = 1.0,
    ):
        super().__init__(target, tokenizer, mask_id=mask_id)
        self.draft, self.block_size, self.cache = draft, block_size, cache
        self.tolerance = tolerance
        self.nodes, self.sharpness = nodes, sharpness
        self._forward: Callable[[], Any] = lambda: None

    def lossy_reason(self, params: SamplingParams) -> str:
        # Where nothing is drafted a tolerance has no effect.
        if self.tolerance and (params.draft or self.draft) != "sequential":
            return f"tolerance={self.tolerance:g}"
        return ""

    def margin(self, params: SamplingParams) -> int:
        # A pass reaches two blocks beyond the end, and its drafts and queries need a slot each.
        k = params.block_size or self.block_size
        drafts = max(k, self.nodes) if params.verify == "tree" else k
        return 2 * k + drafts + (drafts + 1) * (k + 1) + 2

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        way, k = params.draft or self.draft, params.block_size or self.block_size
        reason = self.lossy_reason(params)
        if reason and (params.verify != "rejection" or params.temperature == 0):
            raise ValueError(
                f"{reason} loosens verify='rejection' at a temperature above 0, but "
                f"verify={params.verify!r} and temperature={params.temperature:g} were given"
            )
        if way == "assd" and k < 3:
            warnings.warn(
                f"block_size={k} cannot speed up draft='assd': its two passes give at most {k} "
                "tokens. Choose at least 3",
                stacklevel=2,
            )
        if params.verify == "tree" and way != "assd_fused":
            raise ValueError(
                "verify='tree' needs the drafts of draft='assd_fused', but "
                f"draft={way!r} was asked for"
            )
        check_prompt(self.target, batch.state.given > 0)
        capacity = batch.tokens.shape[1]
        # Joining requests share XLNet's table of distances with the running ones.
        forward = self._forward() or two_stream(self.target, self.mask_id)
        self._forward = weakref.ref(forward)
        batch.networks["target"] = TwoStreamNetwork(forward, capacity, self.mask_id)
        # With `assd` every pass takes k - 1 drafts, so that a request may draft while others
        # verify; `assd_fused` has them from its first cycle on, which no other request shares.
        none = torch.full_like(batch.tokens[:, : k - 1 if way == "assd" else 0], self.mask_id)
        q = None if params.keyed else one_hot(none, self.vocabulary).float()
        batch.state = AsarmState(**vars(batch.state), draft=none, q=q)

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Verify the last pass's drafts and draft the next ones, in one pass."""
        way, k = params.draft or self.draft, params.block_size or self.block_size
        if batch.state.ahead is not None:
            return self.tree_cycle(batch, k, params)
        if way == "assd_ngram":
            self.draft_ngrams(batch, k, params)
        state, draft = batch.state, batch.state.draft
        d, ahead = draft.shape[1], k if way == "assd_fused" else 0
        drafted = draft != self.mask_id
        batch.drafted, drafting = drafted.sum(1), ~drafted.any(1)
        # Algorithm 1 has no query for the token after the drafts: the next pass begins with it.
        with_bonus = way != "assd" or d == 0
        A = d + 1 if with_bonus or drafting.any() else d
        logits = self.target_logits(batch, draft, A, ahead, params)  # [B, A, 1 + ahead, V]
        p_logits = logits[:, :, 0]
        if d == A:
            p_logits = torch.cat([p_logits, surely(0, p_logits[:, :1])], 1)
        noise = self.order_noise(batch, d + 1 + ahead, params) if params.keyed else None
        accepted, following = self.accept(batch, p_logits, noise, params)
        tokens = torch.cat([draft, following[:, None]], 1)
        tokens.scatter_(1, accepted[:, None], following[:, None])
        counts = (accepted + 1).clamp_max(d + with_bonus).minimum(state.size - batch.lengths)
        known = accepted.clamp_max(A - 1)
        state.cached = batch.lengths + known
        if way == "assd":  # those that have verified draft in the next pass
            next_logits, none = p_logits[:, 1:], surely(self.mask_id, p_logits[:, 1:])
            next_logits = next_logits.where(drafting[:, None, None], none)
        else:
            next_logits = logits[torch.arange(len(known), device=known.device), known, 1:]
        self.draft_next(batch, next_logits, accepted, noise, params)
        return tokens, counts

    def accept(
        self, batch: Batch, p_logits: Tensor, noise: Tensor | None, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Return how many drafts are accepted [B], and the token after them [B]."""
        draft, q = batch.state.draft, batch.state.q
        if params.keyed:
            return verify.coupled(draft, choose(p_logits, noise))
        p = p_logits.softmax(-1)
        if not draft.shape[1]:
            return torch.zeros_like(batch.lengths), batch.randomness.categorical(p[:, 0])
        if params.verify == "block":
            return verify.block(draft, q, p, batch.randomness)
        tolerance = self.tolerance * (draft != self.mask_id)
        return verify.rejection(draft, q, p, batch.randomness, tolerance)

    def draft_next(
        self,
        batch: Batch,
        logits: Tensor,
        accepted: Tensor,
        noise: Tensor | None,
        params: SamplingParams,
    ) -> None:
        """Set the next drafts, from logits [B, k, V] of the tokens after the next.

        The noise begins at the position after the last decoded token.
        """
        state, k = batch.state, logits.shape[1]
        if params.verify == "tree":
            state.ahead = logits
        elif params.keyed:
            if noise is not None:
                at = accepted[:, None] + torch.arange(1, 1 + k, device=accepted.device)
                row = torch.arange(len(at), device=at.device)[:, None]
                noise = noise[row, at.clamp_max(noise.shape[1] - 1)]
            state.draft = choose(logits, noise)
        elif k:
            state.q = logits.softmax(-1)
            state.draft = batch.randomness.categorical(state.q)
        else:
            state.draft = state.draft[:, :0]

    def tree_cycle(self, batch: Batch, k: int, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Verify a tree of the last pass's drafts and draft the next ones, in one pass.

        Given that pass's prefix the drafts are independent, as DEER's are.
        """
        ahead, noise = batch.state.ahead, self.order_noise(batch, k + 1, params)
        trees = draft_trees(
            ahead if noise is None else ahead + noise[:, :k], self.nodes, self.sharpness
        )
        batch.drafted = trees.token.shape[1]
        logits = self.target_logits(batch, trees.token, batch.drafted + 1, k, params, trees)
        tokens, count, node, along = verify_trees(trees, logits[:, :, 0], noise)
        batch.networks["target"].keep_path(batch.lengths, node)
        row = torch.arange(len(logits), device=logits.device)
        batch.state.ahead = logits[row, along[row, count], 1:]
        batch.state.cached = batch.lengths + count
        return tokens, (count + 1).minimum(batch.state.size - batch.lengths)

    def target_logits(
        self,
        batch: Batch,
        draft: Tensor,
        A: int,
        ahead: int,
        params: SamplingParams,
        trees: Trees | None = None,
    ) -> Tensor:
        """Run one target pass over the drafts [B, d] and the queries.

        The queries are conditioned on A prefixes of the draft, of 0 to A - 1 tokens, and ask for
        the next token and `ahead` more. In a tree, prefix 0 is the root and prefix a > 0 the path
        to node a - 1.

        Returns:
            Warped logits [B, A, 1 + ahead, V]. Entry (a, j) is index n + a + j of the order (n +
            depth + j in a tree), conditioned on the n decoded tokens and prefix a (no draft where a
            request has none). An index that does not exist has token 0, `surely`.
        """
        n = batch.lengths[:, None]
        batch.tokens.scatter_(1, n + torch.arange(draft.shape[1], device=n.device), draft)
        a = torch.arange(A, device=n.device).repeat_interleave(1 + ahead)
        prefix, branches = a.expand(len(n), -1), None
        if trees is None:
            after, prefix = a, prefix.minimum((draft != self.mask_id).sum(1, keepdim=True))
            depth = prefix
        else:
            depth, path = (pad(t, (1, 0))[:, a] for t in (trees.depth, trees.path))
            after, branches = depth, Branches(trees.depth, trees.path, path)
        at = n + after + torch.arange(1 + ahead, device=n.device).repeat(A)
        order, cached = batch.state.order, batch.state.cached
        logits = batch.networks["target"].ask(
            batch.tokens,
            order,
            batch.state.given,
            cached if self.cache else torch.zeros_like(cached),
            batch.lengths + prefix.amax(1),
            order.gather(1, at),
            n + depth,
            branches,
        )
        logits = fit_vocabulary(logits, self.vocabulary, (self.mask_id,))
        before = None if trees is None else trees.before
        committed = batch.tokens, batch.starts, batch.lengths
        known = preceding(params, *committed, draft[:, : A - 1], self.vocabulary, before)
        if (text := known.text) is not None:
            text = text[torch.arange(len(n), device=n.device)[:, None], prefix]
        logits = warp(logits, params, Preceding(text))
        inside = (at < batch.state.size[:, None])[..., None]
        return logits.where(inside, surely(0, logits)).unflatten(1, (A, 1 + ahead))

    def order_noise(self, batch: Batch, count: int, params: SamplingParams) -> Tensor | None:
        """Return the noise [B, count, V] of the next positions of the order; None at T=0."""
        if params.temperature == 0:
            return None
        at = batch.lengths[:, None] + torch.arange(count, device=batch.tokens.device)
        return batch.randomness.gumbel(batch.state.order.gather(1, at), self.vocabulary)

    def draft_ngrams(self, batch: Batch, k: int, params: SamplingParams) -> None:
        """Set k drafts, each drawn from the tokens seen after its left neighbour (Algorithm 2)."""
        n, order = batch.lengths[:, None], batch.state.order
        known = torch.arange(order.shape[1], device=n.device) < n
        text = torch.zeros_like(batch.tokens).scatter(1, order, batch.tokens)
        known = torch.zeros_like(known).scatter(1, order, known)
        noise = self.order_noise(batch, k, params) if params.keyed else None
        drafts, qs = [], []
        for i in range(k):
            at = order.gather(1, n + i)
            c = bigram_counts(text, known, at, self.vocabulary, self.mask_id).log()[:, None]
            c = c.where((n + i < batch.state.size[:, None])[..., None], surely(0, c))
            if params.keyed:
                drafts.append(choose(c, None if noise is None else noise[:, i : i + 1]))
            else:
                qs.append(c.softmax(-1))
                drafts.append(batch.randomness.categorical(qs[-1]))
            text = text.scatter(1, at, drafts[-1])
        batch.state.draft = torch.cat(drafts, 1)
        if qs:
            batch.state.q = torch.cat(qs, 1)

    def log_prob(
        self, tokens: list[list[int]], given: list[list[bool]], order: list[list[int]] | None = None
    ) -> Tensor:
        """Return the joint log-probability log p(x_sigma(>=m) | x_sigma(<m)), in one pass. Eq. 2.

        Returns [B], in nats. See `log_probs`.
        """
        found, masked = self.log_probs(tokens, given, order), ~torch.tensor(given)
        ids = torch.tensor(tokens, device=found.device)
        chosen = found.gather(-1, ids[..., None])[..., 0]
        return chosen.where(masked.to(found.device), 0).sum(-1)

    def log_probs(
        self, tokens: list[list[int]], given: list[list[bool]], order: list[list[int]] | None = None
    ) -> Tensor:
        """Return log p(x_sigma(i) | x_sigma(<i)) of every token, in one pass (the terms of Eq. 2).

        Args:
            tokens, given: B texts of N tokens, and which of them are part of the prompt.
            order: sigma of each text, N positions; None: the prompt, then from left to right.

        Returns:
            [B, N, V] by position, meaningful where a token is not given; float32, or the model's
            dtype if that is wider.
        """
        ids = torch.tensor(tokens, device=self.device)
        masked = ~torch.tensor(given, device=ids.device)
        sigma = binary_lattice(~masked)
        if order is not None:
            sigma = torch.tensor(order, device=ids.device)
        index = order_index(sigma, (~masked).sum(-1))
        batch = two_streams(ids, index, torch.ones_like(masked), self.mask_id)
        with torch.inference_mode():
            logits = joint_logits(self.target, {**batch, "masked": masked})
        logits = fit_vocabulary(logits, self.vocabulary, (self.mask_id,))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def bigram_counts(text: Tensor, known: Tensor, at: Tensor, vocabulary: int, mask_id: int) -> Tensor:
    """Return the bigram distribution c(. | left neighbour of `at`), float64 [B, V] (Eq. 23).

    It counts the tokens after the same left neighbour in the known text. Without any it is the
    frequency of tokens in the known text, and where no token is known uniform.

    Args:
        text, known: Tokens by position, int64 [B, L], and which of them are known, bool [B, L].
        at: The position to draft, [B, 1].
        vocabulary, mask_id: V, and a token that is never drafted.
    """
    left = text.gather(1, (at - 1).clamp_min(0))
    pairs = known[:, :-1] & known[:, 1:] & (text[:, :-1] == left) & (at > 0)
    c = torch.zeros(len(text), vocabulary, dtype=torch.float64, device=text.device)
    follows = c.scatter_add(1, text[:, 1:], pairs.double())
    frequency = c.scatter_add(1, text, known.double())
    uniform = torch.ones_like(c)
    uniform[:, mask_id] = 0
    c = frequency.where(frequency.sum(-1, keepdim=True) > 0, uniform)
    c = follows.where(follows.sum(-1, keepdim=True) > 0, c)
    return c / c.sum(-1, keepdim=True)


def surely(token: int, logits: Tensor) -> Tensor:
    """Return logits of this shape [..., V] that give one token the probability 1.

    It is token 0 where an index does not exist, so that its draft is accepted; the mask token where
    a request has no draft: the target never draws it, so the residual is the target's distribution.
    """
    logits = torch.full_like(logits, float("-inf"))
    logits[..., token] = 0
    return logits


class AsarmMethod(Method):
    """A method for any-subset models: of an export, or a plain transformers XLNet."""

    def arguments(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, entry: dict
    ) -> dict[str, Any]:
        given = {"mask_id": tokenizer.mask_token_id, **super().arguments(target, tokenizer, entry)}
        if given["mask_id"] is None:
            raise ValueError(
                "method=asarm needs a mask token, and the tokenizer has none: give its id, as "
                "sampler=[method=asarm,mask_id=6], or a model that fills holes (XLNet, or "
                "python -m trainers.fit recipe=asarm_joint)"
            )
        return given


METHOD = AsarmMethod(AsarmSampler)

"""AS-ARM: any-subset speculative decoding (ASSD), and the sequential decoding it is held to.

Source: arXiv 2504.20456, Algorithms 1 and 2 (the `n == T-1` of line 9 must read N-1). The network
drafts for itself: a query about a later position that sees only what is decoded draws a token
without the ones between. All four ways are one cycle of one pass, which differ in what it asks:

    sequential   the next token
    assd         in turn: the next k tokens, of which the first stands (Lemma 1) and the others
                 are drafts; then the drafts, each given those before it (Algorithm 1)
    assd_ngram   drafts of the context's own bigrams, and the token behind them (Algorithm 2; the
                 paper leaves out that last token, which costs nothing)
    assd_fused   the drafts and the token behind them, and for each number a of drafts that may
                 stand the k tokens after the next, given those a drafts: the next drafts, in the
                 pass that verifies these. With verify=tree the drafts are a tree
                 (`decoding.drafting.tree`), and the next ones are asked for behind each of its
                 nodes

Every pass emits a token at least, so calls never exceed the tokens filled in (Theorem 1).
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corruption.orders import binary_lattice, order_index, two_streams
from decoding.any_subset.infilling import Infiller, InfillState
from decoding.any_subset.two_stream_cache import Branches, TwoStreamNetwork
from decoding.drafting.tree import Trees, check_tree, draft_trees, verify_trees
from decoding.engine import verify
from decoding.engine.params import VERIFY, SamplingParams
from decoding.engine.sampler import Rows
from decoding.engine.verify import choose
from decoding.engine.warp import fit_vocabulary, seen_tokens, warp
from models.twostream import check_prompt, joint_logits

DRAFTS = ("sequential", "assd", "assd_ngram", "assd_fused")
KNOBS = {"cache": bool, "tolerance": float, "nodes": int, "sharpness": float}


@dataclass
class AsarmState(InfillState):
    """Beside the orders: what the last pass drafted.

    draft: [B, d], the drafted tokens. q: [B, d, V], the distributions that they were drawn from
    (None under keyed noise). ahead: [B, k, V], warped logits of the next drafts (`verify=tree`).
    """

    draft: Tensor
    q: Tensor | None = None
    ahead: Tensor | None = None


class AsarmSampler(Infiller):
    """Fills holes with an any-subset model. Lossless: the law is that of `sequential`, unless
    there is a tolerance.

    draft: one of `DRAFTS`, unless a request names another. block_size: k, tokens drafted a cycle.
    cache: keep the content stream's keys and values. False, for comparison only: every pass runs
    the whole text.
    tolerance: epsilon of appendix F.5, added to the acceptance ratio; above 0 it is lossy.
    nodes, sharpness: of the trees of `verify=tree`, see `decoding.drafting.tree.draft_trees`.
    """

    rules = VERIFY
    drafts = DRAFTS

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mask_id: int,
        draft: str,
        block_size: int,
        cache: bool = True,
        tolerance: float = 0.0,
        nodes: int = 16,
        sharpness: float = 1.0,
    ):
        super().__init__(target, tokenizer, mask_id=mask_id)
        if not 0 <= tolerance <= 1:
            raise ValueError(f"tolerance={tolerance} is not allowed: it must be in [0, 1]")
        self.draft, self.block_size, self.cache = draft, block_size, cache
        self.tolerance = tolerance
        check_tree(nodes, sharpness)
        self.nodes, self.sharpness = nodes, sharpness

    def lossy(self, params: SamplingParams) -> str:
        """See `Sampler`. Where nothing is drafted there is nothing to tolerate."""
        if self.tolerance and (params.draft or self.draft) != "sequential":
            return f"tolerance={self.tolerance:g}"
        return ""

    def margin(self, params: SamplingParams) -> int:
        """A pass reaches two blocks beyond the end, and its drafts and queries need a slot each."""
        k = params.block_size or self.block_size
        drafts = max(k, self.nodes) if params.verify == "tree" else k
        return 2 * k + drafts + (drafts + 1) * (k + 1) + 2

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """No pass of its own: the first one brings the prompt."""
        way, k = params.draft or self.draft, params.block_size or self.block_size
        if self.lossy(params) and (params.verify != "rejection" or params.temperature == 0):
            raise ValueError(
                f"{self.lossy(params)} loosens verify='rejection' at a temperature above 0, but "
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
        check_prompt(self.target, rows.state.given > 0)
        capacity = rows.tokens.shape[1]
        rows.networks["target"] = TwoStreamNetwork(self.target, capacity, self.mask_id)
        rows.state = AsarmState(**vars(rows.state), draft=rows.tokens[:, :0])

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Verify the drafts that there are, and ask for the next ones, in one pass."""
        way, k = params.draft or self.draft, params.block_size or self.block_size
        keyed = params.keyed
        if rows.state.ahead is not None:
            return self.tree_cycle(rows, k, params)
        if way == "assd_ngram":
            self.draft_ngrams(rows, k, params)
        draft, q = rows.state.draft, rows.state.q
        d = rows.drafted = draft.shape[1]
        # Algorithm 1 leaves out the token behind the drafts: its next pass drafts it first.
        behind = way != "assd" or d == 0
        ahead = {"assd": 0 if d else k - 1, "assd_fused": k}.get(way, 0)
        logits = self.target_logits(rows, draft, d + behind, ahead, params)  # [B, A, 1 + ahead, V]
        p_logits = logits[:, :, 0]
        if not behind:
            p_logits = torch.cat([p_logits, nothing(p_logits[:, :1])], 1)
        if keyed:
            noise = self.order_noise(rows, d + 1 + ahead, params)
            accepted, following = verify.coupled(draft, choose(p_logits, noise))
        elif d and params.verify == "block":
            accepted, following = verify.block(draft, q, p_logits.softmax(-1), rows.randomness)
        elif d:
            p = p_logits.softmax(-1)
            accepted, following = verify.rejection(draft, q, p, rows.randomness, self.tolerance)
        else:
            accepted = torch.zeros_like(rows.lengths)
            following = rows.randomness.categorical(p_logits[:, 0].softmax(-1))
        tokens = torch.cat([draft, following[:, None]], 1)
        tokens.scatter_(1, accepted[:, None], following[:, None])
        left = rows.state.size - rows.lengths
        counts = (accepted + 1).clamp_max(d + behind).minimum(left)
        rows.state.cached = rows.lengths + accepted.clamp_max(d + behind - 1)
        here = torch.arange(len(accepted), device=accepted.device)
        next_logits = logits[here, accepted.clamp_max(d + behind - 1), 1:]
        if params.verify == "tree":
            rows.state.ahead = next_logits
        elif keyed:
            at = accepted[:, None] + torch.arange(1, 1 + ahead, device=accepted.device)
            next_noise = None if noise is None else noise[here[:, None], at]
            rows.state.draft = choose(next_logits, next_noise)
        elif ahead:
            rows.state.q = next_logits.softmax(-1)
            rows.state.draft = rows.randomness.categorical(rows.state.q)
        else:
            rows.state.draft = draft[:, :0]
        return tokens, counts

    def tree_cycle(self, rows: Rows, k: int, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Verify a tree of the last pass's drafts, and ask for the next ones behind each node.

        The drafts are independent given what that pass saw, so they are DEER's (`DeerSampler`).
        """
        ahead, noise = rows.state.ahead, self.order_noise(rows, k + 1, params)
        trees = draft_trees(
            ahead if noise is None else ahead + noise[:, :k], self.nodes, self.sharpness
        )
        rows.drafted = trees.token.shape[1]
        logits = self.target_logits(rows, trees.token, rows.drafted + 1, k, params, trees)
        tokens, count, node, along = verify_trees(trees, logits[:, :, 0], noise)
        rows.networks["target"].keep_path(rows.lengths, node)
        row = torch.arange(len(logits), device=logits.device)
        rows.state.ahead = logits[row, along[row, count], 1:]
        rows.state.cached = rows.lengths + count
        return tokens, (count + 1).minimum(rows.state.size - rows.lengths)

    def target_logits(
        self,
        rows: Rows,
        draft: Tensor,
        A: int,
        ahead: int,
        params: SamplingParams,
        trees: Trees | None = None,
    ) -> Tensor:
        """Warped logits [B, A, 1 + ahead, V]: entry (a, j) is about place n + a + j of the order,
        given the n decoded tokens and the first a drafts. Behind a row's end: `nothing`.

        trees: the drafts are their nodes; a = 0 is the root, then a node each, n + depth its place.
        """
        n = rows.lengths[:, None]
        rows.tokens.scatter_(1, n + torch.arange(draft.shape[1], device=n.device), draft)
        a = torch.arange(A, device=n.device).repeat_interleave(1 + ahead)
        depth, branches = a, None
        if trees is not None:
            depth, path = (pad(t, (1, 0))[:, a] for t in (trees.depth, trees.path))
            branches = Branches(trees.depth, trees.path, path)
        at = n + depth + torch.arange(1 + ahead, device=n.device).repeat(A)
        order, cached = rows.state.order, rows.state.cached
        logits = rows.networks["target"].ask(
            rows.tokens,
            order,
            rows.state.given,
            cached if self.cache else torch.zeros_like(cached),
            rows.lengths + A - 1,
            order.gather(1, at),
            n + depth,
            branches,
        )
        logits = fit_vocabulary(logits, self.vocabulary, (self.mask_id,))
        seen = None
        if params.repetition_penalty != 1.0:
            before = None if trees is None else trees.before()
            seen = seen_tokens(
                rows.tokens, rows.lengths, draft[:, : A - 1], self.vocabulary, before
            )[:, a]
        logits = warp(logits, params, seen)
        inside = (at < rows.state.size[:, None])[..., None]
        return logits.where(inside, nothing(logits)).unflatten(1, (A, 1 + ahead))

    def order_noise(self, rows: Rows, count: int, params: SamplingParams) -> Tensor | None:
        """Keyed noise [B, count, V] of the positions of the next places; None at temperature 0."""
        if params.temperature == 0:
            return None
        at = rows.lengths[:, None] + torch.arange(count, device=rows.tokens.device)
        return rows.randomness.gumbel(rows.state.order.gather(1, at), self.vocabulary)

    def draft_ngrams(self, rows: Rows, k: int, params: SamplingParams) -> None:
        """Algorithm 2: k drafts, each drawn from what follows its left neighbour in the context."""
        n, order = rows.lengths[:, None], rows.state.order
        known = torch.arange(order.shape[1], device=n.device) < n
        text = torch.zeros_like(rows.tokens).scatter(1, order, rows.tokens)
        known = torch.zeros_like(known).scatter(1, order, known)
        noise = None
        if params.keyed:
            noise = self.order_noise(rows, k, params)
        drafts, qs = [], []
        for i in range(k):
            at = order.gather(1, n + i)
            c = bigram_counts(text, known, at, self.vocabulary, self.mask_id).log()[:, None]
            c = c.where((n + i < rows.state.size[:, None])[..., None], nothing(c))
            if params.keyed:
                drafts.append(choose(c, None if noise is None else noise[:, i : i + 1]))
            else:
                qs.append(c.softmax(-1))
                drafts.append(rows.randomness.categorical(qs[-1]))
            text = text.scatter(1, at, drafts[-1])
        rows.state.draft = torch.cat(drafts, 1)
        if qs:
            rows.state.q = torch.cat(qs, 1)

    def log_prob(
        self, tokens: list[list[int]], given: list[list[bool]], order: list[list[int]] | None = None
    ) -> Tensor:
        """log p(x_sigma(>=m) | x_sigma(<m)) of rows of one length, in one pass: [B].

        given: True for the prompt's tokens. order: another one than prompt first, then left to
        right. Eq. 2.
        """
        ids = torch.tensor(tokens, device=self.target.device)
        masked = ~torch.tensor(given, device=ids.device)
        sigma = binary_lattice(~masked)
        if order is not None:
            sigma = torch.tensor(order, device=ids.device)
        index = order_index(sigma, (~masked).sum(-1))
        batch = two_streams(ids, index, torch.ones_like(masked), self.mask_id)
        with torch.inference_mode():
            logits = joint_logits(self.target, {**batch, "masked": masked})
        logits = fit_vocabulary(logits, self.vocabulary, (self.mask_id,))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return chosen.where(masked, 0).sum(-1)


def bigram_counts(text: Tensor, known: Tensor, at: Tensor, vocabulary: int, mask_id: int) -> Tensor:
    """c(. | left neighbour of `at`), Eq. 23 with its indices in order: [B, V], normalised.

    text [B, L] by position, known: bool [B, L], at [B, 1]. What followed the same token elsewhere
    in the known text; where nothing did, how often tokens stand there; in an empty text, any token.
    """
    left = text.gather(1, (at - 1).clamp_min(0))
    pairs = known[:, :-1] & known[:, 1:] & (text[:, :-1] == left) & (at > 0)
    c = torch.zeros(len(text), vocabulary, dtype=torch.float64, device=text.device)
    follows = c.scatter_add(1, text[:, 1:], pairs.double())
    stands = c.scatter_add(1, text, known.double())
    uniform = torch.ones_like(c)
    uniform[:, mask_id] = 0
    c = stands.where(stands.sum(-1, keepdim=True) > 0, uniform)
    c = follows.where(follows.sum(-1, keepdim=True) > 0, c)
    return c / c.sum(-1, keepdim=True)


def nothing(logits: Tensor) -> Tensor:
    """Logits of a place that does not exist: surely token 0, for drafts and for the target."""
    return pad(torch.full_like(logits[..., 1:], float("-inf")), (1, 0))


def from_export(target, tokenizer, drafter, config: dict) -> AsarmSampler:
    """The sampler of an exported any-subset model; config: its `parade` entry."""
    keys = ("mask_id", "draft", "block_size", *KNOBS)
    return AsarmSampler(target, tokenizer, **{key: config[key] for key in keys if key in config})

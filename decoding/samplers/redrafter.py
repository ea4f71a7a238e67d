"""Recurrent drafters with n-grams: the cheapest drafts that know the target's states.

Sources: ReDrafter (arXiv 2403.09919), Hydra (arXiv 2402.05109); the mixture is ours. The drafter
(`models.redrafter`) runs once for each depth of a tree, for all its nodes together. It attends to
nothing, so it cannot copy; n-grams can, of the request's own text and of earlier answers, and they
are sure where they are right. A tree is ranked by what these three sources say,

    p(v | text, path) = sum_i b_i p_i(v),    b_i ~ e^(d_i) (m_i / (1 - m_i))^POWER.

m_i is how sure a source is: its largest probability, of the text's n-grams their weight
(`drafting.prompt_lookup`). How often each was right in this text is what d learns: of a token x
that was drafted d_i gains a part of b_i p_i(x) / p(x) - b_i, the gradient of log p(x). Where the
drafter was not run, the text's n-grams have the weight m, and the others the rest. The noise by
which the target draws ranks too (`drafting.next_noise`). Verification is exact for any ranking.
"""

from collections.abc import Mapping
from math import exp, inf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting import bigrams
from decoding.drafting.block_sampler import KNOBS, BlockMethod
from decoding.drafting.earlier_answers import FEW_REQUESTS, AnswerReader, seen
from decoding.drafting.ngrams import Ngrams
from decoding.drafting.pass_cost import is_dear
from decoding.drafting.prompt_lookup import Lookup, Suffix, append
from decoding.drafting.state_reader import StateReader, UnreadStates
from decoding.engine.batch import Batch
from decoding.engine.cache import CountedNetwork
from models import fused_run, redrafter
from models.fused_run import FusedRun
from models.redrafter import Redrafter

# These are fitted to SmolLM2's answers to prompts of functions and MBPP (docs/lab_notes/small.md).
POWER = 0.7
START = 0.0, -0.5, -2.0  # d of the drafter, the text's n-grams, those of earlier answers
RATE = 0.3  # of what a token teaches
MOST = 4.0  # the largest d
SURE = 0.999  # the largest m
UNSEEN = 1e-4  # a drafter's probability of a token, at the least

# By requests, and by temperature where it matters, what is fastest on two cores: the most nodes,
# the least probability of a node, how many need none, and whether to draft (of these three the
# second where a wider pass is dear), and the least gain of a run (docs/results/redrafter.md).
NODES = {1: 16, 4: 8}
LEAST = {1: {0: 0.16, 1: 0.07}, 4: 0.3, 16: 0.65}, {1: {0: 0.3, 1: 0.15}, 4: 0.3, 16: 0.65}
FEWEST = {1: {0: 5, 1: 1}, 4: 1}, {1: {0: 3, 1: 1}, 4: 1}
FASTEST = FEW_REQUESTS, {2: {0: "tree"}, 4: {0: "plain"}}
LEAST_GAIN = 0.2


class MixedLookup(Lookup):
    """The n-grams of a request's text and of earlier answers, with weights that the text teaches.

    Args:
        tokens: The text so far.
        ngrams: Those of earlier answers.

    Attributes:
        biases: d, of the drafter, the text's n-grams and those of earlier answers.
    """

    def __init__(self, tokens: list[int], ngrams: Ngrams):
        self._ngrams, self.biases = ngrams, [*START]
        # Until the text goes on, what was said after a suffix, and what a drafter said there:
        self._known: dict[Suffix, tuple[dict[int, float], float, dict[int, float]]] = {}
        self._drafted: dict[Suffix, Mapping[int, float]] = {}
        super().__init__(tokens)

    def guesses(
        self, suffix: Suffix, drafted: Mapping[int, float] | None = None
    ) -> tuple[dict[int, float], float]:
        """Return p(v) of what was seen after a suffix, as its sources' mixture, and its weight."""
        own, share, earlier = self._seen(suffix)
        if drafted is None:
            return seen(own, share, earlier), 1.0
        self._drafted[suffix] = drafted
        _, text, others = self.weights(suffix, drafted)
        weight = text + others
        return seen(own, text / (weight or 1.0), earlier), weight

    def weights(self, suffix: Suffix, drafted: Mapping[int, float]) -> list[float]:
        """Return b of the drafter, the text's n-grams and those of earlier answers."""
        _, share, earlier = self._seen(suffix)
        sure = exp(max(drafted.values())), share, max(earlier.values(), default=0.0)
        odds = [exp(d) * (m / (1 - min(m, SURE))) ** POWER for d, m in zip(self.biases, sure)]
        return [x / sum(odds) for x in odds]

    def extend(self, tokens: list[int]) -> None:
        suffix = self.suffix
        for token in tokens if self._drafted else ():
            if suffix in self._drafted:
                self._learn(suffix, token)
            suffix = append(suffix, token)
        self._known, self._drafted = {}, {}
        super().extend(tokens)

    def _learn(self, suffix: Suffix, token: int) -> None:
        """Learn from the token that came after a suffix where the drafter was run."""
        own, _, earlier = self._seen(suffix)
        drafted = self._drafted[suffix]
        q = exp(drafted.get(token, -inf))
        said = max(q, UNSEEN), own.get(token, 0.0), earlier.get(token, 0.0)
        weights = self.weights(suffix, drafted)
        total = sum(b * p for b, p in zip(weights, said))
        moved = (d + RATE * (b * p / total - b) for d, b, p in zip(self.biases, weights, said))
        self.biases = [min(MOST, max(-MOST, d)) for d in moved]

    def _seen(self, suffix: Suffix) -> tuple[dict[int, float], float, dict[int, float]]:
        """Return what a text's n-grams guess after a suffix, their weight, and what others do."""
        if suffix not in self._known:
            self._known[suffix] = *super().guesses(suffix), self._ngrams.after(suffix)
        return self._known[suffix]


class RunDrafter(CountedNetwork):
    """A recurrent drafter, and its states at the nodes of a batch's drafts."""

    def __init__(self, network: Redrafter, target: PreTrainedModel, fused: FusedRun | None):
        super().__init__(network)
        self.target, self._table = target, target.get_input_embeddings()
        self._fused, self._combined = fused, (fused or network).combined

    def __call__(self, states: Tensor, missing: Tensor, last: Tensor) -> Tensor:
        """Read the last committed token [B, 1] after its position's state: logits [B, 1, Vd].

        `states` and `missing` are those of `UnreadStates`, [B, w, L H] and [B]. A row without any,
        as the prompt has one token, reads zeros.
        """
        if not states.shape[1]:
            states = states.new_zeros(len(states), 1, states.shape[2])
        read = states[:, -1:].masked_fill((missing == 0)[:, None, None], 0)
        with self.counted():
            state = self._combined(read.to(self.network.dtype))
            logits, self.states = self._run(last, state)
        return logits

    def extend(self, tokens: Tensor, parent: Tensor) -> Tensor:
        """Read drafted tokens [B, M]; see `BlockDrafter.extend`."""
        of = (parent + 1)[..., None].expand(-1, -1, self.states.shape[-1])
        with self.counted():
            logits, states = self._run(tokens, self.states.gather(1, of))
        self.states = torch.cat([self.states, states], 1)
        return logits

    def _run(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._table(tokens).to(self.network.dtype)
        if self._fused is not None:
            return self._fused(embedded, state)
        last, state = self.network(embedded, state)
        return self.network.logits(last, self.target), state


class RedrafterSampler(AnswerReader, StateReader):
    """Speculative decoding with a recurrent drafter and n-grams.

    Args:
        target, tokenizer, knobs: See `AnswerReader`.
        drafter: The network (`models.redrafter`); its config names the layers that it reads.
    """

    tail = lookup_with_noise = True

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Redrafter,
        **given: Any,
    ):
        dear = not {"least", "fewest"} <= {*given} and is_dear(target)
        knobs: dict[str, Any] = {
            "fastest": FASTEST[dear],
            "sharpness": 1.0,
            "nodes": NODES,
            "least": LEAST[dear],
            "least_gain": LEAST_GAIN,
            "fewest": FEWEST[dear],
            **given,
        }
        knobs.setdefault("draft_ids", drafter.draft_ids)
        super().__init__(target, tokenizer, **knobs)
        drafter.check_fits(target)
        self.drafter, self.hidden_layers = drafter.eval(), drafter.target_layer_ids
        self._fused = fused_run.fused(drafter)

    def cached_drafter(self, batch: Batch) -> RunDrafter:
        return RunDrafter(self.drafter, self.target, self._fused)

    def follow(
        self, batch: Batch, states: tuple[Tensor, ...], path: Tensor, counts: Tensor
    ) -> None:
        """Keep the state of each row's last token: no other is read."""
        rows = torch.arange(len(path), device=path.device)
        last = path[rows, counts - 1]
        found = torch.cat([state[rows, last] for state in states], -1)
        batch.state = UnreadStates(found[:, None], torch.ones_like(counts))

    def lookup_of(self, tokens: list[int]) -> MixedLookup:
        return MixedLookup(tokens, self.ngrams)

    def own_logits(self, batch: Batch, k: int, *drafted: Tensor) -> Tensor:
        drafter = batch.networks["drafter"]
        if drafted:
            tokens, _, parent = drafted
            return drafter.extend(tokens, parent)
        return drafter(*batch.state.take(), batch.tokens.gather(1, batch.lengths[:, None] - 1))

    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """Read the last committed token: logits [B, 1, V]."""
        return self.fitted(self.own_logits(batch, k), [])

    def extend(self, batch: Batch, tokens: Tensor, depth: Tensor, parent: Tensor) -> Tensor:
        return self.fitted(self.own_logits(batch, 0, tokens, depth, parent), [])


METHOD = BlockMethod(
    RedrafterSampler,
    knobs=(*(knob for knob in KNOBS if knob != "markov_head"), "kept_tokens", "answers"),
    local=("answers",),
    needed=("block_size",),
    files=(bigrams.FILE,),
    load_drafter=lambda path, dtype, **options: redrafter.load(path, dtype),
)

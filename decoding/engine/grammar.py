"""Constrained answers: a grammar that an answer follows, and a length that it has at the least.

A constraint excludes tokens from the target's distribution before anything else. Which ones
depends on the answer so far alone, so decoding stays lossless: the text is plain decoding's under
the same constraint. Drafts obey it too, which only makes them better.

The library llguidance reads the grammars, and says which tokens may follow.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from math import exp, inf, log
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

KEPT = 64  # grammars that stay compiled
SPACE = r"[ \t\n]{0,20}"  # between the parts of a JSON text: without a limit some texts never end
LONGEST = 2**17  # characters of a grammar

Path = tuple[int, ...]  # tokens after the committed ones


class Grammars:
    """The grammars of one model's answers, compiled once each.

    Args:
        vocabulary: Number of the target's logits.
    """

    def __init__(self, vocabulary: int):
        self._vocabulary, self._lock = vocabulary, threading.Lock()
        self._tokens: Any = None
        self._compiled = functools.lru_cache(KEPT)(self._compile)

    def check(self, grammar: str, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
        """Raise ValueError for a grammar that cannot be followed; `ends` end an answer."""
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read(tokenizer, ends)
        self._compiled(grammar)

    def constraint(
        self,
        start: int,
        grammar: str | None,
        least: int,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
    ) -> "Constraint":
        """Make the constraint of one answer, after a prompt of `start` tokens."""
        matcher = None
        if grammar is not None:
            self.check(grammar, tokenizer, ends)
            matcher = self._compiled(grammar).deep_copy()
        return Constraint(start, matcher, least, [*ends], self._vocabulary)

    def _read(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Any:
        library = _library()
        if not ends:
            raise ValueError(
                "a grammar needs a model with a token that ends an answer: this one has no token "
                "that ends its texts"
            )
        size = max(self._vocabulary, len(tokenizer))
        try:
            return library.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=[*ends])
        except ValueError as error:
            raise ValueError(f"this model's tokenizer takes no grammars: {error}") from error

    def _compile(self, grammar: str) -> Any:
        library = _library()
        if len(grammar) > LONGEST:
            raise ValueError(f"the grammar has {len(grammar)} characters, more than {LONGEST}")
        limits = library.LLParserLimits(verbose_errors=False)
        found = library.LLMatcher(self._tokens, _read_text(grammar), log_level=0, limits=limits)
        if found.is_error():
            reason = " ".join(found.get_error().split())[:200]
            raise ValueError(f"the grammar {grammar[:60]!r} is not allowed: {reason}")
        return found


def _library() -> Any:
    """Return llguidance, which a drafter's bundle for transformers does without."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise ValueError("a grammar needs llguidance: pip install 'parade[serve]'") from error
    return llguidance


def _read_text(grammar: str) -> str:
    """Return llguidance's form of a JSON schema, a regular expression or a Lark grammar."""
    matcher, text = _library().LLMatcher, grammar.strip()
    if text.startswith("{"):
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the grammar {text[:60]!r} is no JSON schema: {error}") from error
        return matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": SPACE})
    if len(text) > 1 and text[0] == text[-1] == "/":
        return matcher.grammar_from_regex(text[1:-1])
    return matcher.grammar_from_lark(grammar)


class Constraint:
    """Which tokens one answer may go on with.

    Args:
        start: Tokens of the prompt.
        matcher: llguidance's state of the grammar; None: no grammar.
        least: Tokens that the answer has at the least before it ends. Where the grammar allows
            nothing but the end, it ends.
        ends: The tokens that end an answer.
        vocabulary: V, the number of tokens.
    """

    def __init__(self, start: int, matcher: Any, least: int, ends: list[int], vocabulary: int):
        self._start, self._matcher, self._least, self._ends = start, matcher, least, ends
        self._vocabulary = vocabulary
        self.length = start  # tokens of prompt and answer that it knows
        self._known: dict[Path, np.ndarray | None] = {}

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens."""
        if not tokens:
            return
        self._known = {}
        self.length += len(tokens)
        if self._matcher is not None:
            self._matcher.try_consume_tokens(tokens)

    def allowed(self, path: Path) -> np.ndarray | None:
        """Return which tokens may follow the committed ones and a path, bool [V]; None: any.

        After a path that is not allowed itself any may: it is never accepted.
        """
        if path not in self._known:
            self._known[path] = self._may_follow(path)
        return self._known[path]

    def ranked(
        self, path: Path, ranked: tuple[list[int], list[float]], forced: bool = True
    ) -> tuple[list[int], list[float]]:
        """Return those of a draft's next tokens that are allowed, best first.

        Where some are not, the others' probabilities add up to 1, as few tokens may usually follow
        there. Where none is, it is a token that must follow (`forced`), or at the root any that
        may.
        """
        if (allowed := self.allowed(path)) is None:
            return ranked
        kept = [(t, s) for t, s in zip(*ranked) if allowed[t] and s > -inf]
        if not kept:
            others = np.flatnonzero(allowed)
            if (forced and len(others) == 1) or not path:
                return [int(others[0])], [0.0]
            return [], []
        total = log(sum(exp(s) for _, s in kept)) if len(kept) < len(ranked[0]) else 0.0
        return [t for t, _ in kept], [s - total for _, s in kept]

    def _may_follow(self, path: Path) -> np.ndarray | None:
        allowed = None
        if self._matcher is not None:
            taken = self._matcher.try_consume_tokens([*path])
            if taken == len(path):
                allowed = self._bits()
            self._matcher.rollback(taken)
        if self.length - self._start + len(path) >= self._least:
            return allowed
        found = np.ones(self._vocabulary, bool) if allowed is None else allowed.copy()
        found[self._ends] = False
        return found if found.any() else allowed

    def _bits(self) -> np.ndarray:
        if self._matcher.is_error():  # what may follow would take more work than is allowed
            found = np.zeros(self._vocabulary, bool)
            found[self._ends] = True
            return found
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].view(bool)


def caught_up(
    constraints: list[Constraint | None], tokens: Tensor, lengths: Tensor
) -> list[Constraint | None]:
    """Give constraints the tokens [B, L] that were committed; `lengths` [B] of them are."""
    if any(c is not None for c in constraints):
        for constraint, row, length in zip(constraints, tokens, lengths.tolist()):
            if constraint is not None:
                constraint.extend(row[constraint.length : length].tolist())
    return constraints


def exclude(
    logits: Tensor,
    constraints: list[Constraint | None],
    draft: Tensor,
    before: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Set the logits [B, n, V] of tokens that constraints exclude to -inf.

    Position i follows a draft's tokens [B, k] for which `before()` [B, n, k] is not 0; None: the
    last n of a chain's k + 1 positions.
    """
    if all(c is None for c in constraints):
        return logits
    n, k = logits.shape[1], draft.shape[1]
    drafts = draft.tolist()
    if before is None:
        orders = [[list(range(i)) for i in range(k + 1 - n, k + 1)]] * len(drafts)
    else:
        orders = [[[j for j in range(k) if row[j]] for row in of] for of in before().tolist()]
    excluded = np.zeros(logits.shape, bool)
    for b, constraint in enumerate(constraints):
        if constraint is None:
            continue
        for i, order in enumerate(orders[b]):
            allowed = constraint.allowed(tuple(drafts[b][j] for j in order))
            if allowed is not None:
                excluded[b, i] = ~allowed
    return logits.masked_fill(torch.from_numpy(excluded).to(logits.device), float("-inf"))

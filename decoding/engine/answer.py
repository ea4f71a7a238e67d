"""One request's answer: its tokens, its text, where it ends, and what may be streamed."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.engine.detokenize import Detokenizer
from decoding.engine.params import Chunk, Result, SamplingParams, Stats


class Answer:
    """One request's answer so far, on the host.

    Args:
        before: Tokens that its text goes on from.
        lossy: Of its stats.
    """

    def __init__(
        self,
        request: int,
        prompt: Any,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        lossy: str = "",
        before: Sequence[int] = (),
    ):
        self.request, self.prompt, self.params = request, prompt, params
        self._parts = tokenizer, before, _special_tokens(tokenizer, params.stop)
        self.stats, self.text = Stats(lossy=lossy), Detokenizer(*self._parts)
        self.token_ids: list[int] = []
        self._printed = self._sent = 0  # characters and tokens that chunks have shown

    def take(self, new: list[int], eos: frozenset[int], text: bool) -> Chunk | None:
        """Add a cycle's tokens up to the answer's end; return a chunk, or None while there is none.

        `eos` are tokens that end a text. With `text` False only a finished answer gives a chunk,
        and nothing is detokenised before.
        """
        params, before, count = self.params, len(self.token_ids), len(new)
        new, reason = self._ended(new, eos)
        self.token_ids += new
        shown = None
        if params.stop:
            known = self.text.extend(new)
            start = max(0, known - max(map(len, params.stop)))
            if self._stop(self.text, start) is not None:
                self.token_ids = self._tokens_until_stop(before)
                # Cut what these tokens say: a later token may complete an earlier stop string.
                until, reason = self._decoded(self.token_ids), "stop"
                shown = until.text[: until.shown(self._stop(until) or 0)]
        elif text:
            self.text.extend(new)
        self.stats.emitted.append(len(self.token_ids) - before)
        self.stats.beyond = count - self.stats.emitted[-1]
        if reason is None and not text:
            return None
        if shown is None:
            followed = self.text if text or params.stop else self._decoded(self.token_ids)
            shown = followed.text
        return self.chunk(shown, reason)

    def chunk(self, text: str, reason: str | None) -> Chunk | None:
        """Return the part of a text that was not shown yet; `reason` says why it has ended."""
        safe = text
        if not reason:
            safe = text[: self.text.shown(_safe_length(self.text.written, self.params.stop))]
        piece, self._printed = safe[self._printed :], max(self._printed, len(safe))
        if not (reason or piece):
            return None
        result = Result(text, self.token_ids, reason, self.stats) if reason else None
        new, self._sent = self.token_ids[self._sent :], len(self.token_ids)
        return Chunk(self.request, piece, new, result)

    def _ended(self, new: list[int], eos: frozenset[int]) -> tuple[list[int], str | None]:
        """Cut new tokens where the answer ends; the reason is None where it does not."""
        room = self.params.most - len(self.token_ids)
        if not self.params.ignore_eos:
            end = next((i for i, token in enumerate(new) if token in eos), None)
            if end is not None and end < room:
                return new[: end + 1], "eos"
        return (new[:room], "length") if len(new) >= room else (new, None)

    def _tokens_until_stop(self, before: int) -> list[int]:
        """Return the tokens up to the one that completes a stop string; it is after `before`."""
        for n in range(before + 1, len(self.token_ids)):
            if self._stop(self._decoded(self.token_ids[:n])) is not None:
                return self.token_ids[:n]
        return self.token_ids

    def _stop(self, text: Detokenizer, start: int = 0) -> int | None:
        """Return where the first stop string begins in the written text; None: there is none."""
        found = (text.written.find(s, start) for s in self.params.stop)
        return min((at for at in found if at >= 0), default=None)

    def _decoded(self, token_ids: list[int]) -> Detokenizer:
        text = Detokenizer(*self._parts)
        text.extend(token_ids)
        return text


def _special_tokens(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> dict[int, str]:
    """Return the special tokens in stop strings, which no text has: {id: content}."""
    found = {}
    for id in {id for s in stop for id in tokenizer(s, add_special_tokens=False).input_ids}:
        content = tokenizer.decode([id])
        if content and not tokenizer.decode([id], skip_special_tokens=True):
            found[id] = content
    return found


def _safe_length(text: str, stop: tuple[str, ...]) -> int:
    """Return how much of a growing text can be shown: no half character, no start of a stop."""
    safe = len(text.rstrip("�"))
    for s in stop:
        for n in range(min(len(s) - 1, safe), 0, -1):
            if text.endswith(s[:n], 0, safe):
                safe -= n
                break
    return safe

"""A chat with a model: its history within the model's context, and its terminal."""

import sys
import time
from contextlib import suppress

from data.text.chat import encode_prompt
from data.text.prompts import asks_in_chat
from decoding.engine.params import Chunk, SamplingParams, Stats
from decoding.engine.sampler import Sampler


class Chat:
    """A conversation through a model's chat template.

    Args:
        sampler: Of a model with a chat template.
        params: The parameters that answers are sampled with.
        system: The system's message; None leaves it to the template.

    Attributes:
        messages: The turns so far, `{"role": ..., "content": ...}`.
    """

    def __init__(self, sampler: Sampler, params: SamplingParams, system: str | None = None):
        if not sampler.continues:
            raise ValueError("chat=true needs a model that answers: this one fills holes")
        asks_in_chat(sampler.tokenizer, True)
        self._sampler, self._params = sampler, params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Forget all turns except the system's."""
        self.messages = [*self._system]

    def ask(self, question: str) -> None:
        """Print the answer to a question as it comes, and its cost on standard error.

        Question and answer are added to the history; after Ctrl-C, which ends the answer, the part
        that was printed, if any.
        """
        asked = {"role": "user", "content": question.strip()}
        prompt = self._fitting(asked)
        started, text, count, result = time.perf_counter(), "", 0, None
        with suppress(KeyboardInterrupt):
            for chunk in self._sampler.stream([prompt], self._params):
                text, count, result = text + chunk.text, count + len(chunk.token_ids), chunk.result
                print(shown(chunk), end="", flush=True)
        seconds = time.perf_counter() - started
        print(flush=True)
        aside(cost(count, seconds, result.stats, result.finish_reason) if result else "stopped")
        if result or text:
            self.messages += [asked, {"role": "assistant", "content": text}]

    def _fitting(self, asked: dict[str, str]) -> list[int]:
        """Return the prompt's token ids; forget the oldest turns if the context is short."""
        first, context = len(self._system), self._sampler.context
        given, most = self._params.max_new_tokens, self._params.most
        if given is None and context is not None:  # an answer may be shorter than usual
            most = min(most, context // 2)
        for start in range(first, len(self.messages) + 1, 2):
            kept = [*self._system, *self.messages[start:]]
            ids = encode_prompt(self._sampler.tokenizer, [*kept, asked])
            if context is None or len(ids) + most <= context:
                break
        else:
            if given is not None or len(ids) >= (context or 0):
                return ids  # the sampler refuses it, and nothing was forgotten in vain
        if start > first:
            count = (start - first) // 2
            aside(f"forgot the oldest turns ({count}): the model's context has {context} tokens")
            self.messages = kept
        return ids


def converse(chat: Chat) -> None:
    """Answer standard input line by line, until its end or /exit; /clear forgets the history."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with suppress(ImportError):  # input() edits lines with it; Windows has none
            import readline  # noqa: F401
        aside("/clear forgets the history, /exit ends the chat, Ctrl-C ends an answer")
        aside("tokens that came together: blue two or three, green more")
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print()
            continue
        if line == "/exit":
            return
        if line == "/clear":
            chat.clear()
        elif line:
            try:
                chat.ask(line)
            except ValueError as error:
                aside(f"error: {error}")


def cost(count: int, seconds: float, stats: Stats, reason: str) -> str:
    """Say how much an answer of `count` tokens cost, and why it ended."""
    return (
        f"{count} tokens in {seconds:.2f} s ({count / seconds:.0f} tokens/s), "
        f"{stats.target_passes} target passes, {stats.drafter_passes} drafter passes, "
        f"{stats.acceptance_length:.2f} tokens per target pass, ended by {reason}"
        + (f", lossy: {stats.lossy}" if stats.lossy else "")
    )


def shown(chunk: Chunk) -> str:
    """Return a chunk's text, coloured in a terminal by how many tokens came at once.

    One token, as in plain decoding, has no colour; two or three are blue, more are green.
    """
    colour = 34 if len(chunk.token_ids) < 4 else 32
    if len(chunk.token_ids) < 2 or not chunk.text or not sys.stdout.isatty():
        return chunk.text
    return f"\x1b[{colour}m{chunk.text}\x1b[0m"


def aside(line: str) -> None:
    """Print a line to standard error, dim in a terminal."""
    print(f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)

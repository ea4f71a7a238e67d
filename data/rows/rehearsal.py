"""Ordinary text beside a model's own answers, so that it does not forget what is not in them.

Rehearsal: Robins, Catastrophic forgetting, rehearsal and pseudorehearsal (1995). Not in pcLLM's
paper, whose training set is large; a small one needs it.
"""

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data.rows.documents import documents
from data.rows.packing import PackedRows
from data.rows.trajectories import Answer, Trajectories, rows


def answers_and_text(
    source: str,
    model: str,
    text: str,
    share: float,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
) -> "Rehearsed":
    """The trajectories of a collection (see `data.rows.trajectories.rows`), and rows of a corpus.

    text: the corpus (see `data.corpora.sources.load_documents`). share: of rows that are ordinary
    text, in [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"share={share} is not allowed: it must be in [0, 1)")
    answers = rows(source, model, tokenizer, folder)
    P, N, n = answers.shape
    return Rehearsed(answers, documents(text, P + N * n, tokenizer, folder), share)


class Rehearsed(Dataset):
    """Rows of text, each as an answer without wrong guesses, among `answers`.

    The answers are repeated until all of the text has its share; of a small corpus, all is taken.
    """

    def __init__(self, answers: Trajectories, text: PackedRows, share: float):
        self.answers, self.text = answers, text
        beside = len(answers) * share / (1 - share)  # rows of text for all answers once
        self.repeats = max(1, round(len(text) / beside)) if share else 1
        self.count = min(len(text), round(self.repeats * beside))

    def __len__(self) -> int:
        return self.repeats * len(self.answers) + self.count

    def __getitem__(self, i: int) -> Answer:
        place = i - self.count
        if place >= 0:
            return self.answers[place % len(self.answers)]
        row = self.text[i * len(self.text) // self.count]
        return as_answer(row["input_ids"][row["document"] == 0], *self.answers.shape)


def as_answer(ids: Tensor, prompt_length: int, blocks: int, block_size: int) -> Answer:
    """Text of at least two tokens as a prompt and its answer, whose only states are right ones."""
    P, N, n = prompt_length, blocks, block_size
    cut = min(P, len(ids) - 1)
    prompt, rest = ids[:cut], ids[cut : cut + N * n]
    clean = rest.new_zeros(N * n)
    clean[: len(rest)] = rest
    padded = prompt.new_zeros(P)
    padded[P - cut :] = prompt
    clean = clean.view(N, n)
    return Answer(padded, cut, clean, len(rest), [block[None] for block in clean])

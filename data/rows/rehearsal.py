"""Rehearsal: ordinary text mixed into a model's own answers, against catastrophic forgetting.

Source: Robins, Catastrophic forgetting, rehearsal and pseudorehearsal (1995). pcLLM's paper does
not use it, because its training set is large.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data.arguments import Count
from data.rows.documents import documents
from data.rows.packing import PackedRows
from data.rows.trajectories import Answer, Trajectories, rows


def answers_and_text(
    source: str,
    model: str,
    text: str,
    share: Annotated[float, Field(ge=0, lt=1)],
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    where: str | None = None,
    subset: str | None = None,
    limit: Count | None = None,
) -> "Rehearsed":
    """Return a training set of trajectories and rows of ordinary text.

    Args:
        source, where: The collection of trajectories, as in `data.rows.trajectories.rows`.
        model: The model that is trained.
        text, subset: The corpus, as in `data.corpora.sources.load_documents`.
        share: Fraction of rows that are ordinary text, in [0, 1).
        tokenizer: The model's.
        folder: Cache of rows.
        limit: Documents of the text, at the most.
    """
    answers = rows(source, model, tokenizer, folder, where=where)
    P, N, n = answers.shape
    others = documents(text, P + N * n, tokenizer, folder, subset=subset, limit=limit)
    return Rehearsed(answers, others, share)


class Rehearsed(Dataset):
    """A mix of trajectories and rows of text; a row of text is an answer without wrong tokens.

    Answers are repeated until all rows of text make up their share, in [0, 1). A corpus too small
    for its share of one pass over the answers is used whole.
    """

    def __init__(self, answers: Trajectories, text: PackedRows, share: float):
        self.answers, self.text = answers, text
        text_rows = len(answers) * share / (1 - share)  # per pass over the answers
        self.repeats = max(1, round(len(text) / text_rows)) if share else 1
        self.count = min(len(text), round(self.repeats * text_rows))

    @property
    def fingerprint(self) -> str:
        """The fingerprints of both parts."""
        return f"{self.answers.fingerprint}+{self.text.fingerprint}"

    @property
    def largest_id(self) -> int:
        """The largest token id of both parts."""
        return max(self.answers.largest_id, self.text.largest_id)

    def __len__(self) -> int:
        return self.repeats * len(self.answers) + self.count

    def __getitem__(self, i: int) -> Answer:
        if i >= self.count:
            return self.answers[(i - self.count) % len(self.answers)]
        row = self.text[i * len(self.text) // self.count]
        return as_answer(row["input_ids"][row["document"] == 0], *self.answers.shape)


def as_answer(ids: Tensor, prompt_length: int, blocks: int, block_size: int) -> Answer:
    """Return a text of at least two tokens as an `Answer` whose only states are fixed points."""
    P, N, n = prompt_length, blocks, block_size
    cut = min(P, len(ids) - 1)
    prompt, rest = ids[:cut], ids[cut : cut + N * n]
    clean = rest.new_zeros(N * n)
    clean[: len(rest)] = rest
    padded = prompt.new_zeros(P)
    padded[P - cut :] = prompt
    clean = clean.view(N, n)
    return Answer(padded, cut, clean, len(rest), [block[None] for block in clean])

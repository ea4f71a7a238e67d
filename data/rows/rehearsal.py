"""Rehearsal: ordinary text mixed into a model's own answers, against catastrophic forgetting.

Source: Robins, Catastrophic forgetting, rehearsal and pseudorehearsal (1995). Not part of pcLLM's
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
    where: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
) -> "Rehearsed":
    """A training set of trajectories and rows of ordinary text.

    Args:
        source: the collection of trajectories, as in `data.rows.trajectories.rows`.
        model: the model that is trained.
        text: the corpus, as in `data.corpora.sources.load_documents`.
        share: fraction of rows that are ordinary text, in [0, 1).
        tokenizer: the model's.
        folder: cache of rows.
        where: of the answers, as in `data.rows.trajectories.rows`.
        subset: of the text, as in `load_documents`.
        limit: documents of the text, at the most.

    Raises:
        ValueError: for a share outside [0, 1), and as `data.rows.trajectories.rows` does.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share={share} is not allowed: it must be in [0, 1)")
    answers = rows(source, model, tokenizer, folder, where=where)
    P, N, n = answers.shape
    which = {"subset": subset, "limit": limit}
    return Rehearsed(answers, documents(text, P + N * n, tokenizer, folder, **which), share)


class Rehearsed(Dataset):
    """A mix of trajectories and rows of text; a row of text is an answer without wrong tokens.

    The answers are repeated until all rows of text make up their share. A corpus that is too small
    for its share of one pass over the answers is used whole.

    Args:
        answers: the trajectories.
        text: rows of text.
        share: fraction of rows that are text, in [0, 1).
    """

    def __init__(self, answers: Trajectories, text: PackedRows, share: float):
        self.answers, self.text = answers, text
        text_rows = len(answers) * share / (1 - share)  # per pass over the answers
        self.repeats = max(1, round(len(text) / text_rows)) if share else 1
        self.count = min(len(text), round(self.repeats * text_rows))

    def __len__(self) -> int:
        return self.repeats * len(self.answers) + self.count

    def __getitem__(self, i: int) -> Answer:
        if i >= self.count:
            return self.answers[(i - self.count) % len(self.answers)]
        row = self.text[i * len(self.text) // self.count]
        return as_answer(row["input_ids"][row["document"] == 0], *self.answers.shape)


def as_answer(ids: Tensor, prompt_length: int, blocks: int, block_size: int) -> Answer:
    """A row of text as a prompt and its answer, whose trajectories are the fixed points alone.

    Args:
        ids: at least two tokens.
        prompt_length: P, the maximum tokens of the prompt.
        blocks: N, the maximum blocks of the answer.
        block_size: n, tokens per block.
    """
    P, N, n = prompt_length, blocks, block_size
    cut = min(P, len(ids) - 1)
    prompt, rest = ids[:cut], ids[cut : cut + N * n]
    clean = rest.new_zeros(N * n)
    clean[: len(rest)] = rest
    padded = prompt.new_zeros(P)
    padded[P - cut :] = prompt
    clean = clean.view(N, n)
    return Answer(padded, cut, clean, len(rest), [block[None] for block in clean])

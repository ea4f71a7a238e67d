"""`python -m decoding.bench.heldout_loss model=runs/ar_target/export also=[...]`.

The next-token loss of causal LMs on the same held-out text, compared with the first model's: it
shows what a change of weights has cost. Written as a table and `heldout_loss.csv`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corpora.answers import read_answers
from data.rows.documents import checked_manifest, documents
from data.rows.packing import Encoded
from data.rows.stream import Stream
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import DTYPES, MeasureOptions, option
from decoding.commands.report import results, write_table
from decoding.loading import (
    check_one_tokenizer,
    is_drafter,
    load,
    load_tokenizer,
    parade_config,
)
from models.placement import input_device


@dataclass(frozen=True, kw_only=True)
class HeldoutLoss(MeasureOptions):
    """Mean next-token loss in nats of causal LMs on the same held-out tokens."""

    EXAMPLE: ClassVar[str] = "model=runs/ar_target/export also=[runs/pcllm_round1/export]"

    also: tuple[str, ...] = option((), "further models of its tokenizer, compared with it")
    source: str = option("stdlib", "the corpus, as data.validation of a recipe names it")
    subset: str | None = option(None, "a Hub data set's own name")
    split: str = option("heldout", "of the corpus")
    limit: int | None = option(None, "documents of the corpus, at the most; null: all", least=1)
    length: int = option(256, "tokens of a row of the corpus", least=1)
    answers: str | None = option(
        None, "a collection (runs/deer_answers), whose held-out answers count after their prompts"
    )
    rows: int = option(
        256, "of the corpus, and answers, at most; in the order of a run's validation", least=1
    )
    batch_size: int = option(8, "texts in a forward", least=1)
    runs: str = option("runs", "where the run of that seed keeps its data")
    dtype: str = option("float32", "of the weights in memory", choices=DTYPES)
    out: str = option("heldout_loss", "folder of the results")


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    h = parse(argv, HeldoutLoss, "decoding.bench.heldout_loss")
    names = tuple(dict.fromkeys((h.model, *h.also)))
    for name in names:
        if is_drafter(parade_config(name)):
            raise ValueError(f"{name} is a drafter, which changes no text: give its target")
    check_one_tokenizer({name: load_tokenizer(name) for name in names})
    with results(Path(h.out)) as out:
        texts = heldout_texts(h, load_tokenizer(h.model))
        tokens = ", ".join(f"{sum(sum(t) for _, t in of)} of {what}" for what, of in texts.items())
        title = f"next-token loss in nats, {h.dtype}, held-out tokens: {tokens}"
        lines = [{"model": name, **losses(h, name, texts)} for name in names]
        for line in lines:
            for what in texts:
                line[f"{what}, % above first"] = round(100 * (line[what] / lines[0][what] - 1), 2)
        lines = [{k: round(x, 4) if k in texts else x for k, x in line.items()} for line in lines]
        write_table(lines, out / "heldout_loss.csv", title, "decoding.bench.heldout_loss")


def losses(h: HeldoutLoss, name: str, texts: dict[str, list[Encoded]]) -> dict[str, float]:
    """The mean loss in nats of one model on each kind of text."""
    sampler = load(name, **h.placing)
    if not sampler.continues:
        raise ValueError(f"{name} fills holes and predicts no next token: give causal LMs")
    return {what: mean_loss(sampler.target, of, h.batch_size) for what, of in texts.items()}


def heldout_texts(h: HeldoutLoss, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Encoded]]:
    """The texts to measure on.

    Args:
        h: The command's options.
        tokenizer: Of all models.

    Returns:
        `(ids, trained)` of every text, by its kind: 'corpus', 'answers'.

    Raises:
        ValueError: A kind has no held-out token to predict, or the collection cannot be used.
    """
    if h.answers is not None:
        checked_manifest(h.answers, tokenizer)  # before rows of the corpus are written
    which = {"split": h.split, "subset": h.subset, "limit": h.limit}
    corpus = documents(h.source, h.length, tokenizer, f"{h.runs}/data", **which)
    stream = Stream(corpus, h.seed)
    chosen = (stream[n] for n in range(min(h.rows, len(corpus))))
    texts = {"corpus": [text for row in chosen for text in split_row(row)]}
    if h.answers is not None:
        answers = [(a.ids, a.trained) for a in read_answers(h.answers, "heldout")]
        stream = Stream(answers, h.seed)
        texts["answers"] = [stream[n] for n in range(min(h.rows, len(answers)))]
    for what, of in texts.items():
        if not any(any(trained[1:]) for _, trained in of):
            raise ValueError(
                f"there is no held-out token to predict in the {what} of "
                f"{h.source if what == 'corpus' else h.answers}: about one text in forty is held "
                "out, so give more of them"
            )
    return texts


def split_row(row: dict[str, Tensor]) -> Iterator[Encoded]:
    """The documents of a packed row, each as a separate text.

    >>> row = dict(input_ids=[5, 6, 7, 0], document=[0, 0, 1, -1], trained=[1, 0, 1, 0])
    >>> list(split_row({k: torch.tensor(v) for k, v in row.items()}))
    [([5, 6], [True, False]), ([7], [True])]
    """
    for number in range(int(row["document"].max()) + 1):
        here = row["document"] == number
        yield row["input_ids"][here].tolist(), row["trained"][here].bool().tolist()


@torch.inference_mode()
def mean_loss(network: PreTrainedModel, texts: list[Encoded], batch_size: int) -> float:
    """The mean of -log p(x_{i+1} | x_{<=i}) over the trained tokens except each text's first.

    Args:
        network: A causal LM.
        texts: Token ids, and whether each token is trained on.
        batch_size: Texts in a forward.

    Returns:
        Nats per token.
    """
    total, count = 0.0, 0
    texts = sorted(texts, key=lambda text: len(text[0]))
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        # Padding comes after the text, so a causal model sees none of it.
        ids, trained = (
            pad_sequence([torch.tensor(text[i]) for text in batch], batch_first=True).to(
                input_device(network)
            )
            for i in (0, 1)
        )
        logits = network(input_ids=ids, use_cache=False).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        weight = trained[:, 1:].double()
        total += float((nll * weight).sum())
        count += int(weight.sum())
    return total / count


if __name__ == "__main__":
    main(run)

"""Chats of several turns: each is answered in its place, after the model's own earlier answers."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from data.text.prompts import next_prompt


class Turns:
    """Collects the answers to prompts and to the later questions of their chats.

    Attributes:
        left_out: Why prompts, or their later turns, have no answer, by the prompts' ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.left_out: dict[str, str] = {}

    def collect(
        self, asked: list[dict], decode: Callable[[list[dict]], list[dict | str]]
    ) -> list[dict]:
        """Return the rows of prompts, with `turn`, the number of the question in its chat.

        `decode` gives a row for each prompt, or says why there is none.
        """
        rows: list[dict] = []
        while asked:
            later = []
            for prompt, row in zip(asked, decode(asked)):
                if isinstance(row, str):
                    self.left_out.setdefault(prompt["id"], row)
                    continue
                rows.append(row | {"turn": prompt.get("turn", 0)})
                if row["answer_ids"] is None or not prompt.get("later"):
                    continue
                try:
                    later.append(next_prompt(prompt, self.tokenizer, row["answer_ids"]))
                except ValueError as error:  # of the template
                    self.left_out.setdefault(prompt["id"], str(error))
            asked = later
        return rows

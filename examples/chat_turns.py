"""Time to the first token of each turn of chats, asked of a server that decodes nothing else.

python -m decoding.serve model=org/name port=8000 prefix_gb=0.5
python examples/chat_turns.py http://127.0.0.1:8000/v1
"""

import statistics
import sys
import time

from openai import OpenAI

QUESTIONS = [
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "Now let it take a function that gives the key by which two items are the same.",
    "Add type hints and a docstring with an example.",
    "Which cases should the tests cover? Name five of them in a list.",
    "Write the first two of these tests with pytest.",
]
CHATS = 8


def main(address: str) -> None:
    """Hold CHATS chats and print the median seconds to the first token of each turn."""
    client = OpenAI(base_url=address, api_key="none")
    model = client.models.list().data[0].id
    seconds: list[list[float]] = [[] for _ in QUESTIONS]
    for number in range(CHATS):
        messages = [{"role": "system", "content": f"You are engineer {number} of a small team."}]
        for turn, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question})
            started, first, text = time.perf_counter(), None, ""
            for piece in client.chat.completions.create(
                model=model, messages=messages, max_tokens=96, temperature=0, stream=True
            ):
                if first is None:
                    first = time.perf_counter() - started
                text += piece.choices[0].delta.content or ""
            seconds[turn].append(first)
            messages.append({"role": "assistant", "content": text})
    for turn, found in enumerate(seconds, 1):
        print(f"turn {turn}: {1000 * statistics.median(found):.0f} ms to the first token")


if __name__ == "__main__":
    main(sys.argv[1])

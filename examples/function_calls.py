"""Function calls asked of a server: whether they are valid, with drafts and without.

    python -m decoding.serve model=org/drafter chat_template=examples/smollm2/tools.jinja
    python examples/function_calls.py http://127.0.0.1:8000/v1

200 requests, sixteen at a time, each with three functions of ten and a question with values of its
own. A call is valid if it names a function that was offered and its arguments match that schema.
"""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

COUNT = 200
TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
FUNCTIONS = {  # arguments by name, and a question
    "weather": ({"city": TEXT, "unit": {"enum": ["C", "F"]}}, "How warm is it in {word} today?"),
    "add": ({"a": WHOLE, "b": WHOLE}, "What is {n} plus {m}?"),
    "convert": (
        {"amount": NUMBER, "to": {"enum": ["EUR", "USD", "JPY"]}},
        "How many euros are {n} dollars?",
    ),
    "search": ({"query": TEXT, "limit": {**WHOLE, "minimum": 1}}, "Find {m} pages on {word}."),
    "remind": ({"what": TEXT, "minutes": WHOLE}, "Remind me of {word} in {n} minutes."),
    "play": ({"artist": TEXT, "loud": {"type": "boolean"}}, "Play {word}, not too loud."),
    "book": (
        {"people": WHOLE, "days": {"type": "array", "items": TEXT, "maxItems": 3}},
        "A table for {m} on Friday, please.",
    ),
    "email": ({"to": TEXT, "subject": TEXT}, "Write to {word} about invoice {n}."),
    "area": ({"sides": {"type": "array", "items": NUMBER, "maxItems": 4}}, "A field {n} by {m}?"),
    "now": ({}, "What time is it?"),
}
WORDS = ("Lima", "jazz", "the dentist", "Oslo", "chess", "Maria", "volcanoes", "a blue car")


def tool(name: str) -> dict:
    """Return a function as a request offers it."""
    arguments = FUNCTIONS[name][0]
    schema = {"type": "object", "properties": arguments, "required": [*arguments]}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def request(number: int) -> dict:
    """Return the fields of one request."""
    draw = random.Random(number)
    names = draw.sample([*FUNCTIONS], 3)
    values = {"word": draw.choice(WORDS), "n": draw.randint(2, 900), "m": draw.randint(2, 9)}
    question = FUNCTIONS[names[0]][1].format(**values)
    return {
        "messages": [{"role": "user", "content": question}],
        "tools": [tool(name) for name in names],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": number % 2,
        "seed": number,
        "max_tokens": 160,
        "extra_body": {"verify": "tree"},
    }


def matches(value: object, schema: dict) -> bool:
    """Return whether a value is what one of the schemas above says."""
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] != "boolean" and isinstance(value, bool):
        return False
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, list):
        return len(value) <= schema["maxItems"] and all(matches(x, schema["items"]) for x in value)
    return value >= schema["minimum"] if "minimum" in schema else True


def valid(choice, asked: dict) -> bool:
    """Return whether a choice calls an offered function with arguments of its schema."""
    (call,) = choice.message.tool_calls or [None]
    offered = {t["function"]["name"] for t in asked["tools"]}
    if call is None or call.function.name not in offered:
        return False
    given, schema = json.loads(call.function.arguments), FUNCTIONS[call.function.name][0]
    return given.keys() == schema.keys() and all(matches(given[k], schema[k]) for k in schema)


def main(address: str) -> None:
    """Ask the server's two models, and print the figures of each."""
    client = OpenAI(base_url=address, api_key="none", timeout=600)
    said = {}
    for model in [m.id for m in client.models.list().data]:

        def answer(number: int, model: str = model):
            return client.chat.completions.create(model=model, **request(number))

        with ThreadPoolExecutor(16) as pool:
            found = [*pool.map(answer, range(COUNT))]
        choices = [answer.choices[0] for answer in found]
        cut = sum(choice.finish_reason == "length" for choice in choices)
        good = sum(
            c.finish_reason == "tool_calls" and valid(c, request(n)) for n, c in enumerate(choices)
        )
        said[model] = [
            (c.message.content, [k.function for k in c.message.tool_calls or []]) for c in choices
        ]
        tokens = sum(answer.usage.completion_tokens for answer in found)
        passes = sum(answer.usage.target_passes for answer in found)
        print(
            f"{model}: {good} of {COUNT} valid, {cut} cut off by max_tokens; "
            f"{tokens} tokens in {passes} passes of the target"
        )
    first, *others = said.values()
    print("equal calls:", all(other == first for other in others))


if __name__ == "__main__":
    main(sys.argv[1])

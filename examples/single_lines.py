"""HumanEval's problems as infilling problems: one line of each solution is hidden.

The holes are those of HumanEval's single-line infilling (arXiv 2207.14255), one a problem: the line
is drawn among those that are not blank.

python examples/single_lines.py humaneval.jsonl lines.jsonl
"""

import json
import random
import sys
from pathlib import Path


def main(source: str, to: str) -> None:
    """Read HumanEval's problems from one file and write those of infilling to another."""
    draw = random.Random(0)
    with Path(to).open("w") as out:
        for text in Path(source).read_text().splitlines():
            problem = json.loads(text)
            lines = problem["canonical_solution"].splitlines(keepends=True)
            hidden = draw.choice([i for i, line in enumerate(lines) if line.strip()])
            line = lines[hidden].rstrip("\n")
            problem["prompt"] += "".join(lines[:hidden])
            problem["suffix"] = "".join(lines[hidden:])[len(line) :]
            problem["canonical_solution"] = line
            out.write(json.dumps(problem) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

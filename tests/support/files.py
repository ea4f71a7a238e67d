"""Files that tests write."""

import json


def write_jsonl(path, rows):
    """Write rows as JSON lines; return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

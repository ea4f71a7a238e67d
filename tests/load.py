"""Load on a server: clients that come, hang up and attack it; a text must be its seed's alone.

    python -m tests.load model=runs/deer_stage2/export minutes=10 clients=32

Mixed lengths and temperatures from 12 seeds; 20% match a grammar, 20% must call a tool, 10% are cut
off after their first piece, 5% are malformed. In every other of ten parts of the time 5% more
clients keep half requests and unread streams open, and send what is large and senseless: others'
times may grow by a tenth at the most. At the end every kind of request is asked again, alone, and
SIGTERM must end the server within its grace, whoever holds a connection.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.load import TEMPLATE, measured, wrong


def main(folder: str) -> None:
    """Start the server, load it, and print what came of it; status 1 where a text was another."""
    given = dict(pair.partition("=")[::2] for pair in sys.argv[1:])
    minutes, clients = float(given.pop("minutes", 10)), int(given.pop("clients", 32))
    template = Path(folder, "template.jinja")
    template.write_text(TEMPLATE)
    given.setdefault("chat_template", str(template))
    command = [sys.executable, "-m", "decoding.serve", "port=0", "dtype=float32"]
    process = subprocess.Popen(
        [*command, *(f"{k}={v}" for k, v in given.items())], stdout=subprocess.PIPE, text=True
    )
    try:
        while not (found := re.search(r"http://\S+/", line := process.stdout.readline())):
            assert line, "the server has ended"
        result = asyncio.run(measured(found[0], process, 60 * minutes, clients))
    finally:
        process.kill()
    print(json.dumps(result, indent=1))
    sys.exit(bool(wrong(result)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(made)

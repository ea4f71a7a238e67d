"""Files of strangers: what a folder holds is changed at random, by damage and on purpose."""

import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import yaml

WRITES = "PWNED"  # the file that code writes where it runs
CALL = f"__import__('pathlib').Path({WRITES!r}).write_text('ran')"
ODD = (
    *(None, "", "x", -1, 0, 1.5, 10**6, 10**12, 10**400, True, [], {}, [0], [[[]]], float("nan")),
    *("../../x", "/etc/passwd", "${seed}", "${oc.env:HOME}", "{{ 1/0 }}", "\ud800", "a" * 10**6),
    {"_target_": "os.system", "_args_": [f"touch {WRITES}"]},
    {"_target_": "decoding.loading.load_tokenizer", "_args_": [".", True]},
    {"auto_map": {"AutoTokenizer": ["code.T", "code.T"], "AutoConfig": "code.T"}},
)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(9 * ['*' + before])}]\n"
    for before, name in zip("abcdefgh", "bcdefghi")
)
WHOLE = (
    *(b"", b"[]", b"null", b"{}", b"3", b"\xff\xfe", b"9" * 5000, b"[" * 100_000),
    b'{"a":' * 50_000,
    BOMB.encode(),
    CALL.encode(),
)  # fmt: skip


class Calls:
    """A pickle that calls something."""

    def __reduce__(self):
        return eval, (CALL,)


def theirs(folder: Path, copy: Path) -> None:
    """Copy a folder, its large files by links: no command writes into one of these."""
    shutil.copytree(folder, copy, copy_function=link_if_large)


def link_if_large(source: str, copy: str) -> None:
    if os.path.getsize(source) < 100_000:
        shutil.copy(source, copy)
    else:
        os.link(source, copy)


def damage(draw: random.Random, folder: Path) -> str:
    """Change one file of a folder; what was done."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    small = [f for f in files if f.suffix in (".json", ".yaml", ".jinja", ".csv", ".metadata")]
    file = draw.choice(small if small and draw.random() < 0.5 else files)
    data = file.read_bytes()
    file.unlink()
    ways = ["gone", "cut", "bytes", "whole", "link", "pickle"]
    if file.suffix in (".json", ".yaml", ".jsonl"):
        ways += 8 * ["value"]
    way = draw.choice(ways)
    if way == "link":
        file.symlink_to(draw.choice(["/etc/hostname", "..", "/dev/zero", file.name]))
    elif way != "gone":
        file.write_bytes(CHANGES[way](draw, data, file))
    return f"{way} of {file.relative_to(folder)}"


def cut(draw, data, _):
    return data[: draw.randrange(len(data) + 1)]


def flipped(draw, data, _):
    found = bytearray(data)
    for _ in range(draw.choice([1, 3, 30])):
        if found:
            found[draw.randrange(min(len(found), draw.choice([100, 10_000, 10**8])))] = (
                draw.randrange(256)
            )
    return bytes(found)


def whole(draw, *_):
    return draw.choice(WHOLE)


def pickled(_, data, file):
    """A pickle that calls, in the place of the archive's own where there is one."""
    calls = pickle.dumps(Calls())
    file.write_bytes(data)
    if not zipfile.is_zipfile(file):
        return calls
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, calls if name.endswith("data.pkl") else part)
    return file.read_bytes()


def value(draw, data, file):
    """A value somewhere in a file of settings becomes another, or goes, or gets a neighbour."""
    read, write = (
        (yaml.safe_load, yaml.safe_dump) if file.suffix == ".yaml" else (json.loads, json.dumps)
    )
    head, _, rest = data.partition(b"\n") if file.suffix == ".jsonl" else (data, b"", b"")
    node = tree = [read(head)]
    while True:
        keys = [*(node if isinstance(node, dict) else range(len(node)))]
        if not keys:
            break
        key = draw.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.8:
            node = node[key]
            continue
        if isinstance(node, dict) and draw.random() < 0.2:
            node[draw.choice(["_args_", "_target_", "_partial_", "auto_map", "x"])] = node.pop(key)
        elif isinstance(node, dict) and draw.random() < 0.2:
            del node[key]
        else:
            node[key] = draw.choice(ODD)
        break
    try:
        return write(tree[0]).encode(errors="surrogatepass") + (b"\n" + rest if rest else b"")
    except ValueError:  # a number too long to be written
        return data


CHANGES = {"cut": cut, "bytes": flipped, "whole": whole, "pickle": pickled, "value": value}

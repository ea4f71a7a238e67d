"""Any arguments of any command, and any file, end in its work or in one line, within seconds.

`python -m tests.fuzz [inputs=1000] [seed=0] [files=0.5]`: every command's own `run`, on tiny
models, with one to three arguments that are drawn: a key of it, or a broken one, with a value of
any kind; or with a changed file in a folder that it reads (`tests.support.damage`). Status 1 where
one ends in a traceback, takes 20 s of CPU or a minute, says an error in more than a line, leaves a
file in the working directory beside its error, writes outside of it, or runs code of a file.
"""

import importlib
import io
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from data.arguments import Count, Seed, Share
from decoding.bench import image_metrics
from recipes.compose import defaults, paths
from recipes.options import Options, option, parse
from tests.support.damage import WRITES, damage, theirs
from tests.support.lab import Lab, fit_images, prepared

SECONDS = 20
# Values of any kind; no path that could be written to outside of the folder of an input.
ODD = (
    "",
    "null",
    *("[]", "{}", "[1", "[[1]]", "[null]", "[0.9]", "[1,a]", "{a: 1}", "''"),
    *("-1", "0", "1", "3", "0.5", "1e9", "1e-9", "nan", "-inf", "1000000000", "9" * 20),
    *("abc", "true", "cuda", "gpu", "cpu:7", "auto", "${x}", "${seed}", "\x00", "é"),
    *("../x", "/dev/zero", "/proc/x", "org/name/x", "[method=asarm]", "[nodes=-1]"),
)


@dataclass(frozen=True, kw_only=True)
class Fuzz(Options):
    """Draw inputs of every command."""

    inputs: Count = option(1000, "how many")
    seed: Seed = option(0, "of what is drawn")
    files: Share = option(0.5, "share of inputs that change a file instead of arguments")


def commands(lab: Lab) -> dict[str, tuple[list[str], list[str]]]:
    """{module: (arguments that work, keys)} of every command."""
    drafter, target = (str(lab.runs / r / "export") for r in ("deer_stage1", "ar_target"))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        lab.fit("dllm_block")
        graph, infilling = (lab.fit(r) for r in ("spiffy_calibrate", "asarm_joint"))
        fit_images(lab.runs, "cspd_target")
        images = fit_images(lab.runs, "cspd_draft", "module.gamma=2")
    texts = [f"source={lab.corpus}", "prompts=2", "prompt_length=8", "max_new_tokens=4"]
    windows = [f"source={lab.corpus}", "samples=2", "length=8", "block_sizes=[2]"]
    few = ["images=2", "samples=4", "batch_sizes=[1]", "batches=1"]
    found = {
        "decoding.generate": [f"model={drafter}", "prompt=self", "max_new_tokens=4"],
        "decoding.bench.text": [f"model={drafter}", *texts, "temperatures=[0]", "verify=[coupled]"],
        "decoding.bench.denoise": [f"model={graph}", *texts, "temperatures=[0]"],
        "decoding.bench.infill": [f"model={infilling}", *windows],
        "decoding.bench.images": [f"model={images}", *few, "gammas=[1]", "prefills=[0.5]"],
        "decoding.bench.fid": [f"model={images}", "real=digits", "features=digits", "samples=4"],
        "decoding.images": [f"model={images}", "classes=[1]", "count=1"],
        "decoding.bench.heldout_loss": [f"model={target}", f"source={lab.corpus}", "rows=2"],
        "decoding.calibrate": [
            f"model={drafter}",
            f"answers={lab.runs / 'deer_answers'}",
            *texts,
            "split=train",
        ],
        "trainers.export": [f"run={lab.runs / 'deer_stage1'}"],
    }
    digits = image_metrics._digits()  # it is trained for seconds
    image_metrics._digits = lambda: digits
    keys = {module: options_of(module) for module in found}
    quick = ["name=own", "build_inputs=false"]  # an input that is built takes minutes
    for recipe in ("ar_target", "deer_stage1"):
        once = ["resume=never", "trainer.max_steps=1"]
        found[f"trainers.fit {recipe}"] = [*lab.arguments(recipe), *quick, *once]
        keys[f"trainers.fit {recipe}"] = paths(defaults("fit", recipe, "lab"))
        keys[f"trainers.fit {recipe}"].remove("trainer.compile")  # which takes a minute
    found["decoding.collect"] = lab.collect_arguments("prompts.count=2", *quick)
    keys["decoding.collect"] = paths(defaults("collect", "deer_answers", "lab"))
    return {module: (found[module], keys[module]) for module in found}


def options_of(module: str) -> list[str]:
    """The keys of a command's options."""
    kinds = [k for k in vars(importlib.import_module(module)).values() if isinstance(k, type)]
    (kind,) = (k for k in kinds if issubclass(k, Options) and hasattr(k, "EXAMPLE"))
    return [f.name for f in fields(kind)]


def drawn(draw: random.Random, keys: list[str]) -> list[str]:
    """One to three arguments."""
    found = []
    for _ in range(draw.randint(1, 3)):
        key, value = draw.choice(keys), draw.choice([*ODD, str(draw.randint(-5, 99))])
        sign = draw.choice(["", "", "", "", "+", "~", "++"])
        if draw.random() < 0.05:
            key = "".join(draw.choices("abc._=-[]{}$~ ", k=draw.randint(0, 6)))
        found.append(f"{sign}{key}={value}" if sign != "~" else f"~{key}")
    return found


def files() -> set[Path]:
    """All files below the working directory but whole packed rows, which serve the next run."""
    found = {path for path in Path().rglob("*") if path.is_file()}
    return {path for path in found if not (path.parent / "document.npy").is_file()}


class Watch:
    """A recorder of audit events: code, processes and writes that a command must not cause."""

    def __init__(self, root: Path):
        self.root, self.seen, self.here = str(root), [], None
        sys.addaudithook(self.hook)

    def hook(self, event: str, given: tuple) -> None:
        """Note code of a stranger's file, its commands, and files that are written elsewhere."""
        if self.here is None:
            return
        if event == "exec" and getattr(given[0], "co_filename", "").startswith(self.here):
            self.seen.append(f"code of {given[0].co_filename}")
        elif event in ("os.system", "os.exec", "subprocess.Popen") and WRITES in str(given):
            self.seen.append(f"{event} {given}")
        elif event == "open" and isinstance(given[0], str) and given[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.abspath(given[0])
            inside = path.startswith((self.here, f"{self.root}/runs/"))  # the folders of arguments
            if (path.startswith(self.root) and not inside) or path.endswith(WRITES):
                self.seen.append(f"writes {path}")


def changed(draw: random.Random, arguments: list[str], root: Path) -> tuple[list[str], str]:
    """Copy one of the folders that arguments name, change a file in it: (arguments, what)."""
    given = [(i, *a.partition("=")[::2]) for i, a in enumerate(arguments)]
    runs = root / "runs"
    given = [(i, key, path) for i, key, path in given if runs in (Path(path), *Path(path).parents)]
    i, key, folder = draw.choice(given)
    theirs(Path(folder), Path("theirs"))
    found = [*arguments]
    found[i] = f"{key}=theirs"
    changes = Path("theirs")
    if key == "runs":  # the recipe's own, or one of all
        own = changes / arguments[0].removeprefix("recipe=")
        changes = own if draw.random() < 0.5 else draw.choice(sorted(changes.iterdir()))
    steps = sorted(changes.glob("checkpoints/*"))
    if steps and draw.random() < 0.5:
        found = [a for a in found if a != "resume=never"]
        found.append(f"{'checkpoint' if key == 'run' else 'resume'}={draw.choice(steps)}")
    return found, damage(draw, changes)


def attempt(module: str, arguments: list[str]) -> tuple[str, str]:
    """How a command ends ('worked', 'one line' or what is wrong), and what it said."""

    rang = []

    def late(*_):
        rang.append(True)
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGPROF, late)
    signal.alarm(3 * SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of CPU, as others may run beside
    before, out = files(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out):
            importlib.import_module(module.partition(" ")[0]).run(arguments)
        return "worked", ""
    except (ValueError, OSError) as error:
        if rang:  # a command may have made a line of it
            return "LATE", traceback.format_exc()
        if "\n" in str(error):
            return "MANY LINES", str(error)
        left = files() - before
        return (
            ("LEFT FILES", f"{error}: {sorted(map(str, left))[:5]}") if left else ("one line", "")
        )
    except SystemExit as error:
        return ("worked", "") if not error.code else ("EXIT", str(error.code))
    except BaseException:  # a library may have wrapped the signal's
        return "LATE" if rang else "TRACEBACK", traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Draw and try."""
    f = parse(sys.argv[1:] or ["inputs=1000"], Fuzz, "tests.fuzz")
    torch.set_num_threads(1)
    draw, counts, begun = random.Random(f.seed), Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        known = commands(prepared(Path(root)))
        watch = Watch(Path(root))
        for number in range(f.inputs):
            module = draw.choice([*known])
            base, keys = known[module]
            with tempfile.TemporaryDirectory(dir=root) as here:
                os.chdir(here)
                if draw.random() < f.files:
                    arguments, told = changed(draw, base, Path(root))
                    watch.here = here
                else:  # arguments are trusted: `out=../x` may write there
                    told = drawn(draw, keys)
                    arguments = [*base, *told]
                end, said = attempt(module, arguments)
                watch.here = None
                os.chdir(root)
            if watch.seen:
                end, said = "DOES MORE", "\n".join(watch.seen[:5])
                watch.seen.clear()
            counts[end] += 1
            if end.isupper():
                print(f"{number}: {end}: {module} {told}\n{said}", flush=True)
    minutes = (time.monotonic() - begun) / 60
    print(f"{f.inputs} inputs of {len(known)} commands in {minutes:.0f} minutes: {dict(counts)}")
    sys.exit(1 if any(end.isupper() for end in counts) else 0)


if __name__ == "__main__":
    main()

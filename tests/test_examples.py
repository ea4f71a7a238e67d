"""The examples and the Makefile: every command is understood, and what it reads was made before.

A script runs in a folder of its own with a `python` that writes its arguments down, so the shell
itself expands variables, functions and loops.
"""

import functools
import os
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from decoding.bench.denoise import DenoiseBench
from decoding.bench.engine import EngineBench
from decoding.bench.heldout_loss import HeldoutLoss
from decoding.bench.images import ImageBench
from decoding.bench.infill import InfillBench
from decoding.bench.text import Bench
from decoding.calibrate import Calibrate
from models.causal import looks_local
from recipes.compose import compose, run_folder
from recipes.options import parse
from trainers.export import Export
from trainers.soft_targets import TEACHER_LOSSES

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.sh"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
MEASURES = {
    "decoding.bench": Bench,
    "decoding.bench.denoise": DenoiseBench,
    "decoding.bench.engine": EngineBench,
    "decoding.bench.heldout_loss": HeldoutLoss,
    "decoding.bench.images": ImageBench,
    "decoding.bench.infill": InfillBench,
}
OTHERS = {"decoding.calibrate": Calibrate, "trainers.export": Export}
RECIPES = {"trainers.fit": "fit", "decoding.collect": "collect"}
INSTALL = {"pip", "venv"}
HEADER = ("# Needs:", "# Time:", "# Result:")
READS = re.compile(r"^# Reads: +(.+)\n# +of (sh|make) (\S+)$", re.MULTILINE)
DEFINITION = re.compile(
    r"^\s*(?:export |readonly )?(?:for (\w+) in |(\w+)\(\) |([A-Za-z_]\w*)=)", re.MULTILINE
)
# Writes its arguments on one line, each ended by the unit separator; all at once, as a script may
# call it in parallel.
FAKE_PYTHON = """#!/bin/sh
line=$(printf '%s\\037' "$@")
printf '%s\\n' "$line" >>"$CALLS"
exit {}
"""


def dry_run(script: Path, status: int = 0) -> tuple[int, str, list[list[str]]]:
    """Run a script with a python that does nothing and exits with a status.

    Returns:
        The script's status, what it wrote to stderr, and the arguments of each call of python.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "bin/python"
        python.parent.mkdir()
        python.write_text(FAKE_PYTHON.format(status))
        python.chmod(0o755)
        for other in ("bin/python3", ".venv-vllm/bin/python"):
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            (folder / other).symlink_to(python)
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "calls").touch()
        environment = {k: v for k, v in os.environ.items() if k != "RUNS"}
        environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
        environment["CALLS"] = str(folder / "calls")
        ran = subprocess.run(
            ["sh", script], cwd=folder, env=environment, capture_output=True, text=True
        )
        lines = (folder / "calls").read_text().splitlines()
    return ran.returncode, ran.stderr, [line.split("\037")[:-1] for line in lines]


def calls(script: Path) -> list[list[str]]:
    """Return the arguments of the calls of python in a script."""
    status, errors, found = dry_run(script)
    if status:
        raise ValueError(f"{script.name} ends with status {status}: {errors}")
    return found


def make_calls(target: str) -> list[list[str]]:
    """Return the arguments of python in the commands of a Makefile's target."""
    dry = ["make", "-n", target, "RUNS=runs"]
    printed = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = [shlex.split(line) for line in printed.splitlines()]
    return [line[1:] for line in words if line and Path(line[0]).name.startswith("python")]


def defined_twice(text: str, definition: re.Pattern) -> list[str]:
    """Return the names that a script or a Makefile defines more than once."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found = Counter("".join(groups) for groups in definition.findall(text))
    return [name for name, count in found.items() if count > 1]


def syntax_errors(script: Path) -> list[str]:
    """Return what sh and bash say of a script that they cannot parse."""
    parsed = [
        subprocess.run([shell, "-n", script], capture_output=True, text=True)
        for shell in ("sh", "bash")
    ]
    return [ran.stderr for ran in parsed if ran.returncode]


class Walk:
    """The paths that a script's commands make, read and measure, and the mistakes in them.

    Attributes:
        made: Folders of runs and collections, their exports and `complete.json`.
        read: The paths in `runs/` that commands read.
        written: The folders of results, of trained runs and of collections, each once.
        measured: Whether a command measures.
        faults: Lines that say what is wrong.
    """

    def __init__(self, made: set[str] = frozenset()):
        self.made, self.read, self.written = {*made}, set(), set()
        self.measured = False
        self.faults: list[str] = []

    def follow(self, calls: list[list[str]]) -> None:
        """Walk the commands, in order."""
        for dash, module, *arguments in calls:
            assert dash == "-m", f"not a module: {dash} {module}"
            if module in INSTALL:
                continue
            try:
                self._read_all(arguments)
                if module in RECIPES:
                    self._compose(compose(arguments, RECIPES[module]))
                else:
                    self._parse(module, arguments)
            except ValueError as error:
                self.faults.append(f"{module} {shlex.join(arguments)}: {error}")

    def _read_all(self, arguments: list[str]) -> None:
        """Check that the runs in the arguments were made."""
        for argument in arguments:
            key, _, value = argument.partition("=")
            if key not in ("runs", "out"):
                self._need(re.findall(r"(?<![^\[,])runs/[^\],]+", value))

    def _need(self, paths: list[str]) -> None:
        self.read |= {*paths}
        for path in paths:
            if path not in self.made:
                raise ValueError(f"nobody makes {path}")

    def _write(self, folder: str) -> None:
        if folder in self.written:
            raise ValueError(f"{folder} is written twice")
        self.written.add(folder)

    def _compose(self, config) -> None:
        """Note what a training or a collection makes."""
        self._write(str(run_folder(config)))
        self._make(config)

    def _make(self, config) -> None:
        """Note a run with its inputs, which are built on the way unless at scale=paper."""
        for need in config.needs:
            if need.path in self.made or not looks_local(need.path):
                continue
            if not config.build_inputs:
                self._need([need.path])
            _, _, module, *arguments = shlex.split(need.command)
            self._make(compose(arguments, RECIPES[module]))
        folder = run_folder(config)
        self.made |= {f"{folder}", f"{folder}/export", f"{folder}/complete.json"}
        if trainer := config.get("trainer"):
            steps = range(0, (trainer.max_steps or 0) + 1, trainer.checkpoint_every)[1:]
            kept = [*steps][-trainer.keep_last :]
            self.made |= {f"{folder}/checkpoints/step-{step}.ckpt" for step in kept}

    def _parse(self, module: str, arguments: list[str]) -> None:
        """Note what a measurement or another command reads and writes."""
        if module not in MEASURES | OTHERS:
            raise ValueError("no command of an example")
        options = parse(arguments, (MEASURES | OTHERS)[module], module)
        if module == "trainers.export":
            self._need([f"{options.run}/export"])
            if options.checkpoint is not None:
                self.made.add(f"{options.run}/export-{Path(options.checkpoint).stem}")
        if module in MEASURES:
            self.measured = True
            name = "bench_vllm" if module == "decoding.bench.engine" else "bench"
            self._write(options.out or str(Path(options.model).parent / name))


@functools.cache
def walk(script: Path) -> Walk:
    """Walk a script, after the runs that its header says it reads."""
    text = script.read_text()
    found, told = Walk(), set()
    for paths, by, name in READS.findall(text):
        maker = made_by_make(name) if by == "make" else walk(ROOT / name)
        for path in paths.split(", "):
            told.add(path)
            if path not in maker.made:
                found.faults.append(f"{by} {name} does not make {path}")
    found.made |= told
    found.faults += syntax_errors(script)
    found.faults += [f"{name} is defined twice" for name in defined_twice(text, DEFINITION)]
    found.faults += [f"no line {line!r}" for line in HEADER if f"\n{line} " not in text]
    if not text.startswith("#!/bin/sh\n# ") or "\nset -eu\n" not in text:
        found.faults.append("a script begins with #!/bin/sh, what it does, and set -eu")
    try:
        found.follow(calls(script))
    except ValueError as error:
        found.faults.append(str(error))
    found.faults += [f"the header says that it reads {path}" for path in told - found.read]
    return found


@functools.cache
def made_by_make(target: str) -> Walk:
    """Walk a target of the Makefile."""
    found = Walk()
    found.follow([call for call in make_calls(target) if call[1] not in INSTALL])
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("script", EXAMPLES, ids=relative)
def test_an_example(script):
    found = walk(script)
    assert found.faults == []
    inputs_alone = script.stem in ("deer_inputs", "vllm_environment")
    assert found.measured != inputs_alone


@pytest.mark.parametrize("script", EXAMPLES, ids=relative)
def test_an_example_ends_with_the_command_that_fails(script):
    status, _, found = dry_run(script, status=3)
    assert (status, len(found)) == (3, 1)


def test_the_list_of_examples_is_whole():
    assert len(EXAMPLES) > 20
    page = (ROOT / "examples/README.md").read_text()
    assert {*re.findall(r"`(\w+\.sh)`", page)} == {script.name for script in EXAMPLES}


SMALLEST = """#!/bin/sh
# Train two targets and measure them.
#
# Needs:  nothing
# Time:   minutes
# Result: none

set -eu
RUNS="${RUNS:-runs}"
fit() { python -m trainers.fit runs="$RUNS" "$@"; }
for name in a b; do
    fit recipe=ar_target name="$name"
done
python -m decoding.bench model="$RUNS/ar_target/a/export" \\
    also="$RUNS/ar_target/b/export" out="$RUNS/table"
"""
TOLD = """# Needs:  nothing
# Reads:  runs/small/deer_stage1/{}
#         of sh examples/smollm2/deer.sh"""


def faults(tmp_path, text):
    script = tmp_path / "example.sh"
    script.write_text(text)
    return walk.__wrapped__(script).faults


def test_the_smallest_example_has_no_fault(tmp_path):
    assert faults(tmp_path, SMALLEST) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('name="$name"', 'name="$name" trainer.max_step=3', "max_step"),
        ("also=", "alsso=", "alsso"),
        ("trainers.fit", "trainers.train", "no command of an example"),
        ("set -eu\n", "set -eu\nRUNS=others\n", "RUNS is defined twice"),
        ("for name in", "for RUNS in", "RUNS is defined twice"),
        ("for name", "fit() { true; }\nfor name", "fit is defined twice"),
        ("ar_target/b", "ar_target/c", "nobody makes runs/ar_target/c/export"),
        ("in a b;", "in a;", "nobody makes runs/ar_target/b/export"),
        ('name="$name"', "name=a", "runs/ar_target/a is written twice"),
        ("python -m decoding", "python -m trainers.fit scale=paper recipe=deer_stage2 "
         'runs="$RUNS"\npython -m decoding', "nobody makes runs/deer_answers/complete.json"),
        ("done\n", "", "example.sh"),
        ("set -eu\n", "set -eu\nfalse\n", "status 1"),
        ("set -eu\n", "", "set -eu"),
        ("# Time: ", "# Lasts:", "# Time:"),
        ("# Needs:  nothing", TOLD.format("gone"), "does not make runs/small/deer_stage1/gone"),
        ("# Needs:  nothing", TOLD.format("export"), "says that it reads runs/small/deer_stage1"),
    ],
)  # fmt: skip
def test_a_fault_is_found(tmp_path, old, new, fault):
    assert old in SMALLEST
    assert any(fault in line for line in faults(tmp_path, SMALLEST.replace(old, new)))


def fits(name):
    """The composed trainings of a script, in `examples/figures`."""
    found = calls(ROOT / "examples/figures" / name)
    return [compose(c[2:], "fit") for c in found if c[1] == "trainers.fit"]


def test_an_ablation_of_the_mask_changes_it():
    rounds = {c.name: c for c in fits("pcllm_ablations.sh") if c.recipe == "pcllm_round1"}
    assert len({str((c.module, c.data.corruption)) for c in rounds.values()}) == len(rounds) == 7
    # In a window that holds all eight blocks of an answer NC-IC is NC.
    ic = {name: c.module.window for name, c in rounds.items() if c.module.mask == "nc_ic"}
    assert ic == {"nc_ic_4": 4, "cllm": 1}
    assert rounds["cllm"].data.corruption.state == "any"  # at one block a window Eq. 7 has no noise
    assert rounds["nc_ic_4"].module.window == rounds["linear_4"].module.window == 4


def test_an_ablation_of_the_loss_changes_it():
    runs = {c.name: c.module for c in fits("deer_losses.sh") if c.recipe == "deer_stage2"}
    losses = {name: m.teacher_loss for name, m in runs.items() if m.soft}
    assert set(losses.values()) == set(TEACHER_LOSSES)
    assert all(name == loss for name, loss in losses.items())
    assert runs.keys() - losses.keys() == {"tokens"}


MAKEFILE = (ROOT / "Makefile").read_text()
VARIABLE = re.compile(r"^(?:define )?(\w+) *(?:[:?+]?=|$)", re.MULTILINE)
TARGETS = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)


def test_the_makefile_is_short():
    assert len(MAKEFILE.splitlines()) <= 90
    assert len(TARGETS) <= 15
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[1]
    assert phony.split() == TARGETS


def test_no_variable_of_the_makefile_is_defined_twice():
    assert len(VARIABLE.findall(MAKEFILE)) > 3
    assert defined_twice(MAKEFILE, VARIABLE) == []
    assert defined_twice(f"{MAKEFILE}\nRUNS = others\n", VARIABLE) == ["RUNS"]
    assert defined_twice("DEEP := a\nDEEP ?= b\n", VARIABLE) == ["DEEP"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_what_is_there(target):
    for dash, module, *_ in (call for call in make_calls(target) if call[0] == "-m"):
        assert dash == "-m"
        if module.startswith("tests."):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()


def test_the_quickstart_measures_what_it_makes():
    found = made_by_make("quickstart")
    assert found.faults == []
    assert found.measured


@pytest.mark.parametrize(("target", "marks"), [("test", True), ("test-all", False)])
def test_the_suite_takes_a_seed_and_arguments(target, marks):
    dry = ["make", "-n", target, "SEED=7", "PYTEST=tests/test_examples.py"]
    printed = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (x for x in printed.splitlines() if "pytest" in x and "install" not in x)
    words = shlex.split(line)
    assert {"--randomly-seed=7", "--hypothesis-seed=7", "tests/test_examples.py"} <= {*words}
    assert ("not slow and not processes" in words) == marks


def lost(text):
    """The scripts of examples that a text names and that are not there."""
    return [p for p in re.findall(r"examples/[\w/.-]+\.sh", text) if not (ROOT / p).is_file()]


def test_a_page_names_examples_that_are_there():
    recipes = (ROOT / "recipes").rglob("*.yaml")
    assert [x for page in [*PAGES, *recipes] for x in lost(page.read_text())] == []
    assert lost("sh examples/figures/gone.sh") == ["examples/figures/gone.sh"]


def unknown_targets(text):
    """The targets in code of a page that the Makefile lacks."""
    named = re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)
    return [name for name in named if name not in TARGETS]


# Lab notes may name what is gone.
NAME_TARGETS = [page for page in PAGES if page.parent.name != "lab_notes"]


@pytest.mark.parametrize("page", NAME_TARGETS, ids=relative)
def test_a_page_names_targets_that_are_there(page):
    assert unknown_targets(page.read_text()) == []


def test_a_target_that_is_gone_is_found():
    assert unknown_targets("`make gone` and `make test`\n\n```\nmake lab-gone\n```\n") == [
        "gone",
        "lab-gone",
    ]

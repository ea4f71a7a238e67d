"""The container's recipe names what is there: files, extras, packages, options, a route."""

import configparser
import json
import re
from pathlib import Path

from decoding.serve import read_options
from decoding.serving.app import Server

ROOT = Path(__file__).parents[1]
RECIPE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def lines(word):
    """Return what follows each instruction of a kind."""
    return re.findall(rf"^\s*(?:HEALTHCHECK .*)?{word} (.+)$", RECIPE, re.M)


def sent():
    """The files and folders of the repository that a build may read."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    return {line.removeprefix("!") for line in ignored if line.startswith("!")}


def test_what_is_copied_is_there_and_is_all_that_the_installation_reads():
    assert lines("COPY") == ["constraints.txt .", ". ."]
    assert all((ROOT / name).exists() for name in sent())
    packages = SETUP["options.packages.find"]["include"].split()
    described = [SETUP["metadata"]["long_description"].removeprefix("file: ")]
    read = {*(p.removesuffix("*") for p in packages), *described, "setup.cfg", "pyproject.toml"}
    assert read | {SETUP["metadata"]["license_files"], "constraints.txt"} == sent()


def test_what_is_installed_is_declared_and_pinned():
    (extras,) = re.findall(r"'\.\[(.+)\]'", RECIPE)
    assert {*extras.split(",")} <= {*SETUP["options.extras_require"]}
    assert all("-c constraints.txt" in line for line in lines("RUN") if "pip install" in line)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)
    (python,) = re.findall(r"^FROM python:(\S+)-slim", RECIPE, re.M)
    assert f"Python {python}" in (ROOT / "constraints.txt").read_text()


def test_both_devices_are_stages_of_the_build():
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", RECIPE, re.M)
    assert [name for _, name in stages] == ["base", "cpu", "cuda", ""]
    assert stages[-1][0] == "${DEVICE}"
    assert "ARG DEVICE=cpu\n" in RECIPE.partition("FROM")[0]


def test_the_server_starts_as_a_user_with_the_options_that_it_knows(tmp_path):
    (entry,), (check,), (user,) = lines("ENTRYPOINT"), lines("CMD"), lines("USER")
    python, flag, module, *options = json.loads(entry)
    assert (python, flag, module) == ("python", "-m", "decoding.serve")
    given = read_options([*options, f"model={tmp_path}"])
    assert (given.host, user) == ("0.0.0.0", "parade")
    assert f"useradd --create-home --uid 1000 {user}" in RECIPE
    program = json.loads(check)[-1]
    compile(program, "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{given.port}/health" in program
    assert hasattr(Server, "health")
    assert lines("EXPOSE") == [str(given.port)]

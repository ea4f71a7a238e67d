"""Damaged exports: a stranger's folder decodes, or is one line that says what is wrong."""

import json
import shutil
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoding import SamplingParams, load

HOSTILE = (None, "", "x", -1, 0, 1.5, 10**6, 10**12, True, [], {}, [0], float("nan"))


@pytest.fixture(scope="module", params=["deer_stage2", "ar_target"])
def export(lab, request, tmp_path_factory):
    """A copy of an export, and its files as they were."""
    copy = tmp_path_factory.mktemp("damaged") / "export"
    shutil.copytree(lab.runs / request.param / "export", copy)
    whole = {file.name: file.read_bytes() for file in sorted(copy.iterdir()) if file.is_file()}
    return copy, {name: data for name, data in whole.items() if name != "README.md"}


def leaves(node, path=()):
    """The paths of all values of a JSON object."""
    if not isinstance(node, dict):
        return [path]
    return [path, *(leaf for key in node for leaf in leaves(node[key], (*path, key)))]


def with_value(node, path, value):
    return value if not path else node | {path[0]: with_value(node[path[0]], path[1:], value)}


@st.composite
def damages(draw, files):
    """The name of a file, and what it holds instead; None: it is gone."""
    name = draw(st.sampled_from(sorted(files)))
    data = files[name]
    ways = ["cut", "gone", "other"] + 3 * ["value"] * (name == "config.json")
    way = draw(st.sampled_from(ways))
    if way == "gone":
        return name, None
    if way == "cut":
        return name, data[: draw(st.integers(0, len(data) - 1))]
    if way == "other":
        return name, draw(st.sampled_from([b"[]", b"null", b"{}", b"3", b"\xff", b"[" * 100_000]))
    config = json.loads(data)
    path = draw(st.sampled_from(leaves(config)))
    return name, json.dumps(with_value(config, path, draw(st.sampled_from(HOSTILE)))).encode()


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_a_damaged_export_decodes_or_is_one_line(export, data):
    folder, files = export
    name, content = data.draw(damages(files))
    try:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        with suppress(ValueError, OSError):  # one line, as `recipes.command.main` prints it
            sampler = load(str(folder))
            sampler.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, temperature=1.0))
    finally:
        (folder / name).write_bytes(files[name])


def test_the_whole_export_decodes(export):
    """So the test above damages what is read."""
    sampler = load(str(export[0]))
    assert sampler.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].text

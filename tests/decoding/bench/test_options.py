"""Names of models in tables and files of results: no two rows share one."""

from decoding.bench.options import told_apart


def test_the_same_run_in_two_folders_has_two_names():
    paths = ["a/deer/export", "b/deer/export", "b/x/deer/export", "deer/export"]
    assert [*told_apart(paths).values()] == paths
    assert [*told_apart(paths[:1]).values()] == ["deer"]


def test_one_folder_in_two_spellings():
    paths = ["a/export", "./a/export"]
    assert [*told_apart(paths).values()] == paths
    assert told_apart(["a/export", "a/export"]) == {"a/export": "a"}
    assert told_apart(["export"]) == {"export": "export"}

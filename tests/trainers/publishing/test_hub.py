"""Pushing an export with the real client to a Hub in a thread (tests/support/hub_server.py)."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import huggingface_hub.utils
import pytest
import yaml
from huggingface_hub import constants

from decoding.bench.options import MEASURED
from decoding.engine.params import SamplingParams
from decoding.loading import decoding_fingerprint, load
from tests.support.cards import CONFIG, METRICS, STORY
from tests.support.hub_server import READ, WRITE, Blob, HubServer
from tests.support.refused import refused
from tests.support.tiny import causal_lm, tokenizer
from trainers.export import run
from trainers.publishing import hub
from trainers.publishing.card import model_card

REPO = "org/name"
COMMAND = "python -m decoding.bench model=runs/x/export prompts=3"
BENCH = "sampler,temperature,tokens/s\nplain,0.0,10.5\nours,0.0,21.0\n"
STRANGERS = {
    "optimizer.pt",
    "trainer_state.json",
    "checkpoints/last.ckpt",
    "checkpoints/model.safetensors",
    "custom_generate/__pycache__/generate.cpython-311.pyc",
}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def folder(tmp_path):
    """A run with an export of two shards, and with what must never leave."""
    folder = tmp_path / "run"
    write(folder / "config.yaml", yaml.safe_dump(CONFIG, sort_keys=False))
    write(folder / "provenance.json", json.dumps(STORY))
    write(folder / "metrics.csv", METRICS)
    write(folder / "checkpoints" / "last.ckpt", b"optimizer state")
    export, draw = folder / "export", random.Random(0)
    for name in STRANGERS:
        write(export / name, b"no part of an export")
    for i in (1, 2):
        write(export / f"model-0000{i}-of-00002.safetensors", draw.randbytes(200_000 + i))
    write(export / "model.safetensors.index.json", "{}")
    write(export / "config.json", json.dumps({"parade": {"method": "plain"}}))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        write(export / name, json.dumps({"name": name}))
    for name in ("generate.py", "decoding_verify.py", "requirements.txt"):
        write(export / "custom_generate" / name, f"# {name}\n")
    write(export / "parade_config.yaml", yaml.safe_dump(CONFIG, sort_keys=False))
    write(export / "parade_provenance.json", json.dumps(STORY))
    write(export / "README.md", model_card({"method": "plain"}, folder))
    return folder


@pytest.fixture
def waits(monkeypatch):
    """No waiting; the seconds that would have been waited."""
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.fixture
def client(monkeypatch, waits):
    """The client of this process, logged in, without Xet."""
    monkeypatch.setenv("HF_TOKEN", WRITE)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.utils.close_session()
    yield
    huggingface_hub.utils.close_session()


@pytest.fixture
def server(monkeypatch, client):
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        yield server


def push(folder, *arguments):
    run([f"run={folder}", f"push={REPO}", *arguments])


def on_disk(folder):
    """{path: bytes} of all that belongs to the export."""
    export = folder / "export"
    paths = {p.relative_to(export).as_posix(): p for p in export.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if name not in STRANGERS}


def test_a_push_is_the_export_byte_for_byte_and_nothing_else(server, folder):
    push(folder, "message=First one")
    files = server.files(REPO)
    assert files == on_disk(folder)
    assert {"README.md", "custom_generate/generate.py", "parade_config.yaml"} <= files.keys()
    assert server.commits(REPO) == ["First one"]
    assert server.count("PUT") == 2
    assert not server.repos[REPO].private


def write_bench(folder):
    write(folder / "bench" / "bench.csv", BENCH)
    write(folder / "bench" / "command.txt", COMMAND)
    write(folder / "bench" / MEASURED, decoding_fingerprint(folder / "export"))


def test_dry_run_touches_nothing(server, folder, capsys):
    write_bench(folder)
    before = on_disk(folder)
    push(folder, "dry_run=true", "revision=v2")
    said = capsys.readouterr().out
    assert server.requests == []
    assert on_disk(folder) == before
    push(folder)
    sizes = {name: len(content) for name, content in server.files(REPO).items()}
    for name, size in sizes.items():
        assert f"{size:,}  {name}\n" in said
    assert f"{len(sizes)} files, {sum(sizes.values()):,} bytes" in said
    assert "org/name, revision v2" in said
    assert "optimizer.pt" in said.splitlines()[-1]


def test_a_revision_is_made_and_main_is_left_alone(server, folder):
    push(folder, "revision=long/name", "message=On a branch")
    assert server.files(REPO, "long/name") == on_disk(folder)
    assert server.commits(REPO, "long/name") == ["On a branch"]
    assert server.commits(REPO) == []
    push(folder, "revision=long/name")  # an existing one is fine, and so is nothing new
    assert server.commits(REPO, "long/name") == ["On a branch"]


def test_private(server, folder):
    push(folder, "private=true")
    assert server.repos[REPO].private
    push(folder, "private=true")


def test_private_is_not_pushed_into_a_public_repository(server, folder):
    server.create(REPO)
    assert "public" in refused(push, folder, "private=true")
    assert server.count("PUT") == 0
    assert server.files(REPO) == {}


LEFT = {"chat_template.jinja", "added_tokens.json", "tokenizer.model", "draft_vocabulary.tensors",
        "additional_chat_templates/tools.jinja", "custom_generate/old.py", "parade_old.json",
        "adapter_config.json", "adapter_model.safetensors"}  # fmt: skip
THEIRS = {"LICENSE", "eval.json", "notes/config.json", "images/model.safetensors",
          "custom_generate/deeper/a.py", "config.json.orig"}  # fmt: skip


def test_what_an_earlier_push_wrote_goes_and_nothing_else(server, folder):
    for name in LEFT:
        write(folder / "export" / name, "{}")
    push(folder)
    assert server.files(REPO).keys() >= LEFT
    repo = server.repos[REPO]
    theirs = repo.branches["main"][-1].files | dict.fromkeys(THEIRS, Blob(b"theirs", False))
    server.commit(repo, "main", "by hand", theirs)
    for path in (folder / "export").glob("model*"):
        path.unlink()
    for name in LEFT:
        (folder / "export" / name).unlink()
    write(folder / "export" / "model.safetensors", b"one shard")
    push(folder)
    assert server.files(REPO) == on_disk(folder) | dict.fromkeys(THEIRS, b"theirs")
    assert len(server.commits(REPO)) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", '{"base_model_name_or_path": "%s"}'),
        ("tokenizer_config.json", '{"name_or_path": "%s"}'),
        ("parade_config.yaml", "network: {path: %s}"),
        ("LICENSE.md", "see %s"),
    ],
)
def test_a_path_of_this_machine_is_not_pushed(server, folder, tmp_path, name, content):
    write(folder / "export" / name, content % "org/name")
    push(folder)
    write(folder / "export" / name, content % (tmp_path / "run"))
    assert f"{name} names {tmp_path / 'run'}, which is of this" in refused(push, folder)
    assert len(server.commits(REPO)) == 1


def test_a_secret_is_not_pushed(server, folder):
    write(folder / "export" / "custom_generate" / "generate.py", "/usr/bin/env")  # a vocabulary's
    push(folder)
    write(folder / "export" / "custom_generate" / "generate.py", f"login({'hf_' + 20 * 'a'!r})")
    assert "generate.py names a token or password" in refused(push, folder)


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [
        ("GET", "/tree/", 503),
        ("POST", "/preupload/", 503),
        ("POST", "/objects/batch", 503),
        ("PUT", "/lfs/", 503),
        ("PUT", "/lfs/", "cut"),
        ("PUT", "/lfs/", "lost"),
        ("POST", "/verify", 503),
    ],
)
def test_a_passing_failure_of_what_the_client_repeats_is_outlived(
    server, folder, waits, method, path, how
):
    server.fail(method, path, how, times=2)
    push(folder, "revision=v2")
    assert server.files(REPO, "v2") == on_disk(folder)
    assert len(server.commits(REPO, "v2")) == 1
    assert sum(fault.times for fault in server.faults) == 0
    assert waits


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [
        ("POST", "/repos/create", 503),
        ("POST", "/repos/create", "lost"),
        ("POST", "/branch/", 503),
        ("POST", "/commit/", 503),
        ("POST", "/commit/", "cut"),
        ("POST", "/commit/", "lost"),
    ],
)
def test_another_passing_failure_is_a_line_and_a_second_run_completes(
    server, folder, waits, method, path, how
):
    """A commit whose answer was lost is found there, and not made again."""
    server.fail(method, path, how, times=1)
    assert "run this again; what is there already is not sent twice" in refused(
        push, folder, "revision=v2"
    )
    push(folder, "revision=v2")
    assert server.files(REPO, "v2") == on_disk(folder)
    assert len(server.commits(REPO, "v2")) == 1


def test_a_second_run_sends_what_is_missing(server, folder, waits):
    shard = folder / "export" / "model-00002-of-00002.safetensors"
    second = Blob(shard.read_bytes(), lfs=True).oid
    server.fail("PUT", second, 403)
    assert "403" in refused(push, folder)
    assert server.count("PUT") == 2
    assert server.commits(REPO) == []
    push(folder)
    assert [r for r in server.requests if r.startswith("PUT")][2:] == [f"PUT /lfs/{second}"]
    assert server.files(REPO) == on_disk(folder)
    push(folder)
    assert server.count("PUT") == 3
    assert len(server.commits(REPO)) == 1
    assert waits == []


def test_large_files_in_parts(monkeypatch, client, folder):
    with HubServer(chunk_size=64_000) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        server.fail("PUT", "/part/3", "cut")
        push(folder)
        assert server.files(REPO) == on_disk(folder)
        assert server.count("PUT") == 2 * 4 + 1


def test_the_client_s_pipeline_for_xet(monkeypatch, client, folder):
    """What the client does by default, Xet's own transfer left out: no file is large."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with HubServer(lfs=False) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        push(folder)
        assert server.files(REPO) == on_disk(folder)


class TestMistakes:
    @pytest.mark.parametrize(
        "name",
        [
            "name",
            "a/b/c",
            "org/",
            "/name",
            "org/na me",
            "org/a--b",
            "https://huggingface.co/org/name",
        ],
    )
    def test_no_name_of_a_repository(self, server, folder, name):
        with pytest.raises(ValueError, match="push=org/name") as error:
            run([f"run={folder}", f"push={name}", "dry_run=true"])
        assert name in str(error.value)
        assert server.requests == []

    def test_no_token(self, server, folder, monkeypatch, tmp_path):
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        message = refused(push, folder)
        assert "hf auth login" in message
        assert "HF_TOKEN" in message
        assert server.requests == []

    def test_a_token_that_the_hub_does_not_know(self, server, folder, monkeypatch, waits):
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        message = refused(push, folder)
        assert "HF_TOKEN" in message
        assert server.endpoint in message
        assert waits == []

    @pytest.mark.parametrize("exists", [False, True])
    def test_a_token_that_may_not_write(self, server, folder, monkeypatch, exists):
        if exists:
            server.create(REPO)
        monkeypatch.setenv("HF_TOKEN", READ)
        assert "may not write there" in refused(push, folder)

    def test_a_run_without_export(self, server, tmp_path):
        assert "holds no export" in refused(push, tmp_path)

    def test_nobody_there(self, server, folder, monkeypatch, waits):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        message = refused(push, folder)
        assert "http://127.0.0.1:9" in message
        assert "HF_ENDPOINT" in message

    def test_no_address(self, server, folder, monkeypatch):
        monkeypatch.setattr(constants, "ENDPOINT", "127.0.0.1:9")
        assert "HF_ENDPOINT" in refused(push, folder)

    def test_offline(self, server, folder, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE" in refused(push, folder)

    def test_a_card_that_the_hub_refuses(self, server, folder):
        write(folder / "export" / "README.md", "---\nbase_model: a/b/c\n---\n")
        assert "Invalid metadata in README.md" in refused(push, folder)
        assert server.count("PUT") == 0


class TestTarget:
    """A drafter whose target was read from a folder."""

    @pytest.fixture
    def drafter(self, folder):
        entry = {"method": "deer", "target": "/home/alice/llama", "block_size": 8}
        write(folder / "export" / "config.json", json.dumps({"x": 1, "parade": entry}))
        write(folder / "metrics.csv", "step,val_loss\n5,1.5\n")
        return folder

    def test_a_folder_of_this_machine_does_not_leave(self, server, drafter):
        assert "/home/alice/llama" in refused(push, drafter)
        assert server.count("PUT") == 0

    @pytest.mark.parametrize("target", ["runs/x/export", "./target", "llama"])
    def test_nor_does_one_below_the_working_directory(self, server, drafter, monkeypatch, target):
        monkeypatch.setattr("trainers.export.verify", lambda *_: pytest.fail("minutes went by"))
        config = drafter / "export" / "config.json"
        entry = {"method": "deer", "target": target, "block_size": 8}
        write(config, json.dumps({"x": 1, "parade": entry}))
        assert "give its Hub id with target=" in refused(push, drafter, "verify=[transformers]")
        assert server.count("PUT") == 0
        write(config, json.dumps({"x": 1, "parade": entry | {"target": "org/llama"}}))
        push(drafter)
        assert "config.json" in server.files(REPO)

    def test_its_hub_id_takes_its_place(self, server, drafter):
        push(drafter, "target=meta/llama")
        config = json.loads(server.files(REPO)["config.json"])
        assert config == {
            "x": 1,
            "parade": {"method": "deer", "target": "meta/llama", "block_size": 8},
        }
        card = server.files(REPO)["README.md"].decode()
        assert yaml.safe_load(card.split("---\n")[1])["base_model"] == ["meta/llama"]
        assert "| val_loss | 1.5 |" in card

    def test_a_dry_run_changes_nothing(self, server, drafter):
        before = on_disk(drafter)
        push(drafter, "target=meta/llama", "dry_run=true")
        assert on_disk(drafter) == before

    @pytest.mark.parametrize("target", ["/x/y", "here", "./a"])
    def test_another_folder_is_refused(self, server, drafter, target):
        assert f"target={target} is not allowed" in refused(push, drafter, f"target={target}")

    def test_an_ordinary_model_has_none(self, server, folder):
        assert "is no drafter" in refused(push, folder, "target=meta/llama")


class TestCard:
    def card(self, folder):
        return (folder / "export" / "README.md").read_text()

    def test_says_what_was_made_how_and_from_what(self, folder):
        config = {"method": "some", "target": "Qwen/Qwen3-8B", "block_size": 8}
        card = model_card(config, folder)
        metadata = yaml.safe_load(card.split("---\n")[1])
        assert metadata["base_model"] == ["Qwen/Qwen3-8B"]  # folders of this machine are none
        assert metadata["license"] == "unknown"  # as the folder's is
        assert "Licence: unknown, as that of runs/a/export is" in card
        for fact in (
            "some, block_size 8",
            "runs/a/export",
            "source=stdlib, length=256",
            "Packed rows: 88072c4ae3d2bc55 (train)",
            "some_recipe",
            "c0ffee",
            "torch 2.13.0",
            STORY["command"],
            "| 0 | 2.5 | 60 |\n| 1 | 2.25 | 60 |",
            "60 steps of 8 rows",
            "8 held-out prompts (stdlib) of 64 tokens, 48 new tokens",
            "| val_loss | 1.5 | 60 |",
        ):
            assert fact in card

    def starts_from(self, folder, path):
        network = {"_target_": "models.x"} | ({"path": str(path)} if path else {})
        write(folder / "config.yaml", yaml.safe_dump(CONFIG | {"network": network}))
        return yaml.safe_load(model_card({"method": "plain"}, folder).split("---\n")[1])

    def test_weights_of_nobody_else_are_under_parade_s_licence(self, folder):
        metadata = self.starts_from(folder, None)
        assert metadata["license"] == "apache-2.0"
        assert "base_model" not in metadata

    @pytest.mark.parametrize("how", ["id", "config", "card", "card of a card", "nothing"])
    def test_whose_weights_they_were(self, folder, tmp_path, how):
        base, of = tmp_path / "base", {"license_link": "https://huggingface.co/org/theirs"}
        of |= {"license": "other", "license_name": "of-the-base-model"}
        write(base / "config.json", json.dumps({"_name_or_path": "org/theirs"} if how == "config"
                                               else {"_name_or_path": "/x/y"}))  # fmt: skip
        if how == "card":
            write(base / "README.md", "---\nlicense: mit\n---\nA model.")
            of = {"license": "mit"}
        elif how == "card of a card":
            write(base / "README.md", "---\nlicense: mit\nbase_model: [org/theirs]\n---\nA model.")
            of = {"license": "mit"}
        elif how == "nothing":
            of = {"license": "unknown"}
        metadata = self.starts_from(folder, "org/theirs" if how == "id" else base)
        assert {k: v for k, v in metadata.items() if k.startswith("license")} == of
        named = how in ("id", "config", "card of a card")
        assert metadata.get("base_model") == (["org/theirs"] if named else None)

    def test_an_earlier_step_has_its_own_figures(self, folder):
        write(folder / "metrics.csv", "step,lr,loss,val_loss\n40,3e-5,2.5,\n45,,,2.123456\n"
              "50,0.00015,2.25,\n60,1e-6,2.0,1.0\n")  # fmt: skip
        card = model_card({"method": "plain"}, folder, 50)
        for fact in (
            "50 of 60 steps of 8 rows",
            "| val_loss | 2.123 | 45 |",
            "| lr | 0.00015 | 50 |",
            "| loss | 2.25 | 50 |",
        ):
            assert fact in card
        assert "| lr | 1e-06 | 60 |" in model_card({"method": "plain"}, folder)

    def test_its_python_runs(self, folder, monkeypatch):
        config = {"method": "deer", "target": "org/theirs", "tokenizer_fingerprint": "x"}
        card = model_card(config, folder)
        code = card.split("# or, in Python:\n")[1].split("```")[0]
        asked = {}

        class Auto:
            def from_pretrained(name):
                asked.setdefault("names", []).append(name)
                return Auto()

            __call__ = lambda self, text, **kwargs: asked.update(text=text) or {"input_ids": 1}  # noqa: E731
            generate = lambda self, **kwargs: asked.update(kwargs) or ["ids"]  # noqa: E731
            decode = staticmethod(str)

        monkeypatch.setattr("transformers.AutoModelForCausalLM", Auto)
        monkeypatch.setattr("transformers.AutoTokenizer", Auto)
        exec(code, {})
        assert asked["names"] == ["org/theirs"] * 2
        assert asked["trust_remote_code"]
        assert asked["input_ids"] == 1

    def test_the_bench_is_added_once(self, folder):
        plain = self.card(folder)
        write_bench(folder)
        run([f"run={folder}"])
        card = self.card(folder)
        assert card.startswith(plain.rstrip())
        assert "| sampler | temperature | tokens/s |" in card
        assert COMMAND in card
        run([f"run={folder}"])
        assert self.card(folder) == card
        write(folder / "bench" / "bench.csv", BENCH.replace("21.0", "22.0"))
        run([f"run={folder}"])
        changed = card.replace("21.0", "22.0")
        assert self.card(folder) == changed
        write(folder / "bench_vllm" / "engine.csv", "engine,tokens/s\nvllm,49.0\n")
        write(folder / "bench_vllm" / "command.txt", "python -m decoding.bench.engine model=x")
        shutil.copy(folder / "bench" / MEASURED, folder / "bench_vllm")
        run([f"run={folder}"])
        both = self.card(folder)
        assert both.startswith(changed.rstrip())
        assert "| vllm | 49.0 |" in both
        run([f"run={folder}"])
        assert self.card(folder) == both

    def test_a_bench_of_other_weights_is_left_out(self, folder, capsys):
        plain = self.card(folder)
        write_bench(folder)
        next((folder / "export").glob("*1-of*")).write_bytes(b"retrained")
        run([f"run={folder}"])
        assert self.card(folder) == plain
        assert f"{folder}/bench/bench.csv" in capsys.readouterr().out


def test_uploads_never_holds_what_lies_deeper(folder):
    write(folder / "export" / "deeper" / "config.json", "{}")
    files, others = hub.uploads(folder / "export")
    assert set(others) == STRANGERS | {"deeper/config.json"}
    assert set(files) == on_disk(folder).keys() - {"deeper/config.json"}


@pytest.mark.processes
def test_the_command_pushes_and_decoding_loads_it_back(folder, tmp_path):
    """Both as a user starts them: HF_ENDPOINT is read when the client is imported."""
    export = folder / "export"
    for path in export.glob("model*"):
        path.unlink()
    model = causal_lm(26).float()
    model.config.parade = {"method": "plain"}
    model.save_pretrained(export)
    tokenizer(26).save_pretrained(export)
    code = (
        "from decoding.loading import load; from decoding.engine.params import SamplingParams; "
        f"sampler = load('{REPO}', dtype='float32'); "
        "params = SamplingParams(max_new_tokens=8, temperature=0); "
        "print(sampler.generate(['abc'], params)[0].token_ids)"
    )
    with HubServer() as server:
        environment = os.environ | {
            "HF_ENDPOINT": server.endpoint,
            "HF_TOKEN": WRITE,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }

        def python(*arguments):
            command = [sys.executable, *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True)

        arguments = [f"run={folder}", f"push={REPO}", "private=true"]
        done = python("-m", "trainers.export", *arguments)
        assert done.returncode == 0, done.stderr
        assert f"pushed: {server.endpoint}/{REPO}/commit/" in done.stdout
        assert server.files(REPO) == on_disk(folder)

        loaded = python("-c", code)
        assert loaded.returncode == 0, loaded.stderr
        here = load(str(export), dtype="float32")
        answer = here.generate(["abc"], SamplingParams(max_new_tokens=8, temperature=0))[
            0
        ].token_ids
        assert loaded.stdout.split("\n")[-2] == str(answer)

        environment["HF_TOKEN"] = "hf_wrong"
        done = python("-m", "trainers.export", *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: could not push")
        assert done.stderr.count("\n") == 1

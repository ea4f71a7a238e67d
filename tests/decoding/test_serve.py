"""The server: a real process, real clients, and a seed's text whatever else is decoded."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from decoding.engine.params import SamplingParams
from decoding.engine.randomness import request_seeds
from decoding.engine.running import Running
from decoding.harness import ParadeLM
from decoding.loading import load, load_tokenizer
from decoding.serve import name_of, notes, requests_within, row_bytes, run
from decoding.serving.scheduler import Scheduler
from tests.support import browser, tiny
from tests.support.load import TEMPLATE
from tests.support.samplers import dflash

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).parents[2]
PROMPTS = ["def area", "self return", "class name for", "if value in key", "x"]


def test_it_says_at_which_temperatures_it_decodes_without_drafts():
    def said(defaults=None, **knobs):
        return notes(dflash(tiny.causal_lm(8), 2, **knobs), defaults or {})

    plain = {1: {0: "plain", 1: "tree"}}
    (line,) = said(fastest=plain)
    assert line.startswith("T=0: decoded without drafts")
    assert [x[:3] for x in said(fastest={1: {0: "plain"}})] == ["T=0", "T=1"]
    own, line = said({"temperature": 0.2}, fastest=plain)[::2]
    assert "temperature=0.2" in own
    assert line.startswith("T=0.2: decoded without drafts")
    assert not said(fastest={1: {0: "tree"}})


def test_a_model_is_served_by_the_name_of_its_folder_or_the_hubs(tmp_path):
    (tmp_path / "my_run" / "export").mkdir(parents=True)
    (tmp_path / "chats").mkdir()
    assert name_of(str(tmp_path / "my_run" / "export")) == "my_run"
    assert name_of(str(tmp_path / "chats")) == "chats"
    assert name_of("org/name") == "org/name"


@pytest.fixture(scope="module")
def export(lab):
    return str(lab.fit("deer_stage1"))


@pytest.fixture(scope="module")
def sampler(export):
    return load(export, dtype="float32")


@contextmanager
def serving(export, *options, **environment):
    """(address, process) of a server on a free port."""
    given = [f"model={export}", "port=0", "dtype=float32", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "decoding.serve", *given],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = ""
        while not (found := re.search(r"http://\S+/", said)):
            line = process.stdout.readline()
            assert line, f"the server has ended: {said}"
            said += line
        yield found[0], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address(export):
    drafting = "sampler=[fastest=chain]"  # whatever pays at the moment
    with serving(export, "at_once=4", "name=drafted", drafting) as (address, _):
        yield address


def client_of(address):
    return openai.OpenAI(base_url=f"{address}v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(address):
    return client_of(address)


def expected(sampler, prompt, seed, **params):
    (result,) = sampler.generate([prompt], SamplingParams(**params), seeds=[seed])
    return result


def until(condition, seconds=20):
    """Wait until a condition holds."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def idle(address, seconds=20):
    """Wait until the server decodes nothing."""
    nothing = {"status": "ok", "running": 0, "waiting": 0}
    until(lambda: httpx.get(f"{address}health").json() == nothing, seconds)


@pytest.mark.parametrize("model", ["drafted", "plain"])
def test_a_seed_s_text_is_the_sampler_s(client, sampler, model):
    given = {"max_tokens": 20, "temperature": 0.8, "seed": 7}
    answer = client.completions.create(model=model, prompt=PROMPTS[0], **given)
    result = expected(sampler, PROMPTS[0], 7, max_new_tokens=20, temperature=0.8)
    assert answer.choices[0].text == result.text
    assert answer.usage.completion_tokens == len(result.token_ids)
    assert (answer.usage.target_passes < len(result.token_ids)) == (model == "drafted")
    pieces = client.completions.create(
        model=model, prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}, **given
    )
    *parts, last = pieces
    assert "".join(p.choices[0].text for p in parts) == result.text
    assert [p.choices[0].finish_reason for p in parts][-1] in ("length", "stop")
    assert last.usage.completion_tokens == len(result.token_ids)


def test_several_prompts_and_answers(client, sampler):
    answer = client.completions.create(
        model="drafted", prompt=PROMPTS[:2], n=2, max_tokens=8, temperature=1, seed=3
    )
    seeds, asked = request_seeds(3, 4), [p for p in PROMPTS[:2] for _ in range(2)]
    wanted = [
        expected(sampler, p, s, max_new_tokens=8, temperature=1).text for p, s in zip(asked, seeds)
    ]
    assert [c.text for c in answer.choices] == wanted
    prompt_tokens = sum(len(sampler.tokenizer(p).input_ids) for p in PROMPTS[:2])
    assert answer.usage.prompt_tokens == prompt_tokens  # each once
    ids = sampler.tokenizer(PROMPTS[0]).input_ids
    again = client.completions.create(model="drafted", prompt=ids, max_tokens=8, seed=3)
    assert again.choices[0].text == wanted[0]


def test_texts_do_not_depend_on_the_load(client, sampler):
    """Requests of all kinds from many clients at once, some of them cut off on the way."""
    draw = random.Random(0)
    jobs = [
        {
            "prompt": draw.choice(PROMPTS),
            "seed": n,
            "max_tokens": draw.randint(1, 40),
            "temperature": draw.choice([0, 0.7, 1]),
            "extra_body": {"verify": draw.choice(["coupled", "rejection", "tree"])},
        }
        for n in range(40)
    ]

    def ask(n):
        if n % 8 == 7:  # hangs up after the first piece
            with client.completions.create(model="drafted", stream=True, **jobs[n]) as pieces:
                next(iter(pieces))
            return None
        return client.completions.create(model="drafted", **jobs[n]).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        texts = [*pool.map(ask, range(len(jobs)))]
    for job, text in zip(jobs, texts):
        if text is not None:
            result = expected(
                sampler, job["prompt"], job["seed"], max_new_tokens=job["max_tokens"],
                temperature=job["temperature"], **job["extra_body"],
            )  # fmt: skip
            assert text == result.text
    assert sum(text is None for text in texts) == 5


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_killed_frees_its_place(address, stream):
    idle(address)
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 32}
    code = f"import httpx\nhttpx.post({address + 'v1/completions'!r}, json={body})"
    with subprocess.Popen([sys.executable, "-c", code]) as client:
        until(lambda: httpx.get(f"{address}health").json()["running"] == 4)
        client.kill()
    idle(address, 5)
    assert 'finished_reason="cancelled"' in httpx.get(f"{address}metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue(address, stream):
    idle(address)
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 64}
    with (
        httpx.Client() as other,
        httpx.stream("POST", f"{address}v1/completions", json=long) as first,
    ):
        lines = first.iter_lines()  # it hangs up where nobody holds it
        next(lines)

        def now(pattern):
            return sum(map(int, re.findall(pattern, other.get(f"{address}metrics").text)))

        waiting, cancelled = r"requests_waiting (\d+)", r'"cancelled"} (\d+)'
        before = now(waiting), now(cancelled)
        host, port = address.split("/")[2].split(":")
        body = json.dumps({"prompt": "x", "n": 32, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as gone:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            gone.sendall(f"{head}\r\n\r\n".encode() + body)
            until(lambda: now(waiting) > before[0])
        until(lambda: now(cancelled) >= before[1] + 32)
        assert now(waiting)  # the others are there still
    idle(address)


def test_metrics_count_drafts_as_vllm_does(address, client):
    def count(name):
        text = httpx.get(f"{address}metrics").text
        return sum(float(x) for x in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.M))

    idle(address)
    names = ("generation_tokens_total", "spec_decode_num_drafts_total")
    accepted = "spec_decode_num_accepted_tokens_total"
    before = [count(name) for name in (*names, accepted)]
    answer = client.completions.create(
        model="drafted", prompt="x", max_tokens=30, seed=1, extra_body={"ignore_eos": True}
    )
    tokens, drafts, taken = (count(n) - b for n, b in zip((*names, accepted), before))
    assert (tokens, drafts) == (30, answer.usage.target_passes)
    assert taken == tokens - drafts


WRONG = [
    ("{", 400, "no JSON"),
    ("[" * 100_000, 400, "no JSON"),
    (b'{"prompt": "\xff"}', 400, "no JSON"),
    ("[1]", 400, "no object but a list"),
    ("{}", 400, "prompt is missing"),
    ({"prompt": []}, 400, "it must be a text, token ids"),
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 is not allowed"),
    ({"prompt": "a", "max_tokens": 9999}, 400, "more than the"),
    ({"prompt": "a", "max_tokens": True}, 400, "it must be an integer"),
    ({"prompt": "a", "n": 1000}, 400, "an integer from 1 to 64"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature=-1 is not allowed"),
    ('{"prompt": "a", "temperature": NaN}', 400, "not finite"),
    ({"prompt": "a", "logprobs": 21}, 400, "an integer from 0 to 20"),
    ({"prompt": "a", "logprobs": False}, 400, "an integer from 0 to 20"),
    ({"prompt": "a", "echo": True, "stream": True}, 400, "a stream has no echo"),
    ({"prompt": "a", "top_logprobs": 1}, 400, "unknown field 'top_logprobs'"),
    ({"prompt": "a", "typical_p": 0.5}, 400, "typical_p=0.5 is not offered"),
    ({"prompt": [["a"]]}, 400, "it must be a text, token ids"),
    ({"prompt": [[[1]]]}, 400, "it must be a text, token ids"),
    ({"prompt": "\ud800"}, 400, "no JSON"),
    ({"prompt": "a", "\ud800": 1}, 400, "no JSON"),
    ({"prompt": ["a"] * 999}, 400, "999 answers are asked for"),
    ({"prompt": "a", "promt": "b"}, 400, "unknown field 'promt'"),
    ({"prompt": "a", "model": "b"}, 404, "Served are drafted, plain"),
    ({"prompt": "a", "suffix": "b"}, 400, "is for models that fill holes"),
    ({"prompt": [999999]}, 400, "outside the target's vocabulary"),
    ({"prompt": "a", "verify": "b"}, 400, "verify='b' is not allowed"),
    ("a" * 5_000_000, 413, "more than 4000000 bytes"),
]


@pytest.mark.parametrize(("body", "code", "message"), WRONG)
def test_a_wrong_request_is_one_line(address, body, code, message):
    content = json.dumps(body) if isinstance(body, dict) else body
    reply = httpx.post(f"{address}v1/completions", content=content)
    error = reply.json()["error"]
    word = "model_not_found" if code == 404 else code
    assert (reply.status_code, error["code"]) == (code, word)
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500


def forward(sampler, ids):
    """log p [n - 1, V] of what follows each token, by one plain forward."""
    with torch.no_grad():
        return sampler.target(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize(("model", "echo"), [("drafted", False), ("plain", True)])
def test_log_probabilities_are_a_forward_s(client, sampler, model, echo):
    given = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    answer = client.completions.create(
        model=model, prompt=PROMPTS[2], logprobs=3, echo=echo, **given
    ).choices[0]
    result = expected(sampler, PROMPTS[2], 5, max_new_tokens=12, temperature=1.0)
    prompt = sampler.tokenizer(PROMPTS[2]).input_ids
    ids = prompt + result.token_ids
    log_probs, start = forward(sampler, ids), 1 if echo else len(prompt)
    found = answer.logprobs
    assert answer.text == (PROMPTS[2] if echo else "") + result.text
    assert found.tokens[-1] == sampler.tokenizer.decode(ids[-1:])
    assert len(found.tokens) == len(found.token_logprobs) == len(ids) - start + echo
    own = [float(log_probs[n - 1, ids[n]]) for n in range(start, len(ids))]
    assert found.token_logprobs[echo:] == pytest.approx(own, abs=1e-4)
    assert found.token_logprobs[0] is None or not echo
    shifted = [float(log_probs[n - 2, ids[n]]) for n in range(start + 1, len(ids))]
    assert max(abs(a - b) for a, b in zip(found.token_logprobs[echo + 1 :], shifted)) > 0.1
    for n, best in zip(range(start, len(ids)), found.top_logprobs[echo:]):
        top = log_probs[n - 1].topk(3).values.tolist()
        assert max(best.values()) == pytest.approx(top[0], abs=1e-4)
        assert len(best) <= 4  # of tokens that read alike, one
        lowest = min(own[n - start], top[-1])
        assert all(lowest - 1e-4 <= p <= top[0] + 1e-4 for p in best.values())
    for word, at, after in zip(found.tokens, found.text_offset, [*found.text_offset[1:], None]):
        assert answer.text[at:after].strip() == word.strip()


def test_lm_eval_against_the_server(address, export, sampler, tmp_path):
    """Its `local-completions` gives what its adapter of ours gives, likelihoods and texts."""
    asked = [("def area", " self"), ("class name", " for"), ("x", " = 1")]
    pairs = [Instance("loglikelihood", {}, x, n) for n, x in enumerate(asked)]
    kwargs = {"until": ["zz"], "max_gen_toks": 8, "do_sample": False}
    texts = [Instance("generate_until", {}, (p, kwargs), n) for n, p in enumerate(PROMPTS)]
    served = get_model("local-completions")(
        base_url=f"{address}v1/completions", model="drafted", tokenizer=export,
        tokenizer_backend="huggingface", max_length=128, num_concurrent=2,
    )  # fmt: skip
    ours = ParadeLM(sampler, batch_size=2)
    found = served.loglikelihood(pairs, disable_tqdm=True)
    expected = ours.loglikelihood(pairs, disable_tqdm=True)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-4)
    assert [best for _, best in found] == [best for _, best in expected]
    assert served.generate_until(texts, disable_tqdm=True) == ours.generate_until(texts)


def test_the_last_piece_of_a_stream_has_the_log_probabilities(client):
    given = {"model": "drafted", "prompt": PROMPTS[2], "max_tokens": 12, "temperature": 1.0}
    given |= {"seed": 5, "n": 2, "logprobs": 3}
    whole = client.completions.create(**given).choices
    pieces = [piece.choices[0] for piece in client.completions.create(stream=True, **given)]
    for index in (0, 1):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == whole[index].text
        assert own[-1].logprobs == whole[index].logprobs
        assert len(own) > 1
        assert all(piece.logprobs is None for piece in own[:-1])
    assert whole[0].logprobs != whole[1].logprobs


@pytest.fixture
def chat_export(lab, tmp_path):
    """A model with a chat template."""
    folder = tmp_path / "export"
    shutil.copytree(lab.fit("ar_target"), folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_chats(chat_export):
    messages = [{"role": "user", "content": "def area"}]
    in_parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "area"}]
    with serving(chat_export, "name=m") as (address, _):
        client = client_of(address)
        given = {"model": "m", "messages": messages, "seed": 2, "temperature": 1.0}
        answer = client.chat.completions.create(
            max_tokens=9, logprobs=True, top_logprobs=2, **given
        )
        given["messages"] = [{"role": "user", "content": in_parts}]
        pieces = client.chat.completions.create(max_completion_tokens=9, stream=True, **given)
        streamed = "".join(p.choices[0].delta.content for p in pieces)
        given["messages"] = messages
        *_, last = client.chat.completions.create(
            max_tokens=9, logprobs=True, top_logprobs=2, stream=True, **given
        )
        body = {"messages": messages, "top_logprobs": 2}
        picture = [{"type": "image_url", "image_url": {"url": "x"}}]
        seen = httpx.post(
            f"{address}v1/chat/completions",
            json={"messages": [{"role": "user", "content": picture}]},
        )
        wrong = httpx.post(f"{address}v1/chat/completions", json=body)
    sampler = load(chat_export, dtype="float32")
    prompt = "user: def area\nassistant: "
    result = expected(sampler, prompt, 2, max_new_tokens=9, temperature=1.0)
    choice = answer.choices[0]
    assert choice.message.content == result.text == streamed
    ids = sampler.tokenizer(prompt).input_ids + result.token_ids
    own = forward(sampler, ids)[-len(result.token_ids) :]
    assert [t.logprob for t in choice.logprobs.content] == pytest.approx(
        [float(row[i]) for row, i in zip(own, result.token_ids)], abs=1e-4
    )
    assert all(len(t.top_logprobs) == 2 for t in choice.logprobs.content)
    assert last.choices[0].logprobs.model_dump() == choice.logprobs.model_dump()
    assert (wrong.status_code, seen.status_code) == (400, 400)
    assert "parts of type text" in seen.json()["error"]["message"]
    assert "top_logprobs is for answers with logprobs=true" in wrong.json()["error"]["message"]


def test_an_infilling_model_writes_between(lab):
    export = str(lab.fit("asarm_joint"))
    with serving(export, "name=m", "at_once=3") as (address, _):
        client = client_of(address)
        given = {"model": "m", "max_tokens": 7, "temperature": 1.0}

        def ask(seed):
            return client.completions.create(
                prompt="def area", suffix=" return self", seed=seed, echo=seed == 3, **given
            ).choices[0]

        with ThreadPoolExecutor(6) as pool:
            answers = [*pool.map(ask, range(6))]
        url = f"{address}v1/completions"
        body = {"prompt": "def area", "suffix": "x", "max_tokens": 5}
        bodies = [
            ({"prompt": "x"}, "the prompt has no hole"),
            ({**body, "max_tokens": 10**6}, "shorten one of them"),
            ({**body, "logprobs": 1}, "has no logprobs"),
            ({**body, "stream": True}, "leave out stream"),
            ({**body, "stop": "x"}, "stop= is not allowed here"),
        ]
        replies = [(httpx.post(url, json=b), message) for b, message in bodies]
        hole = {"prompt": "a <hole:3> b", "seed": 1, **given}
        whole = client.completions.create(**hole).choices[0]
        pieces = [piece.choices[0] for piece in client.completions.create(stream=True, **hole)]
    sampler = load(export, dtype="float32")
    for seed, answer in enumerate(answers):
        prompt = "def area<hole:7> return self"
        result = expected(sampler, prompt, seed, temperature=1.0)
        middle = sampler.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        assert answer.text == ("def area" if seed == 3 else "") + middle
    for reply, message in replies:
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]
    text = expected(sampler, "a <hole:3> b", 1, temperature=1.0).text
    assert whole.text == text == "".join(piece.text for piece in pieces)
    # Drafts are accepted in another order than the text's, so none of its parts is one.
    assert {(piece.accepted, piece.accepted_per_pass) for piece in pieces} == {(None, None)}


def test_a_chat_needs_a_template(address):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    reply = httpx.post(f"{address}v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "no chat template" in reply.json()["error"]["message"]


def test_bad_clients_do_not_keep_others_waiting(address, client):
    host, port = address.split("/")[2].split(":")
    open_ones = []
    for _ in range(200):  # that say half a request and stay
        one = socket.create_connection((host, int(port)))
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        open_ones.append(one)
    garbage = socket.create_connection((host, int(port)))
    garbage.sendall(b"\x00\xff\xfe" * 1000)
    answer = client.completions.create(model="drafted", prompt="x", max_tokens=4, timeout=20)
    assert answer.usage.completion_tokens >= 1
    for one in [*open_ones, garbage]:
        one.close()
    idle(address)


def test_a_body_without_end_is_cut(address):
    host, port = address.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as one:
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        sent, piece = 0, b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with suppress(OSError):  # the server has hung up
            while sent < 4e8:
                one.sendall(piece)
                sent += len(piece)
        assert 4e6 <= sent < 4e8


def test_who_may_ask_and_how_many(export):
    options = ("at_once=1", "waiting=0", "max_length=128")
    with serving(export, *options, PARADE_API_KEY="secret") as (address, process):
        url, key = f"{address}v1/completions", {"Authorization": "Bearer secret"}
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        assert httpx.get(f"{address}v1/models").status_code == 401
        assert httpx.post(url, json=body).status_code == 401
        wrong = httpx.post(url, json=body, headers={"Authorization": "Bearer public"})
        assert "secret" not in wrong.text
        with httpx.stream("POST", url, json={**body, "stream": True}, headers=key) as first:
            lines = first.iter_lines()
            next(lines)
            full = httpx.post(url, json=body, headers=key)
            assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
            # It ends when asked to, and answers first what it has taken.
            process.send_signal(signal.SIGTERM)
            assert [*lines][-2] == "data: [DONE]"
        assert process.wait(20) == 0


def drafted_text(sampler, result):
    """The characters of an answer that were drafted: of every pass all tokens but the last."""

    def length(count):  # half a character is none
        return len(sampler.tokenizer.decode(result.token_ids[:count]).rstrip("\ufffd"))

    found, at = "", 0
    for n in result.stats.passes:
        found, at = found + result.text[length(at) : length(at + n - 1)], at + n
    return found


@pytest.mark.parametrize("model", ["drafted", "plain"])
def test_a_stream_says_which_text_was_drafted(client, sampler, model):
    given = {"max_tokens": 24, "temperature": 1.0}
    pieces = client.completions.create(model=model, prompt="def area", seed=3, stream=True, **given)
    found = [piece.choices[0] for piece in pieces]
    drafted = "".join(c.text[a:b] for c in found for a, b in c.accepted)
    result = expected(sampler, "def area", 3, max_new_tokens=24, temperature=1.0)
    assert drafted == (drafted_text(sampler, result) if model == "drafted" else "")
    assert (0 < len(drafted) < len(result.text)) == (model == "drafted")
    accepted = [n for c in found for n in c.accepted_per_pass]
    assert accepted == (accepted_per_pass(result) if model == "drafted" else [0] * 24)


def accepted_per_pass(result):
    """How many drafts each pass of an answer accepted: all but its last token, unless cut off."""
    stats = result.stats
    return [min(n, whole - 1) for n, whole in zip(stats.emitted, stats.passes)]


needs_browser = pytest.mark.skipif(browser.BROWSER is None, reason="no chromium")
ENDED = (
    "(found => found.length == 2 && found.every(e => e.textContent.startsWith('24 tokens')))"
    "([...document.querySelectorAll('.cost')])"
)
STATE = "document.querySelector('[role=status]').textContent"
ANSWERED = f"{STATE}.includes('answers')"
QUERY = "?prompt=def%20area&max_tokens=24&temperature=1&seed=3"


def shown_in(page, parts):
    """The text of each such part of the page."""
    return page.value(f"[...document.querySelectorAll('{parts}')].map(e => e.textContent.trim())")


@needs_browser
def test_the_page_shows_both_texts_and_colours_accepted_drafts(address, sampler):
    with browser.opened(f"{address}{QUERY}") as page:
        page.until(ANSWERED)
        costs, texts, drafts, coloured = (
            page.value(f"[...document.querySelectorAll('section')].map({what})")
            for what in (
                "e => e.querySelector('h2').textContent + ': ' + "
                "e.querySelector('.cost').textContent",
                "e => e.querySelector('pre').textContent",
                "e => [...e.querySelectorAll('mark')].map(m => m.textContent).join('')",
                "e => new Set([...e.querySelectorAll('pre, pre *')]"
                ".map(m => getComputedStyle(m).backgroundColor)).size",
            )
        )
        said = page.value(STATE)
        underlined = page.value(
            "[...document.querySelectorAll('mark')]"
            ".every(m => getComputedStyle(m).textDecorationLine == 'underline')"
        )
        tables = page.value(
            "[...document.querySelectorAll('section table')].map(t => t.checkVisibility())"
        )
        caption = page.value("document.querySelector('caption').textContent")
        shares, bars = (
            page.value(f"[...document.querySelectorAll('tr')].map({what})")
            for what in (
                "r => r.querySelector('th').textContent + ': ' + r.cells[1].textContent",
                "r => (b => 100 * b.offsetWidth / b.parentElement.offsetWidth)"
                "(r.querySelector('.bar'))",
            )
        )
        assert page.value("document.querySelector('#access').checkVisibility()") is False
        shown = "(out => (show(out, '😀ab', [[1, 2]]), out.innerHTML))(document.createElement('p'))"
        assert page.value(shown) == "😀<mark>a</mark>b"  # where JavaScript counts two
        page.value("go(); go()")  # a new question ends the one before
        page.until(ANSWERED)
        assert shown_in(page, "section pre") == [text.strip() for text in texts]
        page.value("ask = async pane => pane.dataset.model; go()")
        page.until(f"{STATE} == 'The answers differ.'")
    result = expected(sampler, "def area", 3, max_new_tokens=24, temperature=1.0)
    assert re.match(r"drafted: 24 tokens in \d+ passes", costs[0])
    assert costs[1].startswith("plain: 24 tokens in 24 passes (1.00 a pass)")
    assert texts == [result.text, result.text]
    assert said == "Both answers are the same."
    assert drafts == [drafted_text(sampler, result), ""]
    assert coloured == [2, 1]
    assert underlined
    accepted = accepted_per_pass(result)
    counts = [sum(n > i for n in accepted) for i in range(max(accepted))]
    widths = [100 * n / len(accepted) for n in counts]
    assert caption.startswith(f"{len(accepted)} passes")
    assert shares == [
        f"draft {i + 1}: {n}, {int(w + 0.5)}%" for i, (n, w) in enumerate(zip(counts, widths))
    ]
    assert bars == pytest.approx(widths, abs=1)
    assert tables == [True, False]  # plain decoding has no drafts


@pytest.fixture(scope="module")
def chats(export, tmp_path_factory):
    """The address of a server whose models chat and call tools."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    drafting = "sampler=[fastest=chain]", "name=drafted"
    with serving(export, *drafting, f"chat_template={template}") as (address, _):
        yield address


COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}}
COLOUR |= {"required": ["colour"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": COLOUR}}]
CHAT = {"prompt": "x", "max_tokens": 200, "seed": 3, "temperature": 1, "chat": True}


def fill_in(page, **fields):
    """Fill in fields of the page by their ids, and press Go."""
    for name, value in fields.items():
        what = "checked" if isinstance(value, bool) else "value"
        page.value(f"document.getElementById('{name}').{what} = {json.dumps(value)}")
    page.value("document.querySelector('#ask button').click()")


@needs_browser
def test_the_page_asks_for_an_answer_of_a_schema_and_for_calls_of_tools(chats):
    pytest.importorskip("llguidance")
    asked = {"model": "drafted", "messages": [{"role": "user", "content": "x"}]}
    given = asked | {"max_tokens": 200, "seed": 3, "temperature": 1}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": COLOUR}}
    forced = {"tools": TOOLS, "tool_choice": "required"}
    client = client_of(chats).chat.completions
    text = client.create(response_format=wanted, **given).choices[0].message.content
    calls = client.create(**forced, **given).choices[0].message.tool_calls
    body = given | forced | {"response_format": wanted}
    refused = httpx.post(f"{chats}v1/chat/completions", json=body).json()["error"]["message"]
    with browser.opened(chats) as page:
        page.until("document.querySelectorAll('section').length == 2")
        fill_in(page, schema=json.dumps(COLOUR), **CHAT)
        page.until(ANSWERED)
        assert shown_in(page, "section pre") == [text.strip()] * 2
        assert json.loads(text)["colour"] in ("red", "green")
        assert page.value(STATE) == "Both answers are the same."
        fill_in(page, schema="", tools=json.dumps(TOOLS), tool_choice="required")
        page.until(ANSWERED)
        told = "".join(f"calls paint with {c.function.arguments}" for c in calls)
        assert shown_in(page, "section .calls") == [told] * 2
        assert {c.function.name for c in calls} == {"paint"}
        assert shown_in(page, "section pre") == ["", ""]
        assert page.value(STATE) == "Both answers are the same."
        fill_in(page, schema=json.dumps(COLOUR))  # the server's own line
        page.until("[...document.querySelectorAll('section [role=alert]')].every(e => e.innerText)")
        assert shown_in(page, "section [role=alert]") == [refused] * 2
        assert shown_in(page, "section .calls") == ["", ""]


@needs_browser
def test_the_page_says_at_the_field_what_is_no_json(address):
    requests = "performance.getEntriesByType('resource').filter(e => /comp/.test(e.name)).length"
    tools = json.dumps(TOOLS)
    wrong = [  # what is filled in, and where a line says that it is wrong
        ({"schema": '{"type": }'}, "schema", "This is not JSON"),
        ({"schema": "[]"}, "schema", "A JSON schema is an object"),
        ({"schema": "null"}, "schema", "A JSON schema is an object"),
        ({"schema": "", "tools": tools}, "tools", "Tools are for chats"),
        ({"tools": json.dumps(TOOLS[0]), "chat": True}, "tools", "Tools are a list"),
        ({"tools": tools[:-1]}, "tools", "This is not JSON"),
    ]
    with browser.opened(address) as page:
        page.until("document.querySelectorAll('section').length == 2")
        for fields, where, said in wrong:
            fill_in(page, **fields)
            assert page.value("document.activeElement.id") == where
            described = page.value(
                "document.activeElement.getAttribute('aria-describedby').split(' ')"
                ".map(id => document.getElementById(id).textContent)[0]"
            )
            assert described.startswith(said)
            assert "".join(shown_in(page, "#ask .error")) == described.strip()
            assert len(shown_in(page, "[aria-invalid=true]")) == 1
        assert page.value(requests) == 0
        fill_in(page, tools="", chat=False, max_tokens=2)
        page.until(ANSWERED)
        assert shown_in(page, "[aria-invalid=true]") == []
        assert page.value(requests) == 2


# The least contrast of a text with the colour behind it (WCAG 2.2, 1.4.3).
CONTRAST = """(() => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => (c => numbers(c)[3] === 0 ? behind(e.parentElement) : c)(
    getComputedStyle(e).backgroundColor);
  const found = [...document.body.querySelectorAll('*')].filter(e => e.checkVisibility() &&
    (e.value || [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))).map(e => {
      const [a, b] = [getComputedStyle(e).color, behind(e)].map(light);
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
  return Math.min(...found);
})()"""
# What is wider than the page at a width, by its tag and class.
TOO_WIDE = """(width => {
  document.documentElement.style.width = `${width}px`;
  return [...document.querySelectorAll('body, body *')].filter(e => e.checkVisibility())
    .filter(e => e.getBoundingClientRect().right > width || e.scrollWidth > e.clientWidth + 1
      && getComputedStyle(e).display != 'inline').map(e => `${e.tagName} ${e.className}`);
})"""
CONTROLS = "textbox", "spinbutton", "checkbox", "combobox", "button"
# What the Tab key reaches after the prompt, one after another, and whether one sees where it is.
KEYBOARD = (
    "schema", "tools", "max_tokens", "temperature", "seed", "chat", "tool_choice", "",
)  # fmt: skip
FOCUS = "(e => [e.id, parseFloat(getComputedStyle(e).outlineWidth) >= 2])(document.activeElement)"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_by_many(chats, scheme):
    pytest.importorskip("llguidance")
    with browser.opened(chats, scheme=scheme) as page:
        page.until("document.querySelectorAll('section').length == 2")
        fill_in(page, schema='{"type": }', **CHAT)
        fill_in(page, schema="", tools=json.dumps(TOOLS), tool_choice="required")
        page.until(ANSWERED)
        assert page.value(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
        assert page.value(CONTRAST) >= 4.5
        assert page.value("document.querySelector('tr').checkVisibility()")
        for width in (375, 1280):
            assert page.value(f"{TOO_WIDE}({width})") == []
        # A screen reader has names of all controls and each bar's figure; tokens do not interrupt.
        told = [n for n in page.ask("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
        names = {}
        for node in told:
            names.setdefault(node["role"]["value"], []).append(node["name"]["value"])
        assert names["textbox"][0] == "Prompt"
        assert all(names[role] and all(names[role]) for role in CONTROLS)
        assert names["rowheader"][0] == "draft 1"
        assert re.fullmatch(r"\d+, \d+%", names["cell"][0])
        assert page.value(
            "[...document.querySelectorAll('pre, .cost, table')]"
            ".every(e => !e.closest('[aria-live], [role=status], [role=alert]'))"
        )
        page.value("document.querySelector('#prompt').focus()")
        reached = []
        for _ in KEYBOARD:
            page.press("Tab")
            reached.append(page.value(FOCUS))
    assert reached == [[name, True] for name in KEYBOARD]


@needs_browser
def test_the_page_asks_for_the_key(export):
    with (
        serving(export, "name=drafted", PARADE_API_KEY="secret") as (address, _),
        browser.opened(f"{address}{QUERY}") as page,
    ):
        typing = "document.activeElement.matches('input[type=password]')"
        said = "document.querySelector('#access').innerText"
        panes = "document.querySelectorAll('section').length"
        page.until(typing)
        assert "wrong" not in page.value(said)
        page.enter("public")
        page.until(f"{said}.includes('This API key is wrong.')")
        assert page.value(panes) == 0
        page.enter("secret")
        page.until(ENDED)
        assert page.value("document.querySelector('#access').checkVisibility()") is False
        assert page.value("localStorage.length + document.cookie.length") == 0
        page.value("window.before = true")
        page.ask("Page.reload")  # the tab knows the key
        page.until(f"!window.before && {ENDED}")


def test_a_request_past_its_time_gets_504_and_frees_its_place(export):
    with serving(export, "at_once=1", "seconds=1") as (address, _):
        url, body = f"{address}v1/completions", {"prompt": "x", "ignore_eos": True, "n": 64}
        late = httpx.post(url, json={**body, "max_tokens": 200}, timeout=60)
        assert late.status_code == 504
        assert late.json()["error"]["message"] == "not ended within 1 seconds"
        short = {"prompt": "x", "max_tokens": 1}  # on a busy machine it may be late, too
        until(lambda: httpx.post(url, json=short).status_code == 200)


@pytest.fixture
def replaced(lab, export, tmp_path):
    """(a copy of the export, a function that puts another export in its place)"""
    folder = tmp_path / "drafter" / "export"
    shutil.copytree(export, folder)

    def put(other):
        folder.rename(tmp_path / f"old{len([*tmp_path.iterdir()])}")
        shutil.copytree(other, folder)
        return folder

    return folder, put


def loaded_at(address):
    text = httpx.get(f"{address}metrics").text
    return float(re.search(r"^parade:export_loaded_timestamp_seconds (\S+)$", text, re.M)[1])


def said(process):
    """The next line about a reload."""
    while "SIGHUP" not in (line := process.stdout.readline()):
        assert line, "the server has ended"
    return line


def test_a_newer_drafter_is_served_after_a_signal(lab, replaced, sampler):
    """Each text is plain decoding's: before, across the change, after it and after a bad export."""
    folder, put = replaced
    given = {"prompt": "def area", "temperature": 1.0}
    long = {"max_tokens": 200, "n": 5, "seed": 5, "extra_body": {"ignore_eos": True}}
    options = "at_once=1", "sampler=[fastest=chain]"
    with serving(folder, *options) as (address, process), ThreadPoolExecutor(1) as pool:
        client, found = client_of(address), []

        def ask():
            """A drafted answer and a plain one; return the passes of the first."""
            short = {**given, "max_tokens": 30, "seed": len(found)}
            both = [client.completions.create(model=m, **short) for m in ("drafter", "plain")]
            found.append([answer.choices[0].text for answer in both])
            return both[0].usage.target_passes

        before = ask(), loaded_at(address)
        across = pool.submit(client.completions.create, model="drafter", **given, **long)
        until(lambda: httpx.get(f"{address}health").json()["running"] == 1)
        put(lab.fit("deer_stage2"))
        process.send_signal(signal.SIGHUP)
        assert said(process) == "SIGHUP: drafter has the newer drafter from now on\n"
        after = ask(), loaded_at(address)
        assert after[1] > before[1]
        weights = put(lab.fit("deer_stage2")) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        for wrong in (None, lab.fit("ar_target")):
            if wrong:
                put(wrong)
            process.send_signal(signal.SIGHUP)
            assert said(process).startswith("SIGHUP: drafter is served as before: ")
        assert ask() > 0
        assert loaded_at(address) == after[1]
        texts = [choice.text for choice in across.result().choices]
    params = {"max_new_tokens": 200, "temperature": 1.0, "ignore_eos": True}
    alone = [expected(sampler, "def area", seed, **params) for seed in request_seeds(5, 5)]
    assert texts == [result.text for result in alone]
    short = {"max_new_tokens": 30, "temperature": 1.0}
    alone = [expected(sampler, "def area", seed, **short) for seed in range(3)]
    assert found == [[result.text] * 2 for result in alone]
    newer = load(lab.fit("deer_stage2"), dtype="float32")
    for loaded, seed, passes in ((sampler, 0, before[0]), (newer, 1, after[0])):
        assert expected(loaded, "def area", seed, **short).stats.target_passes == passes
    assert after[0] != alone[1].stats.target_passes  # the old drafter's


POOLS = """
import os, time, torch
from decoding.serve import in_a_thread_that_ends

def threads():
    return len(os.listdir("/proc/self/task"))

def work():
    return torch.ones(1000, 1000).sum().item()

torch.set_num_threads(2)
before = threads()
assert in_a_thread_that_ends(work) == 1e6
for _ in range(100):  # a pool takes a moment to end
    left = threads() - before
    if not left:
        break
    time.sleep(0.1)
work()
print(left, threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_what_loads_a_model_leaves_no_pool_of_threads():
    """A second pool makes every product of the server's thread wait longer."""
    ran = subprocess.run([sys.executable, "-c", POOLS], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.split() == ["0", "1"], ran.stderr  # in the main thread a pool stays


def test_what_a_request_needs():
    network = tiny.causal_lm(12)  # 2 layers, 1 head of 8 for keys, float64
    assert row_bytes(network, 100) == 2 * 2 * 1 * 8 * 100 * 8


def cache_bytes(sampler, at_once, longest):
    """The most bytes that all caches have after a cycle, of requests as long as they may be."""
    step, found, ended = Running.step, [], threading.Semaphore(0)

    def watched(running):
        networks, chunks = running.batch.networks.values(), step(running)
        found.append(sum(m.nbytes for n in networks for m in n.cache._memory.values()))
        return chunks

    def show(chunk):
        if isinstance(chunk, Exception) or chunk.result is not None:
            ended.release()

    params = SamplingParams(max_new_tokens=longest - 2, ignore_eos=True, verify="tree")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Running, "step", watched)
        scheduler = Scheduler({"m": sampler}, at_once, waiting=9, longest=longest)
        prompt, params = scheduler.prepared("m", [5, 6], params)
        scheduler.submit([("m", prompt, params, seed, show) for seed in range(4)])
        assert all(ended.acquire(timeout=60) for _ in range(4))
        scheduler.close()
    assert scheduler.counts.requests == {"length": 4}
    return max(found)


def test_keys_and_values_fit_into_the_budget(sampler):
    assert requests_within(2e-4, sampler, 100) == 2
    assert cache_bytes(sampler, 2, 100) <= 2e5
    assert cache_bytes(sampler, 3, 100) > 2e5  # one more does not


@pytest.fixture
def wide_target(lab, tmp_path):
    """The target with a context of 2,000 tokens, whose keys and values take megabytes."""
    folder = tmp_path / "target"
    shutil.copytree(lab.fit("ar_target"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2000}))
    return str(folder)


@pytest.mark.parametrize(("budget", "most"), [(["cache_gb=0.003"], 2), ([], 4)])
def test_a_budget_for_two_requests_admits_two(export, wide_target, sampler, budget, most):
    given = {"max_tokens": 80, "ignore_eos": True, "temperature": 1.0}
    body = {"prompt": "x", "seed": 3, "n": 5, "stream": True, **given}
    texts, running = [""] * 5, []
    options = [f"target={wide_target}", "at_once=4", *budget]
    with (
        serving(export, *options) as (address, _),
        httpx.Client() as other,
        httpx.stream("POST", f"{address}v1/completions", json=body, timeout=60) as reply,
    ):
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                (piece,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[piece["index"]] += piece["text"]
                running.append(other.get(f"{address}health").json()["running"])
    assert max(running) == most
    given["max_new_tokens"] = given.pop("max_tokens")
    assert texts == [expected(sampler, "x", s, **given).text for s in request_seeds(3, 5)]


def test_a_budget_too_small_for_one_request_is_one_line(export, wide_target):
    message = "cache_gb=0.001 is too little: one request of 2000 tokens needs 0.00129. Give more"
    with pytest.raises(ValueError, match=message) as error:
        run([f"model={export}", f"target={wide_target}", "port=0", "cache_gb=0.001"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["port=99999"], "port=99999 is not allowed"),
        (["at_once=0"], "at_once=0 is not allowed"),
        (["max_length=100000"], "max_length=100000 is not allowed: the model's context"),
        (["host=203.0.113.1"], "cannot listen on 203.0.113.1"),
    ],
)
def test_wrong_options_are_one_line(export, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        run([f"model={export}", "port=0", *arguments])
    assert "\n" not in str(error.value)

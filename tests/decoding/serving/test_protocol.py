"""OpenAI's protocol in process: what its client and front ends send, and what they read."""

import json

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from starlette.testclient import TestClient

from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.plain import PlainSampler
from decoding.serving.app import Server
from decoding.serving.chats import Chat
from decoding.serving.protocol import Completion
from decoding.serving.scheduler import Scheduler
from tests.support import tiny

V, LONGEST = 24, 48
ASK = [{"role": "user", "content": "abc"}]
TEMPLATE = (
    "{% if enable_thinking is defined and not enable_thinking %}ttt{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}b{% endif %}"
)


@pytest.fixture(scope="module")
def parts():
    """(HTTP client, OpenAI's client, the plain sampler) of a server of two models."""
    model, tokenizer = tiny.causal_lm(V).float(), tiny.tokenizer(V)
    model.config.max_position_embeddings = LONGEST
    tokenizer.chat_template = TEMPLATE
    plain = PlainSampler(model, tokenizer)
    samplers = {"m": JacobiSampler(model, tokenizer, block_size=4), "org/plain": plain}
    scheduler = Scheduler(samplers, at_once=4, waiting=4, longest=LONGEST)
    server = Server(scheduler, tokenizer, key=None, most=100_000, seconds=60.0)
    with TestClient(server.app(), raise_server_exceptions=False) as http:
        yield http, OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http), plain


@pytest.fixture
def http(parts):
    return parts[0]


@pytest.fixture
def client(parts):
    return parts[1]


def chat(http, **more):
    return http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 3, **more})


def streamed(client):
    """The message that OpenAI's client puts together, and all pieces of another stream."""
    given = {"model": "m", "messages": ASK, "max_tokens": 9, "n": 2}
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
    message = stream.current_completion_snapshot.choices[1].message
    return message, [*client.chat.completions.create(stream=True, **given)]


def test_a_streamed_message_can_be_sent_back(client, monkeypatch):
    message, pieces = streamed(client)
    assert message.role == "assistant"
    client.chat.completions.create(model="m", messages=[*ASK, message, *ASK], max_tokens=2)
    roles = {0: [], 1: []}
    for piece in pieces:
        roles[piece.choices[0].index].append(piece.choices[0].delta.role)
    assert all(len(found) > 1 for found in roles.values())
    assert all(first == "assistant" and not any(rest) for first, *rest in roles.values())
    assert len({(piece.id, piece.created) for piece in pieces}) == 1
    # Without the role, the control, OpenAI's client sends a message that is refused.
    bare = lambda self, _, text, *__: ({"delta": {"content": text}}, False)  # noqa: E731
    monkeypatch.setattr(Chat, "piece", bare)
    message, _ = streamed(client)
    assert message.role is None
    with pytest.raises(BadRequestError):
        client.chat.completions.create(model="m", messages=[*ASK, message, *ASK], max_tokens=2)


def test_the_time_of_a_stream_is_that_of_its_request(client, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("decoding.serving.protocol.time.time", lambda: next(clock))
    _, pieces = streamed(client)
    assert len({piece.created for piece in pieces}) == 1


def test_models_by_their_id(client, http):
    assert client.models.retrieve("m").id == "m"
    assert client.models.retrieve("org/plain").id == "org/plain"
    assert http.get("/v1/models/m").json() in http.get("/v1/models").json()["data"]


def test_an_unknown_model_is_openais_404(client, http):
    asked = {"model": "gpt-4", "messages": ASK}
    for ask in (
        lambda: client.models.retrieve("gpt-4"),
        lambda: client.chat.completions.create(**asked),
        lambda: client.completions.create(model="gpt-4", prompt="a"),
    ):
        with pytest.raises(NotFoundError, match="Served are m, org/plain") as error:
            ask()
        assert (error.value.code, error.value.param) == ("model_not_found", "model")
    # Another mistake in the same body stays what it was.
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(**asked | {"model": "m"}, max_tokens=-1)
    assert (error.value.code, error.value.param) == ("400", "max_tokens")


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/v1/embeddings", 404), ("GET", "/v2", 404), ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_in_the_protocol(http, method, path, code):
    reply = http.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (code, code)
    assert {*error} == {"message", "type", "param", "code"}
    assert path in error["message"]


def test_a_fault_of_the_server_is_said_in_the_protocol(http, monkeypatch):
    monkeypatch.setattr("decoding.serving.app.exposition", lambda _: 1 / 0)
    reply = http.get("/metrics")
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")


def test_pages_of_other_origins_may_ask(http):
    asked = {
        "Origin": "http://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    reply = http.options("/v1/chat/completions", headers=asked)
    assert reply.status_code == 200
    assert "content-type" in reply.headers["access-control-allow-headers"]
    origin = {"Origin": "http://a.example"}
    for path in ("/v1/models", "/v1/nothing", "/v1/completions"):  # of errors too
        reply = http.get(path, headers=origin)
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers


def test_a_template_reads_what_a_client_gives_it(http):
    plain, quiet = (
        chat(http, temperature=0, chat_template_kwargs=given).json()
        for given in ({}, {"enable_thinking": False, "unread": [1, {"a": None}]})
    )
    assert quiet["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 3
    assert quiet["choices"] != plain["choices"]


@pytest.mark.parametrize(
    "name",
    ["messages", "conversations", "tools", "documents", "chat_template", "template", "bos_token",
     "eos_token", "add_generation_prompt", "continue_final_message", "seconds"],
)  # fmt: skip
def test_a_client_sets_nothing_else_of_a_template(http, name):
    reply = chat(http, chat_template_kwargs={name: "x"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "chat_template_kwargs"
    assert repr(name) in reply.json()["error"]["message"]


HARMLESS = [
    {"store": False}, {"store": None}, {"metadata": {"a": "b"}}, {"service_tier": "auto"},
    {"parallel_tool_calls": True}, {"parallel_tool_calls": False}, {"user": "u"},
    {"safety_identifier": "u", "prompt_cache_key": "k"}, {"reasoning_effort": None},
    {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none"},
    {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"},
    {"logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1},
    {"skip_special_tokens": True, "stop_token_ids": [], "min_tokens": 0, "length_penalty": 1.0},
    {"guided_json": None, "stop": None, "seed": None, "logprobs": None},
]  # fmt: skip


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_fields_that_ask_for_nothing_are_taken(http, fields):
    given = {"temperature": 0, "max_tokens": 4}
    assert chat(http, **given, **fields).json()["choices"] == chat(http, **given).json()["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True}, {"store": 0}, {"service_tier": "flex"}, {"presence_penalty": 1e4},
        {"presence_penalty": False}, {"logit_bias": {"1": 10**300}}, {"frequency_penalty": 10**400},
        {"logit_bias": {"a": 1}}, {"logit_bias": {"99": 1}}, {"logit_bias": [1]},
        {"tool_choice": "required"}, {"skip_special_tokens": False}, {"min_tokens": 5},
        {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}}, {"response_format": "json"},
        {"structured_outputs": {"choice": []}}, {"structured_outputs": {"structural_tag": "a"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tools": [{}]},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"best_of": 2},
        {"reasoning_effort": "high"}, {"guided_json": {}}, {"max_tokens": 0},
        # Numbers that float32 does not hold, and integers as large.
        {"temperature": 1e-38}, {"temperature": 10**300}, {"temperature": 5e-324},
        {"repetition_penalty": 1e-40}, {"repetition_penalty": 10**30}, {"top_p": 10**30},
        {"min_p": 10**30}, {"top_k": 10**30}, {"seed": 10**30}, {"max_tokens": 10**30},
        {"n": 10**30},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_cannot_be_kept_is_named(http, fields):
    reply = chat(http, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, *fields)
    assert next(iter(fields)) in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-37}, {"temperature": 10**30}, {"repetition_penalty": 10**20},
        {"repetition_penalty": 1e-20}, {"top_p": 5e-324}, {"min_p": 5e-324}, {"top_k": 2**63},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_at_the_ends_of_the_ranges_work(http, fields):
    given = {"seed": 3, "max_tokens": 8, **fields}
    replies = [chat(http, model=model, **given) for model in ("m", "org/plain")]
    assert {reply.status_code for reply in replies} == {200}
    drafted, plain = (reply.json()["choices"][0]["message"]["content"] for reply in replies)
    assert drafted == plain
    if fields.get("temperature") == 1e-37:
        greedy = chat(http, max_tokens=8, temperature=0).json()
        assert greedy["choices"][0]["message"]["content"] == plain


def completion(http, **fields):
    return http.post("/v1/completions", json={"temperature": 0, **fields})


@pytest.mark.parametrize("prompt", ["abcdef", [1, 2, 3], "a"])
def test_a_prompt_is_scored_without_an_answer(http, prompt):
    given = {"prompt": prompt, "echo": True, "logprobs": 1}
    found = completion(http, max_tokens=0, **given).json()
    more = completion(http, max_tokens=1, **given).json()["choices"][0]
    (choice,) = found["choices"]
    assert choice["text"] == more["text"][:-1]
    assert (choice["finish_reason"], found["usage"]["completion_tokens"]) == ("length", 0)
    for key, values in choice["logprobs"].items():
        assert json.dumps(values[1:]) == json.dumps(more["logprobs"][key][1:-1])
    assert completion(http, max_tokens=0, prompt=prompt, echo=True).json()["choices"] == [
        {**choice, "logprobs": None}
    ]
    assert completion(http, max_tokens=0, prompt=prompt).status_code == 400


@pytest.mark.parametrize("left", [0, 1, 10])
def test_an_answer_of_no_given_length_gets_the_room_that_there_is(http, left):
    prompt = [1] * (LONGEST - left)
    found = completion(http, prompt=prompt)
    talk = [{"role": "user", "content": "a" * (LONGEST - left - 1)}]
    answered = http.post("/v1/chat/completions", json={"messages": talk})
    asked = completion(http, prompt=prompt, max_tokens=left + 1)
    if left:
        for reply in (found, answered):
            assert reply.json()["usage"]["completion_tokens"] == left
    else:
        for reply, param in ((found, "prompt"), (answered, "messages")):
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
            assert f"no room for an answer in the {LONGEST}" in reply.json()["error"]["message"]
    # A length that is given is not changed.
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "max_tokens")
    short = completion(http, prompt="abc").json()["usage"]["completion_tokens"]
    assert short == Completion.USUAL


def test_tokens_of_a_text_and_back(http):
    asked = [{"prompt": "abc"}, {"prompt": [0, 1, 2]}, {"messages": ASK, "model": "org/plain"}]
    for given in asked:
        found = http.post("/tokenize", json=given).json()
        answer = completion(http, prompt=found["tokens"], max_tokens=2)
        told = (chat if "messages" in given else completion)(http, **given).json()
        assert found["count"] == len(found["tokens"]) == told["usage"]["prompt_tokens"]
        assert found["max_model_len"] == LONGEST
        assert answer.status_code == 200
        text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
        assert text == ("abcb" if "messages" in given else "abc")
    assert http.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("tokenize", {"prompt": ["a", "b"]}, "prompt"), ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("tokenize", {"prompt": "a" * 10**5}, None), ("detokenize", {"tokens": [V]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"), ("detokenize", {"tokens": "a"}, "tokens"),
        ("detokenize", {"tokens": [1] * 99}, "tokens"), ("detokenize", {"prompt": "a"}, "prompt"),
        ("detokenize", {"tokens": [1], "model": "x"}, "model"),
    ],
)  # fmt: skip
def test_mistakes_about_tokens_are_told(http, path, given, param):
    reply = http.post(f"/{path}", json=given)
    assert reply.status_code in (400, 404, 413)
    assert reply.json()["error"]["param"] == param or param is None

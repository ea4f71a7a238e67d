"""A small OpenAI-compatible server on a port of this machine: answers by rule, and may fail."""

import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers completions by `said`.

    Attributes:
        said: (prompt ids, seed) -> the answer's token ids, end of text included.
        ids: Whether it returns token ids and names tokens by them, as vLLM does.
        failures: Taken in turn by completions: an HTTP status, 'cut' (half an answer), 'hang up',
            'short' (a token less than it says), 'none' (as it should be).
        key: What it takes as the API key; None: any.
        models: Names of what it serves, or a dict of them and their paths, which it tells as vLLM.
        requests: The bodies of all completions that were asked for.
        most: Requests that were under way at once, at the most.
    """

    daemon_threads = True

    def __init__(self, tokenizer, said, ids=True, failures=(), key=None, models=("m",)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.said, self.ids, self.key = tokenizer, said, ids, key
        self.failures, self.models = list(failures), models
        self.requests, self.under_way, self.most = [], 0, 0
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def completion(self, body):
        eos, ids = self.tokenizer.eos_token_id, self.said(body["prompt"], body["seed"])
        ids = ids[: body["max_tokens"]]
        ended = ids[-1] == eos
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        choice = {"index": 0, "text": text, "finish_reason": "stop" if ended else "length"}
        if self.ids:
            choice["token_ids"] = ids
        if body.get("logprobs"):
            name = "token_id:{}".format if self.ids else str
            top = {name(0): math.log(0.25), name(1): math.log(0.125), name(2): -9.0}
            choice["logprobs"] = {"top_logprobs": [{name(t): math.log(0.5)} | top for t in ids]}
        usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
        return {"id": "x", "object": "text_completion", "created": 0, "model": "m",
                "choices": [choice], "usage": usage}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, content, cut=False):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def allowed(self):
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.reply(401, {"error": {"message": "no such key"}})
            return False
        return True

    def do_GET(self):
        if self.allowed():
            models = [{"id": m, "object": "model"} for m in self.server.models]
            if isinstance(self.server.models, dict):
                models = [m | {"root": self.server.models[m["id"]]} for m in models]
            self.reply(200, {"object": "list", "data": models})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append(body)
            server.under_way += 1
            server.most = max(server.most, server.under_way)
            failure = server.failures.pop(0) if server.failures else "none"
        try:
            self.answer(body, failure)
        finally:
            with server.lock:
                server.under_way -= 1

    def answer(self, body, failure):
        if not self.allowed():
            return
        if isinstance(failure, int):
            self.reply(failure, {"error": {"message": "not well\nand more of it"}})
            return
        if failure == "hang up":
            self.close_connection = True
            return
        found = self.server.completion(body)
        if failure == "short":
            found["choices"][0]["token_ids"].pop()
        self.reply(200, found, cut=failure == "cut")


@contextmanager
def serving(*args, **kwargs):
    """A server in a thread of this process."""
    server = Server(*args, **kwargs)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

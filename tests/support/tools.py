"""Tools and a template that calls them, and a server of a random model of bytes."""

from starlette.testclient import TestClient

from decoding.samplers.plain import PlainSampler
from decoding.serving.app import Server
from decoding.serving.scheduler import Scheduler
from tests.support import tiny
from tests.support.samplers import dflash
from tests.support.tokenizers import spelled_bytes

V = 257
HERMES = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}Call as <tool_call>\n"
    '{"name": f, "arguments": {}}\n</tool_call>{% endif %}'
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% set f = c.function %}"
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 20, 300]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "x", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]


def served(template):
    """A context manager: a client of a server of a model, with drafts and without."""
    model = tiny.causal_lm(V, eos_token_id=V - 1, scale=1.0).float()
    model.config.max_position_embeddings, tokenizer = 2048, spelled_bytes(template)
    plain, drafting = PlainSampler(model, tokenizer), dflash(model, 6)
    drafting.tokenizer = tokenizer
    samplers = {"m": drafting, "plain": plain}
    scheduler = Scheduler(samplers, at_once=8, waiting=8, longest=1200)
    server = Server(scheduler, tokenizer, key=None, most=100_000, seconds=60.0)
    return TestClient(server.app(), raise_server_exceptions=False)

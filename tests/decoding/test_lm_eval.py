"""The adapter of lm-eval: its numbers are those of direct forwards, and of lm-eval's own model."""

import csv
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from decoding import harness, lm_eval
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import request_seeds
from decoding.harness import ParadeLM
from decoding.lm_eval import LmEval, known_tasks
from decoding.samplers.asarm import AsarmSampler
from decoding.samplers.denoise import DenoiseSampler
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.plain import PlainSampler
from tests.support import subsets, tiny
from tests.support.files import write_jsonl

END, TURN = "<e>", "<t>"
PAIRS = [("abc", "de"), ("abc", "d"), ("abc", "e"), ("", "fgh"), ("q", "rstuv"), ("ab" * 9, "z")]
TEXTS = ["a", "hello", "longerthanthecontext" * 3]
PROMPTS = ["abc", "hello", "q", "ab" * 9, "zzz"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<t>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def small(kind=PlainSampler, context=64, template=None, **knobs):
    """A sampler of a random model that reads letters; two more tokens are special."""
    tokenizer = tiny.tokenizer(26)
    tokenizer.add_special_tokens({"eos_token": END, "extra_special_tokens": [TURN]})
    tokenizer.chat_template = template
    model = tiny.causal_lm(len(tokenizer))
    model.config.max_position_embeddings = context
    return kind(model, tokenizer, **knobs)


def filling():
    """A sampler of a random any-subset model that reads letters."""
    sampler = small()
    tokenizer = sampler.tokenizer
    tokenizer.add_special_tokens({"mask_token": "<m>"})
    model = subsets.network(len(tokenizer) - 1)
    return AsarmSampler(model, tokenizer, mask_id=tokenizer.mask_token_id)


def asked(kind, *arguments):
    return [Instance(kind, {}, x, n) for n, x in enumerate(arguments)]


def scores(lm, pairs=PAIRS):
    return lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)


def direct(sampler, context, continuation, shift=1):
    """log p of a continuation's tokens, and whether each is the best, by one plain forward."""
    ids = sampler.tokenizer((context or END) + continuation, add_special_tokens=False).input_ids
    with torch.no_grad():
        log_probs = sampler.target(torch.tensor([ids])).logits[0].log_softmax(-1)
    positions = range(len(ids) - len(continuation), len(ids))
    chosen = [
        (log_probs[n - shift, ids[n]], log_probs[n - shift].argmax() == ids[n]) for n in positions
    ]
    return sum(float(x) for x, _ in chosen), all(bool(best) for _, best in chosen)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_likelihoods_are_those_of_a_direct_forward(batch_size):
    sampler = small()
    found = scores(ParadeLM(sampler, batch_size=batch_size))
    for (log_prob, greedy), pair in zip(found, PAIRS):
        expected, best = direct(sampler, *pair)
        assert log_prob == pytest.approx(expected, abs=1e-11)
        assert greedy == best
        assert abs(log_prob - direct(sampler, *pair, shift=0)[0]) > 0.01  # the wrong position


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_any_subset_model_scores_a_hole_at_the_end(batch_size):
    """Token by token, given the context and the tokens of the hole before it."""
    sampler = filling()
    for (log_prob, greedy), (context, new) in zip(
        scores(ParadeLM(sampler, batch_size=batch_size)), PAIRS
    ):
        ids = sampler.tokenizer((context or END) + new, add_special_tokens=False).input_ids
        *prompt, expected, best = *enumerate(ids[: len(ids) - len(new)]), 0.0, True
        rest = [*enumerate(ids)][len(prompt) :]
        for i, (at, token) in enumerate(rest):
            logits = subsets.one_position(sampler.target, prompt, rest[:i], at)[: sampler.mask_id]
            expected += float(logits.log_softmax(-1)[token])
            best &= bool(logits.argmax() == token)
        assert log_prob == pytest.approx(expected, abs=1e-9)
        assert greedy == best
        causal = direct(sampler, context, new)[0]  # without the query stream it is another number
        assert abs(log_prob - causal) > 0.01
    with pytest.raises(ValueError, match="loglikelihood"):
        ParadeLM(sampler).generate_until(asked("generate_until", ("a", {})))


def test_float32_and_bfloat16_are_summed_in_float32():
    exact = scores(ParadeLM(small()))
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
        sampler = small()
        sampler.target.to(dtype)
        for (log_prob, _), (expected, _) in zip(scores(ParadeLM(sampler)), exact):
            assert log_prob == pytest.approx(expected, abs=tolerance)
            assert log_prob != torch.tensor(log_prob).bfloat16().item()


def test_the_greedy_answer_is_flagged_and_another_is_not():
    sampler = small()
    text = sampler.generate(["abc"], SamplingParams(max_new_tokens=5, temperature=0))[0].text
    other = text[:-1] + ("a" if text[-1] != "a" else "b")
    assert [greedy for _, greedy in scores(ParadeLM(sampler), [("abc", text), ("abc", other)])] == [
        True,
        False,
    ]


def test_a_long_context_loses_its_beginning():
    sampler = small(context=16)
    found = scores(ParadeLM(sampler), [("x" * 5 + "abcdefgh" * 2, "de"), ("bcdefgh" * 2, "")])
    assert found[0][0] == pytest.approx(direct(sampler, ("abcdefgh" * 2)[1:], "de")[0], abs=1e-11)
    assert found[1] == (0.0, True)
    with pytest.raises(ValueError, match="17"):
        scores(ParadeLM(sampler), [("a", "b" * 17)])


def test_the_numbers_are_those_of_lm_evals_own_model():
    sampler = small(context=32)
    ours = ParadeLM(sampler, batch_size=4)
    theirs = HFLM(sampler.target, tokenizer=sampler.tokenizer, max_length=32, batch_size=4)
    for mine, other in zip(scores(ours), scores(theirs)):
        assert mine == (pytest.approx(other[0], abs=1e-9), other[1])
    rolling = [asked("loglikelihood_rolling", *((t,) for t in TEXTS)) for _ in range(2)]
    assert ours.loglikelihood_rolling(rolling[0]) == pytest.approx(
        theirs.loglikelihood_rolling(rolling[1], disable_tqdm=True), abs=1e-9
    )
    given = {"until": ["gg"], "max_gen_toks": 8, "do_sample": False}
    requests = [asked("generate_until", *((p, {**given}) for p in PROMPTS)) for _ in range(2)]
    assert ours.generate_until(requests[0]) == theirs.generate_until(requests[1], disable_tqdm=True)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_answers_are_the_samplers_own(batch_size):
    sampler = small(JacobiSampler, block_size=4)
    lm = ParadeLM(sampler, batch_size=batch_size, seed=7)
    sampled = {"until": [], "do_sample": True, "temperature": 0.7, "top_k": 5, "max_gen_toks": 9}
    greedy = SamplingParams(max_new_tokens=12, temperature=0)
    letter = sampler.generate(PROMPTS[1:2], greedy)[0].text[5]
    stopping = {"until": [letter, "zz", ""], "max_gen_toks": 12}
    given = [stopping if n % 2 else sampled for n in range(len(PROMPTS))]
    found = lm.generate_until(asked("generate_until", *zip(PROMPTS, given)))
    seeds, tokens = request_seeds(7, len(PROMPTS)), 0
    for n, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=9, temperature=0.7, top_k=5)
        if n % 2:
            params = replace(greedy, stop=(letter, "zz"))
        [result] = sampler.generate([prompt], params, seeds=[seeds[n]])
        assert found[n] == result.text
        tokens += len(result.token_ids)
    assert sum(lm.emitted) == tokens
    assert lm.acceptance_length == tokens / len(lm.emitted) > 1
    assert len(found[1]) <= 5
    assert letter not in found[1]


def test_a_special_token_among_the_stop_strings_ends_an_answer():
    sampler = small()
    lm = ParadeLM(sampler)
    head = sampler.target.lm_head.weight.data
    [plain] = lm.generate_until(asked("generate_until", ("abc", {"max_gen_toks": 12})))
    head[sampler.tokenizer.convert_tokens_to_ids(TURN)] = 1.5 * head[ord(plain[6]) - ord("a")]
    for until, ended in (([TURN], True), ([], False)):
        before = len(lm.emitted)
        lm.generate_until(asked("generate_until", ("abc", {"max_gen_toks": 12, "until": until})))
        assert (sum(lm.emitted[before:]) < 12) == ended


def test_an_answer_has_the_room_that_the_context_leaves():
    sampler = small(context=32)
    sampler.target.lm_head.weight.data[sampler.tokenizer.eos_token_id] = 0
    lm = ParadeLM(sampler, max_gen_toks=256)
    lm.generate_until(asked("generate_until", ("abcde", {}), ("a" * 40, {})))
    assert sum(lm.emitted) == (32 - 5) + 16


def test_what_cannot_be_asked_is_one_line():
    with pytest.raises(ValueError, match="num_beams"):
        ParadeLM(small()).generate_until(asked("generate_until", ("a", {"num_beams": 4})))
    masked = object.__new__(DenoiseSampler)
    masked.__dict__.update(small().__dict__)
    with pytest.raises(ValueError, match="generate_until"):
        scores(ParadeLM(masked))


def test_lm_eval_finds_the_model_by_its_name(monkeypatch):
    given = {}
    monkeypatch.setattr(harness, "load", lambda *a, **k: given.update({"model": a, **k}) or small())
    lm = get_model("parade").create_from_arg_string("model=x,dtype=float32", {"batch_size": 2})
    assert isinstance(lm, ParadeLM)
    assert given == {"model": ("x",), "dtype": "float32"}


@pytest.fixture
def folder(tmp_path):
    """Two tasks on the same documents: choices, and answers that are generated."""
    documents = [{"q": "abc", "right": 1}, {"q": "xyz", "right": 0}, {"q": "hello", "right": 2}]
    write_jsonl(tmp_path / "documents.jsonl", documents)
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "documents.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "target_delimiter": "",
    }
    choices = {
        "task": "chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": ["d", "ef", "ghi"],
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    answers = {
        "task": "written",
        "output_type": "generate_until",
        "doc_to_target": "{{q}}",
        "generation_kwargs": {"until": ["c"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (choices, answers):
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
    return tmp_path


@pytest.fixture
def command(folder, monkeypatch):
    """Runs the command on the folder's tasks; gives the table, the answers and the results."""
    own = partial(TaskManager, include_defaults=False)  # to index lm-eval's own takes ten seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)

    def run(sampler, *words):
        monkeypatch.setattr(harness, "load", lambda *a, **k: sampler)
        out = folder / "out"
        lm_eval.run(["model=m", f"include_path={folder}", f"out={out}", *words])
        samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        with (out / "results.csv").open() as file:
            table = {(row["task"], row["metric"]): row["value"] for row in csv.DictReader(file)}
        return table, samples, json.loads((out / "results.json").read_text())

    return run


def test_local_tasks_run_in_one_command(command, capsys):
    sampler = small(JacobiSampler, block_size=4)
    table, samples, results = command(sampler, "tasks=[chosen,written]")
    chosen = [row for row in samples if row["task"] == "chosen"]
    right = 0
    for row in chosen:
        found = [direct(sampler, row["doc"]["q"], c)[0] for c in ("d", "ef", "ghi")]
        assert [r[0][0] for r in row["resps"]] == pytest.approx(found, abs=1e-11)
        right += found.index(max(found)) == row["doc"]["right"]
    assert float(table["chosen", "acc"]) == round(right / 3, 4)
    params = SamplingParams(max_new_tokens=6, temperature=0, stop=("c",))
    for row in samples:
        if row["task"] == "written":
            assert row["resps"] == [[sampler.generate([row["doc"]["q"]], params)[0].text]]
    assert results["config"]["method"] == "jacobi"
    assert results["config"]["acceptance_length"] > 1
    assert "tokens per target pass" in capsys.readouterr().out


def test_a_chat_and_other_options_of_generation(command):
    sampler = small(template=TEMPLATE)
    words = ["tasks=written", "chat=true", "system=be", "limit=2", "gen_kwargs=[max_gen_toks=3]"]
    _, samples, _ = command(sampler, *words)
    params = SamplingParams(max_new_tokens=3, temperature=0, stop=("c",))
    asked = [f"sbe{TURN}u{row['doc']['q']}{TURN}a" for row in samples]
    assert len(asked) == 2
    assert [row["resps"][0][0] for row in samples] == [
        r.text for r in sampler.generate(asked, params)
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tasks=chosn"], "'chosen'"),
        (["tasks=chosen", "include_path=no/such"], "include_path="),
        (["tasks=[]"], "tasks="),
        (["tasks=chosen", "limit=0"], "limit="),
        (["tasks=chosen", "system=a"], "chat=true"),
        (["tasks=written", "chat=true"], "chat template"),
        (["tasks=written", "gen_kwargs=[num_beams=2]"], "num_beams"),
    ],
)
def test_mistakes_write_nothing(command, folder, words, named):
    with pytest.raises(ValueError) as error:
        command(small(), *words)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert not (folder / "out").exists()


def test_a_task_without_its_split_is_one_line(command, folder):
    task = yaml.safe_load((folder / "chosen.yaml").read_text())
    wrong = task | {"task": "splitless", "test_split": "tset"}
    (folder / "splitless.yaml").write_text(yaml.safe_dump(wrong))
    with pytest.raises(ValueError, match=r"splitless.*tset"):
        command(small(), "tasks=splitless")


@pytest.mark.slow
def test_lm_evals_own_tasks_are_known():
    with pytest.raises(ValueError, match="'gsm8k'"):
        known_tasks(LmEval(model="m", tasks=("gsm8kk",)))


def test_without_lm_eval_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(lm_eval, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install lm_eval"):
        lm_eval.run(["model=m", "tasks=x"])

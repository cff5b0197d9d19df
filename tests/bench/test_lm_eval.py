"""The adapter to lm-eval: with a stand-in that has its signatures, and with lm-eval itself where it is."""

import json
import sys
from fnmatch import fnmatch
from types import ModuleType

import pytest
import torch

from twofour.bench.lm_eval import evaluate
from twofour.errors import InputError, TwoFourError
from twofour.nn import packed_layers

TASKS = ["arc_easy", "arc_challenge", "hellaswag"]


class HFLM:
    """Takes what the real one (0.4.13) takes of what is passed, and no other names."""

    def __init__(self, pretrained, tokenizer=None, batch_size=1, max_length=None, add_bos_token=None):
        assert not isinstance(pretrained, str)  # or it would load the directory by itself
        self.model, self.tokenizer = pretrained, tokenizer
        self.batch_size, self.max_length, self.add_bos_token = batch_size, max_length, add_bos_token


class TaskManager:
    def __init__(self, verbosity=None, include_path=None, include_defaults=True, metadata=None):
        self.include_path = include_path
        self.all_tasks = TASKS + (["own"] if include_path else [])

    def match_tasks(self, task_list):
        return sorted(name for name in self.all_tasks if any(fnmatch(name, p) for p in task_list))


@pytest.fixture
def calls(monkeypatch):
    """lm-eval as far as it is used; the calls to it."""
    calls = []

    def simple_evaluate(
        model, tasks=None, num_fewshot=None, limit=None, task_manager=None, log_samples=True, gen_kwargs=None
    ):
        calls.append({**locals()})
        results = {t if isinstance(t, str) else t["task"]: {"acc,none": 0.5} for t in tasks}
        samples = {"n-samples": {name: {"original": 9, "effective": limit or 9} for name in results}}
        return {"results": results, **samples, **({"samples": {}} if log_samples else {})}

    package, models, hf, tasks = (
        ModuleType(name)
        for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks")
    )
    package.simple_evaluate, package.__version__ = simple_evaluate, "0.4.13"
    hf.HFLM, tasks.TaskManager = HFLM, TaskManager
    for module in (package, models, hf, tasks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_hands_over_a_packed_model(calls, packed):
    found = evaluate(packed, ["hellaswag"], limit=3, batch_size=2, num_fewshot=1, max_length=32)
    (call,) = calls
    wrapped = call["model"]
    assert len(packed_layers(wrapped.model)) == 14
    assert not wrapped.model.training
    assert wrapped.tokenizer("a")["input_ids"]
    assert (wrapped.batch_size, wrapped.max_length) == (2, 32)
    assert (call["tasks"], call["num_fewshot"], call["limit"]) == (["hellaswag"], 1, 3)
    assert found["tasks"] == {"hellaswag": {"acc,none": 0.5}}
    assert found["examples"] == {"hellaswag": 3}
    assert "samples" not in found
    assert json.loads(json.dumps(found))["lm_eval"] == "0.4.13"


def test_hands_over_a_dense_model_with_options(calls, dense):
    found = evaluate(
        dense,
        "arc_*, hellaswag,arc_easy",
        dtype=torch.bfloat16,
        model_options={"add_bos_token": True},
        log_samples=True,
        gen_kwargs={"temperature": 0},
    )
    (call,) = calls
    assert call["tasks"] == ["arc_challenge", "arc_easy", "hellaswag"]
    assert call["gen_kwargs"] == {"temperature": 0}
    assert call["model"].add_bos_token is True
    assert call["model"].model.dtype == torch.bfloat16
    assert "samples" in found


def test_tasks_of_ones_own(calls, dense, tmp_path):
    evaluate(dense, ["own", {"task": "mine"}], task_directory=tmp_path)
    assert calls[0]["task_manager"].include_path == str(tmp_path)
    assert calls[0]["tasks"] == ["own", {"task": "mine"}]


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        ([], {}, "no task was named"),
        (" , ", {}, "no task was named"),
        (["hellaswagg"], {}, "lm-eval 0.4.13 has no task 'hellaswagg'"),
        (["boolq*"], {}, "no task 'boolq\\*'"),
        (["hellaswag"], {"limit": 0}, "limit must be above 0"),
    ],
)
def test_refuses_before_a_model_is_loaded(calls, tasks, options, message):
    with pytest.raises(InputError, match=message):
        evaluate("not loaded", tasks, **options)
    assert not calls


def test_says_which_model_is_not_there(calls, tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        evaluate(tmp_path / "nowhere", ["hellaswag"])


def test_data_that_cannot_be_had(calls, dense, monkeypatch):
    def offline(**_):
        raise ConnectionError("cannot reach the hub")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", offline)
    with pytest.raises(TwoFourError, match="could not read the data of its tasks: cannot reach the hub"):
        evaluate(dense, ["hellaswag"])


def test_without_lm_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r'lm-eval .*pip install "lm_eval\[hf\]"'):
        evaluate("nowhere", ["hellaswag"])


def test_with_a_part_of_lm_eval_missing(calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(InputError, match=r"cannot be used: lm_eval.models.huggingface is missing"):
        evaluate("nowhere", ["hellaswag"])


@pytest.mark.parametrize("which", ["dense", "packed"])
def test_with_the_real_one(which, request, tmp_path):
    """Multiple choice on data made here: its log-likelihoods are those that the model gives."""
    pytest.importorskip("lm_eval")
    from twofour.io.load import load_causal_lm

    directory = request.getfixturevalue(which)
    rows = [
        {"q": "one and one is", "choices": ["two", "ten"], "label": 0},
        {"q": "the sky is", "choices": ["a cow", "blue"], "label": 1},
        {"q": "a b c", "choices": ["z", "d"], "label": 1},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "made_here",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    found = evaluate(directory, [task], batch_size=2, device="cpu", log_samples=True, bootstrap_iters=0)
    model, tokenizer = load_causal_lm(directory, device="cpu")

    def likelihood(question, choice):
        start = len(tokenizer(question)["input_ids"])
        tokens = torch.tensor([tokenizer(f"{question} {choice}")["input_ids"]])
        with torch.no_grad():
            log_p = model(tokens).logits[0].log_softmax(-1)
        return float(log_p[start - 1 : -1].gather(1, tokens[0, start:, None]).sum())

    right = 0
    for row, sample in zip(rows, found["samples"]["made_here"], strict=True):
        expected = [likelihood(row["q"], choice) for choice in row["choices"]]
        assert [r[0] for r in sample["filtered_resps"]] == pytest.approx(expected, rel=1e-4)
        right += int(torch.tensor(expected).argmax()) == row["label"]
    assert found["tasks"]["made_here"]["acc,none"] == pytest.approx(right / 3)
    assert found["examples"] == {"made_here": 3}

"""`twofour eval`: what it asks for, and tasks through lm-eval where it is installed."""

import json
import math
import re
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return tmp_path / "text.txt"


def test_without_lm_eval_it_says_what_to_install(twofour, dense, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ran = twofour("eval", dense, "--tasks", "hellaswag,arc_easy", "--data", text)
    assert ran.status == 2
    assert ran.err == 'error: lm-eval is not installed. Install it with: pip install "lm_eval[hf]"\n'
    assert not ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate on. Give --data TEXT, --tasks NAMES, or both"),
        (["--tasks", "hellaswag", "--against", "x"], "--against, .* are about --data"),
        (["--tasks", "hellaswag", "--save"], "the report shows perplexities. Add --data"),
        (["--data", "TEXT", "--limit", "3"], "--limit and --task-dir are about --tasks"),
        (["--tasks", "hellaswag", "--limit", "0"], "--limit"),
        (["--data", "TEXT", "--context", "0"], "'--context'"),
        (["--data", "TEXT", "--stride", "0"], "'--stride'"),
        (["--data", "TEXT", "--max-tokens", "0"], "'--max-tokens'"),
    ],
)
def test_what_does_not_go_together(twofour, dense, arguments, message):
    ran = twofour("eval", dense, *arguments)
    assert ran.status == 2
    assert re.search(message, ran.err)


def test_the_document_of_a_text_is_as_before(twofour, dense, text):
    ran = twofour("eval", dense, "--data", text, "--json")
    assert ran.status == 0, ran.err
    assert (
        ran.json.items() >= {"verb": "eval", "model": str(dense), "against": None, "data": str(text)}.items()
    )
    assert ran.json["perplexity"] > 1
    assert "tasks" not in ran.json


@pytest.fixture
def broken(dense, tmp_path):
    """A model with a weight that is NaN."""
    weights = load_file(dense / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    directory = shutil.copytree(dense, tmp_path / "br[oken")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_model_that_gives_nan(twofour, dense, broken, text):
    ran = twofour("eval", broken, "--data", text, "--json", "--save")
    assert ran.status == 1
    assert json.loads(ran.out, parse_constant=pytest.fail)["perplexity"] is None
    assert ran.err.endswith(f"See: twofour check '{broken}'\n")
    assert not (broken / "reports").exists()
    ran = twofour("eval", broken, "--data", text)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {broken} gives NaN on this text")
    ran = twofour("eval", dense, "--data", text, "--against", broken)
    assert ran.status == 1
    assert f"{dense}: perplexity " in ran.out
    assert "Against" not in ran.out
    assert ran.err.startswith(f"error: {broken} gives NaN")


def test_against_a_model_with_other_words(twofour, dense, text, tmp_path):
    other = shutil.copytree(dense, tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    own = words["model"]["vocab"]
    own["a"], own["b"] = own["b"], own["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    ran = twofour("eval", dense, "--data", text, "--against", other)
    assert ran.status == 2
    assert f"{dense} and {other} have different tokenizers" in ran.err


@pytest.fixture
def own_tasks(tmp_path):
    """A directory with a task of one's own: multiple choice on two questions."""
    rows = [
        {"q": "one and one is", "choices": ["two", "ten"], "label": 0},
        {"q": "the sky is", "choices": ["a cow", "blue"], "label": 1},
        {"q": "a b c", "choices": ["z", "d"], "label": 1},
    ]
    directory = tmp_path / "tasks"
    directory.mkdir()
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "made_here.yaml").write_text(
        f"""task: made_here
dataset_path: json
dataset_kwargs: {{data_files: {{test: {directory / "data.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
    )
    return directory


def test_tasks_of_ones_own_and_a_text(twofour, packed, text, own_tasks):
    pytest.importorskip("lm_eval")
    arguments = ["eval", packed, "--tasks", "made_here", "--task-dir", own_tasks, "--limit", 2]
    ran = twofour(*arguments, "--data", text, "--json", "--save")
    assert ran.status == 0, ran.err
    assert ran.json["tasks"]["made_here"]["acc,none"] in (0.0, 0.5, 1.0)
    assert ran.json["harness"]["examples"] == {"made_here": 2}
    assert ran.json["harness"]["limit"] == 2
    assert ran.json["perplexity"] > 1
    assert json.loads((packed / "reports" / "eval-1.json").read_text()) == ran.json
    shown = twofour(*arguments)
    assert shown.status == 0, shown.err
    assert "made_here" in shown.out
    assert "not a figure to report" in shown.out


def test_a_task_that_does_not_exist(twofour, dense, own_tasks):
    pytest.importorskip("lm_eval")
    ran = twofour("eval", dense, "--tasks", "no_such_task_at_all", "--task-dir", own_tasks)
    assert ran.status == 2
    assert "no task 'no_such_task_at_all'" in ran.err

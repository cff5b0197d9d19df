"""Perplexity against a loop that scores one token at a time."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twofour.bench.perplexity import cut, evaluate
from twofour.calibrate.text import read_documents
from twofour.errors import InputError

DOCUMENTS = ["short.", "a longer document, " * 9, "x"]


@pytest.fixture(scope="module")
def model(_dense):
    return AutoModelForCausalLM.from_pretrained(_dense).eval()


@pytest.fixture(scope="module")
def tokenizer(_dense):
    return AutoTokenizer.from_pretrained(_dense)


def by_hand(model, tokenizer, context, stride):
    """Each token from the tokens that its window, by the documented protocol, shows before it."""
    losses = []
    for document in DOCUMENTS:
        tokens = [1, *tokenizer(document, add_special_tokens=False)["input_ids"]]
        start, end = 0, min(context, len(tokens))
        for position in range(1, len(tokens)):
            if position >= end:
                start = min(start + stride, end - 1)
                end = min(start + context, len(tokens))
            with torch.no_grad():
                logits = model(torch.tensor([tokens[start:position]])).logits[0, -1].double()
            losses.append(-float(logits.log_softmax(-1)[tokens[position]]))
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize(("context", "stride"), [(64, 32), (16, 8), (16, 15), (16, 3), (2, 1)])
def test_agrees_with_one_token_at_a_time(model, tokenizer, context, stride):
    perplexity, tokens = by_hand(model, tokenizer, context, stride)
    result = evaluate(model, tokenizer, DOCUMENTS, context=context, stride=stride)
    assert result.tokens == tokens
    assert result.perplexity == pytest.approx(perplexity, rel=1e-4)


@pytest.mark.parametrize(("context", "stride"), [(64, 32), (7, 3), (5, 4), (2, 1)])
def test_every_token_but_the_first_is_scored_once(tokenizer, context, stride):
    text = "the quick brown fox " * 5
    scored = [w.tokens[w.scored_from :] for w in cut(tokenizer, [text], context, stride)]
    assert [t for part in scored for t in part] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_batches_do_not_change_the_result(model, tokenizer, monkeypatch):
    together = evaluate(model, tokenizer, DOCUMENTS)
    monkeypatch.setattr("twofour.bench.perplexity.BATCH_TOKENS", 1)
    assert evaluate(model, tokenizer, DOCUMENTS).perplexity == pytest.approx(together.perplexity, rel=1e-5)


def test_against_itself_and_another(model, tokenizer, _packed):
    itself = evaluate(model, tokenizer, DOCUMENTS, against=model)
    assert itself.agreement == 1.0
    assert itself.kl == pytest.approx(0, abs=1e-6)
    pruned = AutoModelForCausalLM.from_pretrained(_packed / "pruned")
    other = evaluate(pruned, tokenizer, DOCUMENTS, against=model)
    assert other.agreement < 1
    assert other.kl > 1e-4
    assert other.against_perplexity == pytest.approx(itself.perplexity, rel=1e-6)
    assert evaluate(model, tokenizer, DOCUMENTS).against_perplexity is None


def test_max_tokens(model, tokenizer):
    assert evaluate(model, tokenizer, DOCUMENTS, max_tokens=20).tokens == 20


def test_what_scores_nothing_is_refused(model, tokenizer):
    with pytest.raises(InputError, match="0 < stride < context"):
        evaluate(model, tokenizer, DOCUMENTS, context=4, stride=4)
    for nothing in ({"context": 0}, {"stride": 0}, {"max_tokens": 0}):
        with pytest.raises(InputError, match="scores nothing|nothing to score"):
            evaluate(model, tokenizer, DOCUMENTS, **nothing)


def test_windows_longer_than_the_model_takes(model, tokenizer):
    """GPT-2 has no embedding for a position beyond its last one."""
    shorter = AutoModelForCausalLM.from_config(model.config.__class__(**model.config.to_dict()))
    shorter.config.max_position_embeddings = 32
    with pytest.raises(InputError, match=r"64 tokens, and the model takes 32 .* at most 32"):
        evaluate(shorter, tokenizer, DOCUMENTS, context=64)
    with pytest.raises(InputError, match="64 tokens, and the model to compare with takes 32"):
        evaluate(model, tokenizer, DOCUMENTS, against=shorter)
    assert evaluate(shorter, tokenizer, DOCUMENTS).context == 32


def test_nan_is_no_perplexity_and_no_agreement(model, tokenizer, _dense):
    broken = AutoModelForCausalLM.from_pretrained(_dense)
    broken.model.norm.weight.data[0] = math.nan
    result = evaluate(model, tokenizer, DOCUMENTS, against=broken)
    assert math.isfinite(result.perplexity)
    assert all(math.isnan(f) for f in (result.against_perplexity, result.agreement, result.kl))
    assert math.isnan(evaluate(broken, tokenizer, DOCUMENTS).perplexity)


def test_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n"two"\n{"text": " "}\n')
    assert read_documents(tmp_path / "a.jsonl") == ["one", "two"]
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    assert read_documents(tmp_path / "a.txt") == ["one\n\ntwo"]
    # Raw, as `ensure_ascii=False` writes them: line separators, but not of .jsonl.
    text = "a\u2028b\u2029c\x85d"
    (tmp_path / "b.jsonl").write_bytes(f'{{"text": "{text}"}}\r\n"two"\n'.encode())
    assert read_documents(tmp_path / "b.jsonl") == [text, "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", r"a\.jsonl holds no text\. Give "),
        (b"caf\xe9", r"is not UTF-8 text .* Convert it"),
        (b'"one"\n{', r"line 2: not JSON .* A line of \.jsonl is"),
        (b'{"words": "one"}', r"line 1: there is no text\. A line of \.jsonl is"),
    ],
)
def test_what_is_no_text(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_documents(tmp_path / "a.jsonl")

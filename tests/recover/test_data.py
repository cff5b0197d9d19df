"""Windows: every token once an epoch, an order of (seed, step) alone, text that a teacher writes once."""

import json
from collections import Counter

import pytest
import torch

from twofour.errors import InputError
from twofour.io.load import load_causal_lm
from twofour.recover import data as module
from twofour.recover.data import SELF, Windows, read_data, write_in_units


def epoch(windows, seed=0, count=3, number=0):
    steps = len(windows) // count
    return torch.cat([windows.batch(seed, number * steps + step, count) for step in range(steps)])


def test_an_epoch_of_a_ring_has_every_token_once():
    windows = Windows([(torch.arange(60), True)], 10)
    assert len(windows) == 6
    for number in range(4):
        seen = epoch(windows, number=number)
        assert sorted(seen.flatten().tolist()) == list(range(60))
        step = (seen[:, 1:] - seen[:, :-1]) % 60
        assert bool((step == 1).all())  # neighbours in the text, round the end too
    assert not torch.equal(epoch(windows, number=0), epoch(windows, number=1))
    starts = {int(w[0]) % 10 for number in range(20) for w in epoch(windows, number=number)}
    assert len(starts) > 5  # cut at other places each time


def test_windows_that_were_given_stay_whole():
    given = torch.arange(40).reshape(8, 5) + 1
    windows = Windows.of(given)
    assert sorted(epoch(windows, count=4).tolist()) == given.tolist()


def test_the_order_depends_on_seed_and_step_alone():
    streams = [(torch.arange(64), True), (torch.arange(100, 140), False)]
    windows = Windows(streams, 8)
    assert len(windows) == 13
    later = windows.batch(1, 7, 4)
    windows.batch(1, 3, 4)
    assert torch.equal(windows.batch(1, 7, 4), later)
    assert torch.equal(Windows(streams, 8).batch(1, 7, 4), later)
    assert not torch.equal(Windows(streams, 8).batch(2, 7, 4), later)
    # A step may reach over several epochs.
    many = Counter(Windows(streams, 8).batch(1, 0, 39).flatten().tolist())
    assert all(many[token] == 3 for token in range(100, 140))


@pytest.fixture
def tokenizer(dense):
    return load_causal_lm(dense, "cpu", torch.float32)[1]


def test_text_is_split_into_training_and_held_out(tokenizer, tmp_path):
    lines = [{"text": "abcdefghij" * 10} for _ in range(10)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    windows, held_out = read_data([tmp_path / "text.jsonl"], tokenizer, length=16, tokens=1000, seed=0)
    assert held_out.shape == (7, 16)  # a tenth of 1,010 tokens
    assert len(windows) == (1010 - 112) // 16


def test_text_to_evaluate_on_leaves_the_data_whole(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghij" * 20)
    (tmp_path / "eval.txt").write_text("z" * 100)
    windows, held_out = read_data(
        [tmp_path / "text.txt"], tokenizer, length=16, tokens=1, seed=0, eval_data=tmp_path / "eval.txt"
    )
    assert len(windows) == 201 // 16
    assert held_out.shape == (6, 16)
    assert held_out[0, 0] == tokenizer.bos_token_id
    assert len(set(held_out.flatten().tolist())) == 2


@pytest.mark.parametrize("text", ["", " \n", "short"])
def test_too_little_text_is_refused(tokenizer, tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    with pytest.raises(InputError, match="holds no text|less than two windows"):
        read_data([tmp_path / "text.txt"], tokenizer, length=16, tokens=1000, seed=0)


def test_without_a_teacher_nobody_can_write(tokenizer):
    with pytest.raises(InputError, match="--teacher"):
        read_data([SELF], tokenizer, length=16, tokens=1000, seed=0)


def test_what_the_teacher_wrote_is_read_again(dense, tmp_path, monkeypatch):
    monkeypatch.setitem(module.WRITTEN_AT_ONCE, "cpu", 8)
    teacher, tokenizer = load_causal_lm(dense, "cpu", torch.float32)
    first = write_in_units(teacher, tokenizer, 20, 12, 5, tmp_path)
    assert first.shape == (20, 12)
    assert len(set(map(tuple, first.tolist()))) == 20  # units are different
    assert len(list(tmp_path.glob("written-*"))) == 3
    (tmp_path / "written-00001.safetensors").write_bytes(b"cut off")  # a killed run never leaves this

    def count(*arguments, **named):
        written.append(arguments[4])
        return real(*arguments, **named)

    written, real = [], module.write_windows
    monkeypatch.setattr(module, "write_windows", count)
    assert torch.equal(write_in_units(teacher, tokenizer, 20, 12, 5, tmp_path), first)
    assert len(written) == 1  # only the damaged one
    more = write_in_units(teacher, tokenizer, 28, 12, 5, tmp_path)
    assert torch.equal(more[:20], first)
    other = write_in_units(teacher, tokenizer, 20, 12, 6, tmp_path)
    assert not torch.equal(other, first)


def test_windows_must_have_two_tokens():
    with pytest.raises(InputError, match=r"not \[3, 1\]"):
        Windows.of(torch.ones(3, 1, dtype=torch.long))

"""Text that the model writes itself."""

from types import SimpleNamespace

import torch

from twofour.calibrate.written import write_windows


def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 20}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5)
    return LlamaForCausalLM(config).eval()


def test_windows_are_the_models_own_and_the_same_for_the_same_seed():
    model, tokenizer = tiny(), SimpleNamespace(bos_token_id=1, eos_token_id=2)
    steps = []
    windows = write_windows(
        model, tokenizer, 19, 30, 3, lambda done, total, what: steps.append((done, total))
    )
    assert windows.shape == (19, 30)
    assert bool((windows[:, 0] == 1).all())
    assert steps == [(16, 19), (19, 19)]
    assert torch.equal(windows, write_windows(model, tokenizer, 19, 30, 3))
    assert not torch.equal(windows, write_windows(model, tokenizer, 19, 30, 4))
    after_end = windows[:, 1:][windows[:, :-1] == 2]
    assert len(after_end) > 0
    assert bool((after_end == 1).all())  # a new document begins


def test_what_is_likely_is_written_more_often():
    model, tokenizer = tiny(), SimpleNamespace(bos_token_id=1, eos_token_id=None)
    with torch.no_grad():
        likely = model(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    second = write_windows(model, tokenizer, 2000, 2)[:, 1]
    counted = torch.bincount(second, minlength=20) / 2000
    assert float((counted - likely).abs().max()) < 0.04


def test_without_special_tokens_the_first_is_random():
    windows = write_windows(tiny(), SimpleNamespace(bos_token_id=None, eos_token_id=None), 40, 3)
    assert len(windows[:, 0].unique()) > 5

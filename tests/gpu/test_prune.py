"""One-shot pruning on a GPU: what is done differently there gives what the plain way gives."""

import pytest
import torch

from twofour.calibrate import blocks
from twofour.calibrate.statistics import Gram
from twofour.pattern import check_pattern
from twofour.prune import sparsegpt
from twofour.prune.hessian import relative_output_error
from twofour.prune.model import prune_
from twofour.prune.sparsegpt import SparseGPT

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def inputs(tokens, columns, dtype, seed=0):
    random = torch.Generator(CUDA).manual_seed(seed)
    mix = torch.randn(columns // 4, columns, generator=random, device=CUDA)
    x = torch.randn(tokens, columns // 4, generator=random, device=CUDA) @ mix
    return (x + torch.randn(tokens, columns, generator=random, device=CUDA)).to(dtype)


def gram_of(x, parts=1):
    gram = Gram(x.shape[1], CUDA)
    for part in x.tensor_split(parts):
        gram.add(part)
    return gram


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [64, 172, 4100])
def test_gram_is_as_good_as_float32(dtype, columns):
    x = inputs(3000, columns, dtype)
    exact = x.double().t() @ x.double() / len(x)
    gram = gram_of(x, parts=4)
    assert gram.tokens == 3000
    error = (gram.mean.double() - exact).norm() / exact.norm()
    assert error < 2e-5  # sums in 16 bits, or inputs rounded to 8, would be off by 1e-3


def test_gram_of_half_precision_does_not_overflow():
    x = torch.full((64, 32), 3e4, dtype=torch.float16, device=CUDA)
    torch.testing.assert_close(gram_of(x).mean, torch.full((32, 32), 9e8, device=CUDA))


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(100, 384), (33, 172), (7, 1030), (1, 4)])
def test_the_kernel_agrees_with_the_plain_sweep(rows, columns, pairs, monkeypatch):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(CUDA)
    gram = gram_of(inputs(4 * columns + 64, max(columns, 8), torch.float32)[:, :columns])
    assert sparsegpt._sweep_on(CUDA) is not sparsegpt.sweep_panel
    ours = SparseGPT(pairs=pairs).prune(weight, inputs=gram)
    again = SparseGPT(pairs=pairs).prune(weight, inputs=gram)
    assert torch.equal(ours, again)
    monkeypatch.setattr(sparsegpt, "_sweep_on", lambda device: sparsegpt.sweep_panel)
    plain = SparseGPT(pairs=pairs).prune(weight, inputs=gram)
    assert check_pattern(ours).legal
    # A cost that two pairs share up to rounding may go either way, and the row is another one from there on.
    same = ((ours != 0) == (plain != 0)).all(1)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(ours[same], plain[same], rtol=1e-3, atol=1e-4)
    errors = [relative_output_error(weight, new, gram) for new in (ours, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_gpu_and_cpu_agree():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    gram = gram_of(inputs(2000, 256, torch.bfloat16))
    on_cpu = Gram(256)
    on_cpu.mean = gram.mean.cpu()
    errors = [
        relative_output_error(weight, SparseGPT().prune(weight.to(device), inputs=known).cpu(), on_cpu)
        for device, known in ((CUDA, gram), ("cpu", on_cpu))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=2e-3)


@pytest.mark.parametrize("method", ["sparsegpt", "best"])
def test_where_the_states_are_kept_changes_no_bits(method, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    windows = torch.randint(3, 128, (16, 32), generator=torch.Generator().manual_seed(0))
    weights = []
    for share in (0.25, 0.25, 0.0):
        monkeypatch.setattr(blocks, "RESIDENT_SHARE", share)
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).bfloat16().to(CUDA)
        prune_(model, method, windows=windows)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for other in weights[1:]:
        assert all(map(torch.equal, weights[0], other))

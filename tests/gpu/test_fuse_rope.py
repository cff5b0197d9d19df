"""The rotary kernel on a GPU: bit for bit what models compute, in any layout. Run by `make test-gpu`."""

import pytest
import torch

import twofour
from tests.kernels.test_rope import drawn, plain
from twofour import ops
from twofour.kernels import rope
from twofour.nn.fuse_rope import fuse_rope_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


def on_gpu(tensors):
    """Moved with their gaps: q and k stay parts of one product."""
    q, k, cos, sin = tensors
    base = q._base if q._base is not None else q
    moved = base.to(CUDA)
    again = [torch.as_strided(moved, t.shape, t.stride(), t.storage_offset()) for t in (q, k)]
    return *again, cos.to(CUDA), sin.to(CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((1, 1, 32, 8, 128, 128), None),  # decode
        ((64, 1, 32, 8, 128, 128), None),
        ((64, 1, 32, 8, 128, 128), 1),
        ((4, 2048, 32, 8, 128, 128), 1),  # prefill
        ((3, 77, 12, 12, 64, 16), None),  # a part of a head
        ((2, 33, 9, 3, 80, 80), None),
        ((2, 17, 3, 1, 10, 6), None),  # number by number
    ],
)
def test_the_bits_of_the_reference(shape, rows, dtype, wide):
    q, k, cos, sin = on_gpu(drawn(*shape, dtype, wide=wide, rows=rows))
    assert rope.why_not(q, k, cos, sin) is None
    for steps in (False, True):
        wanted = rope.reference(q, k, cos, sin, 1, steps)
        for heads_dim in (1, 2):
            given = (q, k) if heads_dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))
            for _ in range(3):  # a race shows as a moving result
                got = rope.launch(*given, cos, sin, heads_dim, steps)
                for new, other, old in zip(got, wanted, given, strict=True):
                    same = other if heads_dim == 1 else other.transpose(1, 2)
                    assert torch.equal(new, same)
                    assert new.stride() == torch.empty_like(old).stride()
    if not wide:
        assert all(map(torch.equal, rope.launch(q, k, cos, sin, 1, True), plain(q, k, cos, sin, 1)))


def test_special_values():
    q, k, cos, sin = on_gpu(drawn(1, 6, 4, 2, 64, 64, torch.float16))
    q[0, :, 0], q[0, :, 1, 3], q[0, :, 2, 5] = -0.0, torch.inf, torch.nan
    q[0, :, 3] *= 1e-6  # below the smallest normal number
    q[0, :, 4] = 60000.0  # products beyond the largest
    for steps in (False, True):
        for got, wanted in zip(
            rope.launch(q, k, cos, sin, 1, steps), rope.reference(q, k, cos, sin, 1, steps), strict=True
        ):
            assert torch.equal(got.isnan(), wanted.isnan())
            assert torch.equal(got.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))


def test_the_operator_on_what_the_kernel_does_not_take():
    q, k, cos, sin = on_gpu(drawn(2, 5, 4, 2, 16, 16, torch.float32))
    assert "float16" in rope.why_not(q, k, cos, sin)
    assert all(map(torch.equal, ops.rope(q, k, cos, sin, 1, True), plain(q, k, cos, sin, 1)))
    q, k, cos, sin = on_gpu(drawn(2, 0, 4, 2, 16, 16, torch.bfloat16))
    assert rope.launch(q, k, cos, sin, 1, True)[0].shape == (2, 4, 0, 16)
    torch.library.opcheck(ops.rope, (*on_gpu(drawn(2, 3, 4, 2, 16, 16, torch.bfloat16)), 1, True))


def llama(dtype=torch.bfloat16):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.05}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).to(CUDA, dtype).eval()


def kernels_of(model, ids):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        model(ids, use_cache=False)
        torch.cuda.synchronize()
    return [event.name for event in seen.events()]


@torch.no_grad()
def test_a_model_gives_the_same_bits_with_fewer_kernels():
    model, ids = llama(), torch.randint(1000, (3, 40), device=CUDA)
    wanted, before = model(ids).logits, kernels_of(model, ids)
    assert fuse_rope_(model) == (2, {})
    assert torch.equal(model(ids).logits, wanted)
    after = kernels_of(model, ids)
    assert after.count("rope") == 2
    assert len(after) <= len(before) - 2 * 8
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(ids, use_cache=False).logits
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 40])
def test_packed_and_fused_products_feed_it(tokens):
    """q and k are then parts of one product, and its kernel may still run when ours starts."""
    model, ids = llama(), torch.randint(1000, (2, tokens), device=CUDA)
    twofour.pack_(twofour.prune_(model))
    wanted = model(ids).logits.double()
    result = twofour.fuse_(model)
    assert (result, result.norms, result.rotary, result.left) == (6, 5, 2, {})
    first = model(ids).logits
    assert float((first.double() - wanted).norm() / wanted.norm()) < 0.02
    for _ in range(20):
        assert torch.equal(model(ids).logits, first)
    compiled = torch.compile(model, fullgraph=True)
    assert float((compiled(ids).logits.double() - wanted).norm() / wanted.norm()) < 0.02


@torch.no_grad()
def test_generation_is_the_same():
    model, ids = llama(), torch.randint(1000, (2, 9), device=CUDA)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    fuse_rope_(model)
    assert torch.equal(model.generate(ids, **options), wanted)


@torch.no_grad()
def test_float32_keeps_the_models_own_function():
    model, ids = llama(torch.float32), torch.randint(1000, (2, 9), device=CUDA)
    wanted = model(ids).logits
    fuse_rope_(model)
    assert torch.equal(model(ids).logits, wanted)
    assert "rope" not in kernels_of(model, ids)

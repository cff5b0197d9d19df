"""Ways to compute a product with a 2:4 weight of 8 or 4 bits. Each gets packed codes (random_codes.py), dense
ones those that there were before pruning.

    dense        the dequantized weight in x's dtype
    dense fp8    every token rounded by our kernel, then torch._scaled_mm with a scale for each row and token.
                 Also what int8 is compared with; the codes are rounded to fp8 for that, so its error is
                 larger there
    dense int4   torch.ops.aten._weight_int4pack_mm, at up to 512 tokens
    twofour      ours, in the way that was measured fastest for the number of tokens
    ampere       ours by the kernels for any GPU, at up to 256 tokens (kernels/dispatch_codes.py)
    hopper       ours by those for Hopper alone
    twofour fp8  beside int8: the same layer in fp8
    cusparselt   tokens rounded by our kernel, then cuSPARSELt by the algorithm that it finds itself. Nothing
                 multiplies by the scales, so its time errs in its favour and its error is not known

Where tokens are rounded, that is in the time, for every contender.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.bench.contenders import Contender, Product, dense_bytes
from twofour.bench.random_codes import Halves
from twofour.packed import Packed24, packed_shapes, unpack
from twofour.quantize.schemes import SCHEMES, Codes, Scheme
from twofour.select import Layer

#: The contender that is dense in the precision of the codes.
SAME_PRECISION: dict[Codes, str] = {"int8": "dense fp8", "fp8": "dense fp8", "int4": "dense int4"}

_FP8 = torch.float8_e4m3fn

#: Tiles of 16 columns that PyTorch's int4 form keeps together; the most that it takes, and the fastest.
_INNER_TILES = 8


def quantized_contenders(scheme: Scheme, device: torch.device) -> dict[str, Contender]:
    """All of a scheme; on a CPU those that run there."""
    ours = quantized_bytes(scheme)
    work = 0.25 if scheme.rounds_activations else 0.5
    found = {
        "dense": Contender(_dense, dense_bytes, work=1.0, unpruned=True),
        "twofour": Contender(partial(_twofour, scheme=scheme), ours, work),
    }
    if device.type != "cuda":
        return found
    if scheme.codes == "int4":
        of_four = partial(_dense_int4, scheme=scheme)
        found["dense int4"] = Contender(of_four, _int4_bytes(scheme), 1.0, 512, unpruned=True)
    else:
        found["dense fp8"] = Contender(_dense_fp8, _fp8_bytes, 0.5, unpruned=True)
        found["cusparselt"] = Contender(_cusparselt, ours, 0.25, scaled=False)
    found["ampere"] = Contender(_forced(scheme, "ampere"), ours, 0.5, 256)
    found["hopper"] = Contender(_forced(scheme, "hopper"), ours, work)
    if scheme.name == "int8":
        found["twofour fp8"] = Contender(_twofour_fp8, ours, work)
    return found


def quantized_bytes(scheme: Scheme) -> Callable[[int, int, torch.dtype], float]:
    """What a packed weight of this scheme takes: codes, positions and scales."""

    def weight_bytes(rows: int, columns: int, dtype: torch.dtype) -> float:
        (_, stored), (_, meta) = packed_shapes(rows, columns, scheme.stored)
        return rows * (stored + meta + scheme.scale_width(columns) * dtype.itemsize)

    return weight_bytes


def _fp8_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    return rows * columns


def _int4_bytes(scheme: Scheme) -> Callable[[int, int, torch.dtype], float]:
    """Dense codes, and for each scale a zero point beside it."""
    return lambda rows, columns, dtype: (
        rows * (columns / 2 + 2 * scheme.scale_width(columns) * dtype.itemsize)
    )


def _dense(weights: list[Halves], bias: Tensor | None) -> list[Product]:
    return [partial(F.linear, weight=weight.unpack(), bias=bias) for weight in weights]


def _dense_fp8(weights: list[Halves], bias: Tensor | None) -> list[Product]:
    from twofour.kernels import token_codes

    def multiply(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        codes, of_tokens = token_codes.round_tokens(x, _FP8)
        scales = (of_tokens[: len(x), None], scale)
        return torch._scaled_mm(codes, weight, *scales, bias=bias, out_dtype=x.dtype, use_fast_accum=True)

    made: list[Product] = []
    for weight in weights:
        codes, scale = weight.codes().float().to(_FP8), weight.kept.scale
        assert scale is not None
        made.append(partial(multiply, weight=codes.t(), scale=scale.float().t()))
    return made


def _dense_int4(weights: list[Halves], bias: Tensor | None, scheme: Scheme) -> list[Product]:
    aten = torch.ops.aten

    def multiply(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
        y: Tensor = aten._weight_int4pack_mm(x, tiles, scheme.group, scales)
        return y if bias is None else y + bias

    made: list[Product] = []
    for weight in weights:
        codes = (weight.codes() + 8).view(torch.uint8)  # the operator takes 8 from each again
        tiles = aten._convert_weight_to_int4pack(codes[:, 0::2] << 4 | codes[:, 1::2], _INNER_TILES)
        scale = weight.kept.scale
        assert scale is not None
        with_zeros = torch.stack([scale, torch.zeros_like(scale)], dim=-1)
        made.append(partial(multiply, tiles=tiles, scales=with_zeros.transpose(0, 1).contiguous()))
    return made


def _twofour(weights: list[Packed24], bias: Tensor | None, scheme: Scheme) -> list[Product]:
    return [_layer(packed, bias, scheme) for packed in weights]


def _layer(packed: Packed24, bias: Tensor | None, scheme: Scheme) -> nn.Module:
    from twofour.nn.quantized import put_quantized_

    rows, columns = packed.shape
    linear = nn.Linear(columns, rows, bias is not None, device="meta")
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    model = nn.Sequential(linear).eval()
    put_quantized_(model, {Layer("0", "linear", (rows, columns)): packed}, scheme)
    return model[0]


def _forced(scheme: Scheme, backend: str) -> Callable[[list[Packed24], Tensor | None], list[Product]]:
    from twofour.kernels import dispatch

    def forced(layer: Product, x: Tensor) -> Tensor:
        with dispatch.force(backend):
            return layer(x)

    def layers(weights: list[Packed24], bias: Tensor | None) -> list[Product]:
        with dispatch.force(backend):  # so that they lie in the order of its kernels
            return [partial(forced, layer) for layer in _twofour(weights, bias, scheme)]

    return layers


def _twofour_fp8(weights: list[Packed24], bias: Tensor | None) -> list[Product]:
    converted = [Packed24(p.values.float().to(_FP8), p.meta, p.columns, p.scale) for p in weights]
    return _twofour(converted, bias, SCHEMES["fp8"])


def _cusparselt(weights: list[Packed24], bias: Tensor | None) -> list[Product]:
    from twofour.kernels import token_codes

    stored = weights[0].values.dtype
    algorithms: dict[int, int] = {}  # by the number of tokens, found in the first call, which is not timed

    def multiply(x: Tensor, compressed: Tensor) -> Tensor:
        codes = token_codes.round_tokens(x, stored)[0].t()
        if len(x) not in algorithms:
            found = torch._cslt_sparse_mm_search(compressed, codes, out_dtype=x.dtype, transpose_result=True)
            algorithms[len(x)] = found
        alg_id = algorithms[len(x)]
        return torch._cslt_sparse_mm(
            compressed, codes, out_dtype=x.dtype, transpose_result=True, alg_id=alg_id
        )

    codes = (unpack(packed.values, packed.meta, packed.columns) for packed in weights)
    return [partial(multiply, compressed=torch._cslt_compress(c)) for c in codes]

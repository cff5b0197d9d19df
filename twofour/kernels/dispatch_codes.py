"""Which kernel runs a product with quantized weights on a GPU. dispatch.py is its model, and for 16 bits.

    codes     schemes that round activations, on Hopper: every token becomes codes of 8 bits in one kernel
              (token_codes.py), then codes are multiplied with codes (hopper.Decode8, hopper.Prefill8)
    decode4   few tokens times weights of 4 bits, on Hopper: codes times scales become 16-bit numbers in the
              registers that the tensor cores read (hopper.Decode4). They must lie in threads' order
              (streamed.py)
    decode    few tokens otherwise: the weight's codes become 16-bit numbers on the way to the tensor cores
              (quantized_decode.py). Activations stay in 16 bits, also where the scheme would round them:
              without a product of codes that would save nothing
    widen     many tokens otherwise: the weight's codes become 16-bit values, for the kernels of dispatch.py
    reference what none of them can run

Tables of what was measured come first, then a rule of thumb. `TWOFOUR_BACKEND` and `force` name the backends
of 16 bits: ampere means decode, hopper codes, decode4 or, where neither can run it, widen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from twofour.errors import InputError
from twofour.kernels import (
    dispatch,
    hopper,
    hopper_choices,
    hopper_launch,
    quantized_decode,
    reference,
    token_codes,
    tuning,
    widen,
)
from twofour.kernels.dispatch import Choice
from twofour.ops import library
from twofour.packed import FOUR_BIT, scale_group
from twofour.quantize.schemes import Codes
from twofour.streamed import GROUP, ROWS, is_streamed, unstream

WAYS = ("codes", "decode4", "decode", "widen", "reference")

_FORCED = {"ampere": ("decode",), "hopper": ("codes", "decode4", "widen"), "reference": ("reference",)}
_CODES: dict[torch.dtype, Codes] = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", FOUR_BIT: "int4"}

#: Tokens up to which the weight's bytes are what counts; and up to which decode4, with several tiles of so
#: many, takes less time than to widen the weight and multiply it (benchmarks/LOG.md).
_FEW, _FEW_BY_TILES = 64, 256

#: One token is a number of its own: the kernels for any GPU spend next to nothing on it, where those of
#: Hopper multiply 8, and need it not rounded.
BUCKETS = (1, *dispatch.BUCKETS)


def bucket_of(tokens: int) -> int:
    return 1 if tokens == 1 else dispatch.bucket_of(tokens)


@dataclass(frozen=True)
class Product:
    """What is multiplied, as far as the choice depends on it."""

    n: int
    k: int
    bucket: int
    dtype: torch.dtype
    device: int
    stored: torch.dtype
    scales: int  # a row
    rounds: bool  # the activations
    activation: str | None = None  # of a gated product, whose weight has 2n rows
    streamed: bool = False  # the weight lies in threads' order

    @property
    def rows(self) -> int:
        """Of the weight."""
        return 2 * self.n if self.activation else self.n

    @property
    def codes(self) -> Codes:
        return _CODES[self.stored]

    @property
    def group(self) -> int | None:
        """Columns that share a scale, None: all of a row."""
        return scale_group(self.k, self.scales) if self.codes == "int4" else None

    @property
    def key(self) -> str:
        """Its name in the tables of choices."""
        kind = f"{self.codes}{self.group or ''}{'' if self.rounds or self.group else '-weight'}"
        return f"{self.rows}x{self.k} {kind} {str(self.dtype).removeprefix('torch.')} {self.bucket}"


#: A product that is ready to run: (x [tokens, k], values, meta, scale, bias) to y [tokens, n].
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

_runs: dict[tuple[Any, ...], Run] = {}


def linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    columns: int,
    rounds: bool = False,
    activation: str | None = None,
) -> Tensor:
    """x·Wᵀ + bias with quantized W, perhaps gated, on a CUDA device."""
    n, device = values.shape[0], x.device.index
    if activation is not None:
        n //= 2
    if torch._C._cuda_getDevice() != device:  # launches go to the current one
        with torch.cuda.device(device):
            return linear(x, values, meta, scale, bias, columns, rounds, activation)
    if x.shape[-1] != columns:
        raise dispatch.wrong_width(x, columns)
    flat = x if x.dim() == 2 else x.reshape(-1, columns)
    if not flat.is_contiguous() or flat.data_ptr() % 16:
        flat = flat.clone(memory_format=torch.contiguous_format)
    tokens = flat.shape[0]
    if tokens == 0:
        return x.new_empty(*x.shape[:-1], n)
    dtype = x.dtype if x.dtype == scale.dtype else torch.float32  # which only the reference multiplies
    held = (values.dtype, scale.shape[1], rounds, activation, is_streamed(meta))
    shape = (n, columns, bucket_of(tokens), dtype, device, *held)
    key = (*shape, dispatch.forced())
    run = _runs.get(key)
    if run is None:
        run = _runs[key] = runner(Product(*shape))
    y = run(flat, values, meta, scale, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def quantized_linear(
    x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None, columns: int
) -> Tensor:
    """`twofour::quantized_linear` on a CUDA device."""
    return linear(x, values, meta, scale, bias, columns, rounds=True)


def quantized_gated_linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    columns: int,
    activation: str,
) -> Tensor:
    """`twofour::quantized_gated_linear` on a CUDA device."""
    return linear(x, values, meta, scale, bias, columns, rounds=True, activation=activation)


def wants_stream(
    n: int, k: int, dtype: torch.dtype, device: torch.device, stored: torch.dtype, scales: int
) -> bool:
    """Whether a weight is to lie in threads' order, for decode4."""
    if stored != FOUR_BIT or scales * GROUP != k or n % ROWS or dispatch.forced() not in (None, "hopper"):
        return False
    return hopper.why_not(device, dtype, n, k) is None


def why_not(way: str, product: Product) -> str | None:
    """The reason why a product cannot be run in a way, None if it can."""
    device = torch.device("cuda", product.device)
    shape = (product.n, product.k)
    if way == "decode":
        if product.streamed and dispatch.forced() != "ampere":
            return "the weight lies in the order of another kernel"
        return quantized_decode.why_not(device, product.dtype, product.codes, *shape, product.group)
    if way == "decode4":
        if product.codes != "int4" or product.group != GROUP:
            return f"it has a scale for {GROUP} columns of int4"
        if not product.streamed:
            return "the weight does not lie in its order"
        return hopper.why_not(device, product.dtype, *shape)
    if way == "codes":
        if not product.rounds:
            return "the scheme keeps activations in 16 bits"
        rounding = token_codes.why_not(device, product.dtype, product.stored, product.k)
        return hopper.why_not(device, product.dtype, *shape) or rounding
    if way == "widen":
        return widen.why_not(device, product.dtype, product.k)
    return None


def choose(product: Product) -> Choice:
    """The choice for a product, from the first source that has one which can run."""
    name = dispatch.forced()
    usable = [way for way in WAYS if why_not(way, product) is None]
    known = [choice for choice in _known(product) if choice.backend in usable and _fits(choice)]
    if name:
        usable = [way for way in usable if way in _FORCED.get(name, ())]
        if not usable:
            raise InputError(f"the backend {name} cannot run {product.key}.")
        known = [choice for choice in known if choice.backend in usable]
    if "widen" in usable:
        most = {"decode": _FEW, "decode4": _FEW_BY_TILES}
        usable = [way for way in usable if product.bucket <= most.get(way, product.bucket)]
    if product.activation is not None:  # in the same kernel, if there is a way: one launch less
        guess = _rule_of_thumb(product, usable[0])
        known = [choice for choice in [*known, guess] if _gates(product, choice)] or known
    return known[0] if known else _rule_of_thumb(product, usable[0])


def _fits(choice: Choice) -> bool:
    """Whether a multiprocessor can hold a block: tables from before threads' order may say what cannot."""
    config = hopper.from_dict(choice.config) if choice.backend == "decode4" else None
    return not isinstance(config, hopper.Decode4) or config.resident > 0


def _gates(product: Product, choice: Choice) -> bool:
    """Whether the kernel can end with the activation of a gated product."""
    together = {"codes": 8, "decode4": ROWS}.get(choice.backend)
    return together is not None and product.n % together == 0 and hopper.from_dict(choice.config).gates


def _known(product: Product) -> list[Choice]:
    """What the tables say of this product or else of the nearest one: a few tokens more, or bfloat16.

    Of weights in threads' order also what they say of one tile, where several are the rule.
    """
    at = BUCKETS.index(product.bucket)
    by_tiles = (_FEW,) if product.streamed and _FEW < product.bucket <= _FEW_BY_TILES else ()
    for dtype in (product.dtype, torch.bfloat16):
        for bucket in (*BUCKETS[at : at + 2], *by_tiles):
            if found := tuning.known(replace(product, bucket=bucket, dtype=dtype).key, product.device):
                return [Choice(c["backend"], c["config"]) for c in found]
    return []


def _rule_of_thumb(product: Product, way: str) -> Choice:
    processors = torch.cuda.get_device_properties(product.device).multi_processor_count
    gated = product.activation is not None
    if way == "decode":
        clusters = torch.cuda.get_device_capability(product.device) >= (9, 0)
        of = (product.rows, product.k, product.bucket, product.codes, product.group)
        return Choice(way, asdict(quantized_decode.guess(*of, processors, clusters)))
    if way == "decode4":
        of_four_bits = hopper_choices.guess4(product.rows, product.bucket, processors, gated)
        return Choice(way, hopper.as_dict(of_four_bits))
    if way == "codes":
        guess = hopper_choices.guess8(product.rows, product.k, product.bucket, processors, gated)
        return Choice(way, hopper.as_dict(guess))
    return Choice(way)


def candidates(product: Product) -> list[Choice]:
    """Every way to run a product that is worth timing."""
    found = []
    if why_not("decode", product) is None and product.bucket <= 256:
        clusters = torch.cuda.get_device_capability(product.device) >= (9, 0)
        of = (product.bucket, product.codes, product.group, clusters)
        found += [Choice("decode", asdict(c)) for c in quantized_decode.configs(*of)]
    if why_not("decode4", product) is None and product.bucket <= 256:
        found += [Choice("decode4", hopper.as_dict(c)) for c in hopper_choices.configs4(product.bucket)]
    if why_not("codes", product) is None:
        found += [
            Choice("codes", hopper.as_dict(c)) for c in hopper_choices.configs8(product.bucket, product.n)
        ]
    if why_not("widen", product) is None and product.bucket > _FEW and not product.rounds:
        found.append(Choice("widen"))
    return found


def runner(product: Product, choice: Choice | None = None) -> Run:
    """The call that runs a product in the way chosen."""
    choice = choice or choose(product)
    n, k, dtype, device = product.n, product.k, product.dtype, product.device
    config = hopper.from_dict(choice.config) if choice.backend in ("codes", "decode4") else None
    if config is not None and (product.activation is None or _gates(product, choice)):
        stored = product.stored if choice.backend == "codes" else None
        hopper_product = hopper_launch.Launches(n, k, dtype, config, device, product.activation, stored)
        if stored is None:

            def four_bit_product(
                x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None
            ) -> Tensor:
                out = x.new_empty((x.shape[0], n))
                hopper_product.run(x, values, meta, bias, out, scale)
                return out

            return four_bit_product

        def rounded_product(
            x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None
        ) -> Tensor:
            rounded, of_tokens = token_codes.round_tokens(x, product.stored)
            out = x.new_empty((x.shape[0], n))
            hopper_product.run(rounded, values, meta, bias, out, scale, of_tokens)
            return out

        return rounded_product
    if product.activation is not None:
        plain, activation = (
            runner(replace(product, n=product.rows, activation=None), choice),
            product.activation,
        )
        return lambda *tensors: reference.gate(plain(*tensors), activation)
    if choice.backend == "decode":
        launches = quantized_decode.Launches(
            *(n, k, dtype, product.codes, product.group),
            *(quantized_decode.Config(**choice.config), device, not product.streamed),
        )

        def decode(x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
            out = x.new_empty((x.shape[0], n))
            if product.streamed:  # forced after the layer was loaded: a comparison, which may take its time
                values, meta, scale = unstream(values, meta, scale)
            launches.run(x, values, meta, scale, bias, out)
            return out

        return decode
    if choice.backend == "widen":
        return lambda x, values, meta, scale, bias: dispatch.linear(
            x, *widen.widen(values, meta, scale, k), None, bias, k, fresh=True
        )
    plain_torch = reference.quantized_linear if product.rounds else reference.linear
    return lambda x, values, meta, scale, bias: plain_torch(x, values, meta, scale, bias, k)


def forget() -> None:
    """Choose anew from now on: the tables or the environment have changed."""
    _runs.clear()


library.impl("quantized_linear", quantized_linear, "CUDA")
library.impl("quantized_gated_linear", quantized_gated_linear, "CUDA")

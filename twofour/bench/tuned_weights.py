"""What `tune` multiplies with, how it may be run, and how exact that must be: 16 bits, and codes of a scheme.

All is against float64 on the weight as it is (code × scale, not rounded). The measure is the error of the
dense product in 16 bits of the same weight:

    16 bits    at most 1.2 times that
    decode     at most 1.2 times that, and decode4 the same
    widen      at most 2 times that: it rounds code × scale to 16 bits first, and sums in its own order
    codes   at most 0.005 of the outputs' norm, against the product with the tokens as they are rounded
               (quantize/activations.py): how far rounding itself is off is the scheme's affair
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.bench.contenders import packed_bytes
from twofour.bench.random_codes import exact_rows, in_other_order, random_codes
from twofour.bench.timing import copies_past_l2
from twofour.kernels import (
    ampere,
    cusparselt,
    dispatch,
    dispatch_codes,
    hopper,
    hopper_choices,
    hopper_source,
    quantized_decode,
)
from twofour.kernels.dispatch import Choice
from twofour.packed import Packed24, in_order, pack
from twofour.pattern import keep_best
from twofour.quantize.activations import round_tokens
from twofour.quantize.schemes import Scheme
from twofour.streamed import stream

#: How much less exact than the dense product a candidate may be, where it is not 1.2 times.
TOLERANCE, TOLERANCES = 1.2, {"widen": 2.0}

#: And where it multiplies rounded tokens, how far from the exact product with these.
ROUNDED_TOLERANCE = 0.005

SAMPLED_FEATURES = 128

#: Copies of a weight at most. Small ones would need thousands to be past the L2, and minutes to be captured.
MOST_COPIES = 256

#: Whether an output [tokens, n] of a choice is exact enough.
IsRight = Callable[[Choice, Tensor], bool]


class ToTune(ABC):
    """Random 2:4 weights of one shape, copies to be past the L2 (as far as MOST_COPIES); empty until made."""

    scheme: Scheme | None = None
    may_be_dense = True  # a layer may keep its dense weight, so tables say where that is the fastest

    def __init__(self, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.n, self.k, self.dtype, self.device = n, k, dtype, device
        self.dense: list[Tensor] = []
        self.tensors: list[tuple[Tensor | None, ...]] = []  # what a run takes after x, for each copy

    @abstractmethod
    def compile(self, buckets: Sequence[int]) -> None:
        """All kernels that may be candidates, on all cores at once."""

    @abstractmethod
    def make(self) -> None: ...

    def drop(self) -> None:
        self.dense, self.tensors = [], []

    @abstractmethod
    def product(self, bucket: int) -> Any: ...

    @abstractmethod
    def candidates(self, product: Any) -> list[Choice]: ...

    @abstractmethod
    def runner(self, product: Any, choice: Choice) -> Callable[..., Tensor]: ...

    @abstractmethod
    def exact(self, features: Tensor) -> Tensor:
        """Some rows of the first copy in float64."""

    def check(self, x: Tensor) -> IsRight:
        features = torch.randperm(self.n, device=self.device)[:SAMPLED_FEATURES]
        exact = x.double() @ self.exact(features).t()
        dense = _error(F.linear(x, self.dense[0])[:, features], exact)

        def is_right(choice: Choice, y: Tensor) -> bool:
            # Not the other way round: an error that is not a number is too large.
            allowed = TOLERANCES.get(choice.backend, TOLERANCE) * dense
            return _error(y[:, features], exact) <= allowed

        return is_right


class WeightsToTune(ToTune):
    """In 16 bits, for dispatch.py; with cuSPARSELt's form beside ours where there is one."""

    @property
    def compressed(self) -> bool:
        return cusparselt.why_not(self.device, self.dtype, self.n, self.k) is None

    @property
    def ordered(self) -> bool:
        """Whether one order of positions serves all, as in nn.SparseLinear."""
        own_kernel = dispatch.has_own_kernel(self.n, self.k, self.dtype, self.device)
        return self.compressed and own_kernel and self.n % 64 == 0

    def compile(self, buckets: Sequence[int]) -> None:
        configs = [c for b in buckets for c in hopper_choices.configs(b)]
        hopper_source.compile_all(configs, self.dtype, self.device, ordered=self.ordered)
        if hopper.why_not(self.device, self.dtype, 128, 128):
            ampere.compile_all([c for b in buckets for c in ampere.configs(b)], self.dtype, self.device)

    def make(self) -> None:
        for _ in range(_copies(packed_bytes(self.n, self.k, self.dtype), self.device)):
            weight = torch.randn(self.n, self.k, device=self.device, dtype=self.dtype) / self.k**0.5
            weight = weight.where(keep_best(weight.abs()), 0)
            packed = pack(weight)
            self.dense.append(weight)
            compressed = cusparselt.compress(weight) if self.compressed else None
            meta = in_order(packed.meta) if self.ordered else packed.meta
            self.tensors.append((packed.values, meta, None, compressed))

    def product(self, bucket: int) -> dispatch.Product:
        held = (self.compressed, None, False, self.ordered)
        return dispatch.Product(self.n, self.k, bucket, self.dtype, self.device.index or 0, *held)

    def candidates(self, product: dispatch.Product) -> list[Choice]:
        return dispatch.candidates(product)

    def runner(self, product: dispatch.Product, choice: Choice) -> Callable[..., Tensor]:
        return dispatch.runner(product, choice)

    def exact(self, features: Tensor) -> Tensor:
        return self.dense[0][features].double()


class CodesToTune(ToTune):
    """Codes of a scheme, for dispatch_codes.py."""

    scheme: Scheme
    may_be_dense = False

    def __init__(self, n: int, k: int, dtype: torch.dtype, device: torch.device, *, scheme: Scheme) -> None:
        super().__init__(n, k, dtype, device)
        self.scheme = scheme
        self.packed: list[Packed24] = []

    def compile(self, buckets: Sequence[int]) -> None:
        scheme, device, dtype = self.scheme, self.device, self.dtype
        if device.type != "cuda":
            return
        found = [choice for b in buckets for choice in dispatch_codes.candidates(self.product(b))]
        few = [quantized_decode.Config(**c.config) for c in found if c.backend == "decode"]
        quantized_decode.compile_all(few, dtype, scheme.codes, scheme.group, device)
        of_four_bits = [hopper.from_dict(c.config) for c in found if c.backend == "decode4"]
        hopper_source.compile_all(of_four_bits, dtype, device)
        many = [hopper.from_dict(c.config) for c in found if c.backend == "codes"]
        hopper_source.compile_all(many, dtype, device, None, scheme.stored)
        if not scheme.rounds_activations:  # codes are widened, and multiplied in the way chosen for 16 bits
            at = (dtype, device.index or 0, False)
            wide = dict.fromkeys(dispatch.bucket_of(b) for b in buckets)
            chosen = [dispatch.choose(dispatch.Product(self.n, self.k, b, *at)) for b in wide]
            configs = [hopper.from_dict(c.config) for c in chosen if c.backend == "hopper"]
            hopper_source.compile_all(configs, dtype, device)

    def make(self) -> None:
        random = torch.Generator(self.device).manual_seed(0)
        first = random_codes(self.n, self.k, self.scheme, self.dtype, random)
        copies = _copies(first.nbytes, self.device)
        self.packed = [first, *(in_other_order(first, random) for _ in range(copies - 1))]
        for p in self.packed:
            assert p.scale is not None
            held = (p.values, p.meta, p.scale)
            self.tensors.append((*(stream(*held) if self.streamed else held), None))
        self.dense = [p.unpack() for p in self.packed]

    def drop(self) -> None:
        super().drop()
        self.packed = []

    def product(self, bucket: int) -> dispatch_codes.Product:
        scheme, index = self.scheme, self.device.index or 0
        stored = (scheme.stored, scheme.scale_width(self.k), scheme.rounds_activations, None, self.streamed)
        return dispatch_codes.Product(self.n, self.k, bucket, self.dtype, index, *stored)

    @property
    def streamed(self) -> bool:
        """Whether a layer would hold the weight in threads' order."""
        of = (self.n, self.k, self.dtype, self.device)
        return dispatch_codes.wants_stream(*of, self.scheme.stored, self.scheme.scale_width(self.k))

    def candidates(self, product: dispatch_codes.Product) -> list[Choice]:
        return dispatch_codes.candidates(product)

    def runner(self, product: dispatch_codes.Product, choice: Choice) -> Callable[..., Tensor]:
        return dispatch_codes.runner(product, choice)

    def exact(self, features: Tensor) -> Tensor:
        return exact_rows(self.packed[0], features)

    def check(self, x: Tensor) -> IsRight:
        of_sixteen_bits = super().check(x)
        if not self.scheme.rounds_activations:
            return of_sixteen_bits
        features = torch.randperm(self.n, device=self.device)[:SAMPLED_FEATURES]
        codes, scale = round_tokens(x, self.scheme.stored)
        rounded = (codes.double() * scale.double()) @ self.exact(features).t()

        def is_right(choice: Choice, y: Tensor) -> bool:
            if choice.backend == "codes":
                return _error(y[:, features], rounded) <= ROUNDED_TOLERANCE
            return of_sixteen_bits(choice, y)

        return is_right


def _copies(weight_bytes: int, device: torch.device) -> int:
    return min(copies_past_l2(weight_bytes, device), MOST_COPIES)


def _error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())

"""Which kernel runs a product on a GPU: the fastest that was measured for its shape, or a good guess.

For each (n, k, tokens, dtype, GPU) there is one `Choice`, looked for in this order:

1. `TWOFOUR_BACKEND=hopper|ampere|cusparselt|reference` in the environment, or `force(...)`;
2. what `twofour tune` measured on this machine (kept on disk, see tuning.py);
3. the defaults shipped for this GPU (`defaults/*.json`, from rows of benchmarks/results);
4. a rule of thumb.

Tokens are counted in buckets: what is right for 1000 tokens is right for 1024. The choice of a bucket is
kept in memory, so a call costs one look into a dictionary before the kernel is launched.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from twofour.errors import InputError, TwoFourError
from twofour.kernels import ampere, cusparselt, hopper, hopper_choices, hopper_launch, reference, tuning
from twofour.ops import library
from twofour.packed import as_rows, is_ordered

BACKENDS = ("hopper", "ampere", "cusparselt", "reference")

#: Upper ends of the buckets of tokens; beyond the last one every count is in one bucket.
BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
_BUCKET_OF = [next(b for b in BUCKETS if b >= t) for t in range(1025)]

#: The algorithm of cuSPARSELt 0.8.0 that is most often the best on Hopper; its default is a third slower.
_CUSPARSELT_ON_HOPPER = 17

#: cuSPARSELt needs a plan for each number of tokens, which takes a millisecond and host memory. Where a
#: kernel of ours can run too, only multiples of this get one.
_PLANNED = 64


@dataclass(frozen=True)
class Choice:
    """A backend and how it is to be run."""

    backend: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Product:
    """What is multiplied, as far as the choice depends on it."""

    n: int
    k: int
    bucket: int
    dtype: torch.dtype
    device: int
    compressed: bool  # cuSPARSELt's form of the weight is there
    activation: str | None = None  # of a gated product, whose weight has 2n rows
    fresh: bool = (
        False  # the weight is the work of the kernel before: it cannot be asked for before that has ended
    )
    ordered: bool = False  # its positions lie in cuSPARSELt's order

    @property
    def rows(self) -> int:
        """Of the weight."""
        return 2 * self.n if self.activation else self.n

    @property
    def key(self) -> str:
        """Its name in the tables of choices. What is fastest does not depend on the activation at its end."""
        return f"{self.rows}x{self.k} {str(self.dtype).removeprefix('torch.')} {self.bucket}"


#: A product that is ready to run: (x [tokens, k], values, meta, bias, compressed) to y [tokens, n].
Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]

_runs: dict[tuple[Any, ...], Run] = {}
_dense_wins: dict[tuple[Any, ...], bool] = {}
_forced: list[tuple[str, dict[tuple[Any, ...], Run]]] = []
_forced_runs: dict[str, dict[tuple[Any, ...], Run]] = {}


def linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    compressed: Tensor | None = None,
    fresh: bool = False,
) -> Tensor:
    """`twofour::linear` on a CUDA device. A weight that a kernel has just made is `fresh` (see Product)."""
    return _multiply(x, values, meta, scale, bias, columns, compressed, None, fresh)


def gated_linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    activation: str,
    compressed: Tensor | None = None,
) -> Tensor:
    """`twofour::gated_linear` on a CUDA device."""
    return _multiply(x, values, meta, scale, bias, columns, compressed, activation)


def _multiply(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    compressed: Tensor | None,
    activation: str | None,
    fresh: bool = False,
) -> Tensor:
    n, device = values.shape[0], x.device.index
    if activation is not None:
        n //= 2
    if torch._C._cuda_getDevice() != device:  # launches go to the current one
        with torch.cuda.device(device):
            return _multiply(x, values, meta, scale, bias, columns, compressed, activation, fresh)
    if scale is not None:
        from twofour.kernels import dispatch_codes  # which needs this module

        return dispatch_codes.linear(x, values, meta, scale, bias, columns, activation=activation)
    if x.dtype != values.dtype:
        y = reference.linear(x, values, meta, scale, bias, columns)
        return y if activation is None else reference.gate(y, activation)
    if x.shape[-1] != columns:
        raise wrong_width(x, columns)
    flat = x if x.dim() == 2 else x.reshape(-1, columns)
    if not flat.is_contiguous() or flat.data_ptr() % 16:  # the copy engine and cuSPARSELt ask for both
        flat = flat.clone(memory_format=torch.contiguous_format)
    tokens = flat.shape[0]
    if tokens == 0:
        return x.new_empty(*x.shape[:-1], n)
    held = (compressed is not None, activation, fresh, is_ordered(meta))
    key = (n, columns, bucket_of(tokens), x.dtype, device, *held)
    runs = _forced[-1][1] if _forced else _runs
    run = runs.get(key)
    if run is None:
        run = runs[key] = runner(Product(*key))
    y = run(flat, values, meta, bias, compressed)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def wrong_width(x: Tensor, columns: int) -> InputError:
    """A kernel would read beyond x, or take two tokens for one."""
    return InputError(f"the input is {list(x.shape)}, and the weight has {columns} columns.")


def bucket_of(tokens: int) -> int:
    """The bucket that so many tokens fall into.

    >>> bucket_of(1), bucket_of(65), bucket_of(100_000)
    (8, 96, 8192)
    """
    if tokens <= 1024:
        return _BUCKET_OF[tokens]
    return next((b for b in BUCKETS if b >= tokens), BUCKETS[-1])


def forced() -> str | None:
    """The backend that the environment or `force` names."""
    name = _forced[-1][0] if _forced else os.environ.get("TWOFOUR_BACKEND")
    if name and name not in BACKENDS:
        raise InputError(f"there is no backend {name!r}.", hint=f"Choose one of: {', '.join(BACKENDS)}.")
    return name


def choose(product: Product) -> Choice:
    """The choice for a product, from the first source that has one which can run."""
    name = forced()
    if name:
        if reason := why_not(name, product):
            raise InputError(f"the backend {name} cannot run {product.key}: {reason}.")
        known = [c for c in _known(product) if c.backend == name]
        return known[0] if known else _rule_of_thumb(product, name)
    for choice in _known(product):
        if why_not(choice.backend, product) is None:
            return choice
    usable = [b for b in BACKENDS if why_not(b, product) is None]
    own_up_to = 64
    if "hopper" in usable:  # not far behind the library, and ahead of an algorithm of it that nobody timed
        own_up_to = 1024 if cusparselt.ids_are_known() else BUCKETS[-1]
    if "cusparselt" in usable and product.bucket > own_up_to:
        return _rule_of_thumb(product, "cusparselt")
    # The ampere kernel reads the weight once for every 64 tokens; unpacking it once is a guess at what is
    # better for many, not measured.
    too_many = usable[0] == "ampere" and product.bucket > 512
    return _rule_of_thumb(product, "reference" if too_many else usable[0])


def choose_gated(product: Product) -> Choice | None:
    """How a product and the activation after it run as one kernel; None if they must be two."""
    name = forced()
    if (name or "hopper") != "hopper" or product.n % 8 or why_not("hopper", product):
        return None
    guess = hopper_choices.guess(product.n, product.k, product.bucket, gated=True)
    for choice in [*_known(product), Choice("hopper", hopper.as_dict(guess))]:
        if choice.backend != "hopper":
            continue
        config = hopper.from_dict(choice.config)
        # In cuSPARSELt's order rows of the gate and beside it come in whole or half blocks of 64.
        if config.gates and not (product.ordered and config.warpgroups == 3):
            return choice
    return None


def _known(product: Product) -> list[Choice]:
    """What the tables say of this product or else of the nearest one: a few tokens more, or bfloat16.

    float16 moves the same bytes through the same instructions, so what is fastest for one is for the other.
    """
    at = BUCKETS.index(product.bucket)
    for dtype in (product.dtype, torch.bfloat16):
        for bucket in BUCKETS[at : at + 2]:
            near = replace(product, bucket=bucket, dtype=dtype)
            if found := tuning.known(near.key, product.device):
                return [Choice(c["backend"], c["config"]) for c in found]
    return []


def dense_is_fastest(n: int, k: int, tokens: int, dtype: torch.dtype, device: int) -> bool:
    """Whether the dense product was measured ahead of every kernel of ours, or none of ours can run."""
    if _forced or os.environ.get("TWOFOUR_BACKEND"):
        return False
    key = (n, k, bucket_of(tokens), dtype, device)
    known = _dense_wins.get(key)
    if known is None:
        product = Product(*key, compressed=True)
        tables = _known(product)
        runs = [b for b in BACKENDS if b != "reference" and why_not(b, product) is None]
        known = _dense_wins[key] = not runs or (bool(tables) and tables[0].backend == "dense")
    return known


def worth_keeping_dense(n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    """Whether the dense weight, if it may stay in memory, is ever the fastest."""
    return any(dense_is_fastest(n, k, bucket, dtype, device) for bucket in BUCKETS)


def has_own_kernel(n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel of ours is written for many tokens on this GPU, so that cuSPARSELt is no must."""
    return hopper.why_not(device, dtype, n, k) is None and n % 8 == 0


def why_not(backend: str, product: Product) -> str | None:
    """The reason why a backend cannot run a product, None if it can."""
    device = torch.device("cuda", product.device)
    if backend == "dense":
        return "the layer decides that, by the weights it holds"
    if backend == "hopper" and product.ordered and product.n % 64:
        return f"{product.n} rows are no multiple of 64, which cuSPARSELt's order of positions asks for"
    if backend in ("hopper", "ampere"):
        return (hopper if backend == "hopper" else ampere).why_not(
            device, product.dtype, product.n, product.k
        )
    if backend == "cusparselt":
        if not product.compressed:
            return 'the layer does not keep its form of the weight (memory="fast" does)'
        return cusparselt.why_not(device, product.dtype, product.n, product.k)
    return None


def _rule_of_thumb(product: Product, backend: str) -> Choice:
    if backend == "hopper":
        return Choice(backend, hopper.as_dict(hopper_choices.guess(product.n, product.k, product.bucket)))
    if backend == "ampere":
        processors = torch.cuda.get_device_properties(product.device).multi_processor_count
        return Choice(backend, asdict(ampere.guess(product.n, product.k, product.bucket, processors)))
    on_hopper = torch.cuda.get_device_capability(product.device) == (9, 0)
    if backend == "cusparselt" and on_hopper and cusparselt.ids_are_known():
        return Choice(backend, {"id": _CUSPARSELT_ON_HOPPER})
    return Choice(backend)


def candidates(product: Product) -> list[Choice]:
    """Every way to run a product that is worth timing."""
    found = []
    if why_not("hopper", product) is None:
        found += [
            Choice("hopper", hopper.as_dict(c)) for c in hopper_choices.configs(product.bucket, product.n)
        ]
    elif why_not("ampere", product) is None and product.bucket <= 1024:
        found += [Choice("ampere", asdict(c)) for c in ampere.configs(product.bucket)]
    if why_not("cusparselt", product) is None and product.bucket > 64:
        tokens = product.bucket
        device = torch.device("cuda", product.device)
        algorithms = cusparselt.algorithms(product.n, product.k, tokens, product.dtype, device)
        found += [Choice("cusparselt", asdict(a)) for a in algorithms]
    return found


def runner(product: Product, choice: Choice | None = None) -> Run:
    """The call that runs a product in the way chosen."""
    if choice is None and product.activation is not None:
        choice = choose_gated(product)
        if choice is None:
            return _in_two_steps(product)
    if choice is None:
        choice = choose(product)
        if choice.backend == "cusparselt" and not forced() and why_not("hopper", product) is None:
            return _cusparselt_or_own(product, choice)
    if choice.backend in ("hopper", "ampere"):
        launches = _launches(product, choice)
        # In a comparison on Hopper, or in a program exported there and run elsewhere.
        reordered = choice.backend == "ampere" and product.ordered

        def run(x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None, _: Tensor | None) -> Tensor:
            out = x.new_empty((x.shape[0], product.n))
            launches.run(x, values, as_rows(meta) if reordered else meta, bias, out)
            return out

        return run
    if choice.backend == "cusparselt":
        return _cusparselt(product, cusparselt.Algorithm(**choice.config))
    return lambda x, values, meta, bias, _: reference.linear(x, values, meta, None, bias, product.k)


def _launches(product: Product, choice: Choice) -> hopper_launch.Launches | ampere.Launches:
    shape = (product.n, product.k, product.dtype)
    if choice.backend == "hopper":
        config = hopper.from_dict(choice.config)
        gated, early = product.activation, not product.fresh
        return hopper_launch.Launches(
            *shape, config, product.device, gated, early=early, ordered=product.ordered
        )
    # Positions in cuSPARSELt's order are put into rows just before, so then they are fresh as well.
    early = not (product.fresh or product.ordered)
    return ampere.Launches(*shape, ampere.Config(**choice.config), product.device, early)


def _in_two_steps(product: Product) -> Run:
    """The plain product, then the activation: for what no kernel does in one."""
    plain = runner(replace(product, n=product.rows, activation=None))
    activation = product.activation
    assert activation is not None
    return lambda *tensors: reference.gate(plain(*tensors), activation)


def _cusparselt(product: Product, algorithm: cusparselt.Algorithm) -> Run:
    last: tuple[Any, Any] = (None, None)  # the plan of the call before, found without a lock or a long key

    def run(
        x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None, compressed: Tensor | None
    ) -> Tensor:
        nonlocal last
        assert compressed is not None
        tokens = x.shape[0]
        short = -tokens % cusparselt.TOKEN_MULTIPLE
        if short:
            x = torch.nn.functional.pad(x, (0, 0, 0, short))
        out = x.new_empty((tokens + short, product.n))
        this = (tokens + short, None if bias is None else bias.data_ptr())
        known, plan = last
        if known != this:
            plan = cusparselt.plan_for(product.n, product.k, this[0], x.dtype, x.device, algorithm, this[1])
            last = (this, plan)
        plan.run(x, compressed, out)
        return out[:tokens] if short else out

    return run


def _cusparselt_or_own(product: Product, choice: Choice) -> Run:
    """Our kernel for the numbers of tokens that get no plan (`_PLANNED`), and for all if the library refuses
    one. It is loaded when one comes."""
    planned, own, refused = runner(product, choice), None, False

    def run(
        x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None, compressed: Tensor | None
    ) -> Tensor:
        nonlocal own, refused
        if x.shape[0] % _PLANNED == 0 and not refused:
            try:
                return planned(x, values, meta, bias, compressed)
            except TwoFourError as error:
                refused = True
                warnings.warn(f"{product.key} goes by our own kernel from now on: {error}", stacklevel=2)
        if own is None:
            known = [c for c in _known(product) if c.backend == "hopper"]
            own = runner(product, known[0] if known else _rule_of_thumb(product, "hopper"))
        return own(x, values, meta, bias, compressed)

    return run


@contextlib.contextmanager
def force(backend: str) -> Iterator[None]:
    """Use one backend inside a `with`, whatever was measured. For tests and comparisons."""
    _forced.append((backend, _forced_runs.setdefault(backend, {})))
    try:
        yield
    finally:
        _forced.pop()


def forget() -> None:
    """Choose anew from now on: the tables or the environment have changed."""
    _runs.clear()
    _dense_wins.clear()
    _forced_runs.clear()
    from twofour.kernels import dispatch_codes

    dispatch_codes.forget()


library.impl("linear", linear, "CUDA")
library.impl("gated_linear", gated_linear, "CUDA")

"""Rotary embedding as one kernel, where a model spells it out as a dozen.

transformers' attention calls a function of its module, `apply_rotary_pos_emb(q, k, cos, sin)`, that slices,
negates, concatenates, multiplies and adds, each a kernel over all queries or keys. `fuse_` has one kernel do
it (kernels/rope.py), for queries and keys together and with the same bits.

The function is looked up by name in the module's globals, and those belong to every model of the process. So
nothing is put there: one attention module of one model gets a class of its own, derived from the one it
had, whose `forward` is the same code over globals of its own. Tensors, names and children stay as they are.

Whether a function computes just this is seen by calling it, with every combination of types and widths, and
only what gave the same bits is left to the kernel. Everything else stays with the model's own function:
gradients, arguments that are not known, and whatever a compiler or a tracer watches, as it fuses by itself.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from twofour import ops
from twofour.kernels import rope as kernel
from twofour.nn.linear import watched

#: The function's name and the first of its parameters, the same in all of transformers.
NAME = "apply_rotary_pos_emb"
PARAMETERS = ["q", "k", "cos", "sin"]

#: Where a class of our making keeps the one it was made of.
ORIGINAL = "_twofour_without_rope"

#: What the function may be called with: the types of q and of cos, and if only a part of a head is turned.
Kind = tuple[torch.dtype, torch.dtype, bool]

Rotary = Callable[..., tuple[Tensor, Tensor]]


def fuse_rope_(model: nn.Module) -> tuple[int, dict[str, str]]:
    """Every attention module that can; how many, and the names of those that cannot with the reason."""
    fused, left = 0, {}
    for path, module in model.named_modules():
        if not rotates(module):
            continue
        reason = why_not(module)
        if reason is None:
            own: Any = type(module)
            module.__class__ = _with_one_kernel(own)
            fused += 1
        else:
            left[path] = reason
    return fused, left


def unfuse_rope_(module: nn.Module) -> None:
    """Undo it for one module; nothing where there is nothing to undo."""
    module.__class__ = getattr(type(module), ORIGINAL, type(module))


def is_rope_fused(module: nn.Module) -> bool:
    return hasattr(type(module), ORIGINAL)


def rotates(module: nn.Module) -> bool:
    """Whether the module's forward calls the function, inside decorators or not, and is not fused yet."""
    forward = getattr(type(module), "forward", None)
    return callable(forward) and not is_rope_fused(module) and _calls_it(inspect.unwrap(forward))


def why_not(module: nn.Module) -> str | None:
    """The reason why a module that rotates has to keep its own function, None if one kernel can do it."""
    forward = type(module).forward
    if "forward" in vars(module):
        return "its forward was replaced, as accelerate does for its hooks"
    if not _calls_it(forward):
        return "its forward is inside a decorator"
    if not _kinds(forward.__globals__[NAME]):
        return f"its {NAME} computes something else"
    return None


class Rope:
    """In the place of a model's function: one kernel where it gave the same, else that function."""

    def __init__(self, original: Rotary, kinds: dict[Kind, bool]) -> None:
        self.original, self.kinds = original, kinds

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        heads_dim = named.get("unsqueeze_dim", 1)
        round_steps = None
        if not args and len(named) == ("unsqueeze_dim" in named) and _in_shape(q, k, cos, sin, heads_dim):
            round_steps = self.kinds.get((q.dtype, cos.dtype, cos.shape[-1] < q.shape[-1]))
        if round_steps is None:
            return self.original(q, k, cos, sin, *args, **named)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, cos, sin)):
            return self.original(q, k, cos, sin, *args, **named)
        arguments = (q, k, cos, sin, heads_dim, round_steps)
        if q.is_cuda and type(q) is Tensor and not watched():
            if kernel.why_not(q, k, cos, sin) is not None:
                return self.original(q, k, cos, sin, **named)
            return kernel.launch(*arguments)  # without the operator's microseconds
        turned: tuple[Tensor, Tensor] = ops.rope(*arguments)
        return turned


def _in_shape(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: Any) -> bool:
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or heads_dim not in (1, 2):
        return False
    batch, tokens, width = q.shape[0], q.shape[3 - heads_dim], cos.shape[2]
    return (
        k.shape[0] == batch
        and k.shape[3 - heads_dim] == cos.shape[1] == tokens
        and k.shape[3] == q.shape[3]
        and cos.shape[0] in (1, batch)
        and 0 < width <= q.shape[3]
        and width % 2 == 0
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
    )


@functools.cache
def _with_one_kernel(original: type[nn.Module]) -> type[nn.Module]:
    forward: Any = original.forward
    function = forward.__globals__[NAME]
    names = {**forward.__globals__, NAME: Rope(function, _kinds(function))}
    rebound = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rebound.__kwdefaults__ = forward.__kwdefaults__

    @functools.wraps(forward)
    def fused(self: nn.Module, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return forward(self, *args, **named)
        return rebound(self, *args, **named)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # This class has no name that it could be found by; the one it was made of has.
        reduced: Any = original.__reduce_ex__(self, protocol)
        return (_blank, (original,), *reduced[2:])

    inside = {"forward": fused, "__reduce_ex__": reduce, ORIGINAL: original}
    named_as = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), {**inside, **named_as, "__doc__": original.__doc__})


def _blank(original: Any) -> nn.Module:
    """A module to be filled from a pickle; plain where the function is another one by now."""
    module: nn.Module = original.__new__(original)
    if rotates(module) and why_not(module) is None:
        module.__class__ = _with_one_kernel(original)
    return module


def _calls_it(forward: Any) -> bool:
    """Whether a Python function takes the name from its globals, not an attribute of that name."""
    return (
        isinstance(forward, types.FunctionType)
        and callable(forward.__globals__.get(NAME))
        and _loads_it(forward.__code__)
    )


@functools.cache
def _loads_it(code: types.CodeType) -> bool:
    return any(i.opname == "LOAD_GLOBAL" and i.argval == NAME for i in dis.get_instructions(code))


@functools.cache
@torch.no_grad()
def _kinds(function: Rotary) -> dict[Kind, bool]:
    """What the function may be called with to give what the kernel gives, and if it rounds every step."""
    try:
        if list(inspect.signature(function).parameters)[:4] != PARAMETERS:
            return {}
    except (TypeError, ValueError):  # not everything that can be called says how
        return {}
    found: dict[Kind, bool] = {}
    narrow = (torch.bfloat16, torch.float16)
    types_of = [*itertools.product(narrow, (torch.float32,)), *((t, t) for t in (*narrow, torch.float32))]
    for (dtype, factors), part in itertools.product(types_of, (False, True)):
        for round_steps in (True, False):
            if _same(function, dtype, factors, part, round_steps):
                found[dtype, factors, part] = round_steps
                break
    return found


def _same(function: Rotary, dtype: torch.dtype, factors: torch.dtype, part: bool, round_steps: bool) -> bool:
    """Whether the function gives the bits of the reference, for both orders of heads and tokens.

    cos and sin are random, so their halves differ: a function that turns neighbours, or reads one half only,
    is seen to be another one.
    """
    random = torch.Generator().manual_seed(0)
    batch, tokens, heads, kv_heads, width = 2, 5, 4, 2, 32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")

    cos, sin = (draw(batch, tokens, width // 2 if part else width).to(factors) for _ in "cs")
    q, k = draw(batch, tokens, heads, width).to(dtype), draw(batch, tokens, kv_heads, width).to(dtype)
    try:
        got = [
            function(q.transpose(1, 2), k.transpose(1, 2), cos, sin),  # heads first, by default
            function(q, k, cos, sin, unsqueeze_dim=2),
        ]
    except Exception:  # whatever it is, it is not called like this
        return False
    wanted = [
        kernel.reference(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 1, round_steps),
        kernel.reference(q, k, cos, sin, 2, round_steps),
    ]
    return all(
        isinstance(pair, tuple) and len(pair) == 2 and all(map(_equal, pair, others))
        for pair, others in zip(got, wanted, strict=True)
    )


def _equal(got: Any, wanted: Tensor) -> bool:
    return isinstance(got, Tensor) and got.dtype == wanted.dtype and torch.equal(got, wanted)

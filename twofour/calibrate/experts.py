"""Experts that are stored as one tensor, taken apart into plain `nn.Linear`s.

transformers keeps the experts of a mixture as stacked weights [experts, out, in] and multiplies them in one
call. Each expert is a product of its own all the same: it sees its own tokens, so it has a Gram matrix of its
own, and it is packed by itself. Taken apart, there is nothing special about it, and everything that works for
layers works for experts: selection, calibration, masks, packed modules, adapters.

The linears get the names that checkpoint files have for them, where transformers' own rules for loading say
which (`experts.3.gate_proj`, or `experts.3.w1` in a Mixtral): then files that hold one tensor an expert, as
those of nearly all published mixtures do, need no translation. Otherwise they are named after the stacked
weight (`experts.3.gate_up_proj`).

Opened experts run in a loop over those that tokens were sent to, as transformers' "eager" does. In a compiled
or captured graph, which cannot depend on where tokens go, all experts see all tokens.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from twofour.select import stacked_experts

Verb = TypeVar("Verb", bound=Callable[..., Any])

#: How a stacked weight may be made of the tensors in the files: the experts on top of each other, and perhaps
#: gate and up above each other within each.
_STACKED = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


class OpenExperts(nn.ModuleList):
    """What a module with stacked experts computes, with a dictionary of linears for each expert."""

    def __init__(self, stacked: nn.Module, parts: dict[str, list[str]]) -> None:
        """`parts`: for each stacked weight, the up side first, the names of the linears that it becomes.

        Their weights are views of it: what is changed in place is changed there.
        """
        super().__init__()
        up, down = parts.values()
        self.up_names, self.down_name = up, down[0]
        self.stacked_names = tuple(parts)
        # Its activation and how it applies the gate may be its own. It has no parameters beside the experts,
        # and is kept in a tuple so that it is no submodule.
        like = copy.copy(stacked)
        like._parameters = {}
        self._like = (like,)
        weights = {own: stacked.get_parameter(own) for own in parts}
        for number in range(len(weights[next(iter(parts))])):
            linears: dict[str, nn.Module] = {}
            for own, names in parts.items():
                bias = stacked._parameters.get(f"{own}_bias")
                for i, name in enumerate(names):
                    linears[name] = _linear(weights[own], bias, number, i, len(names))
            self.append(nn.ModuleDict(linears))
        self.train(stacked.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """States [tokens, width] through the experts [tokens, k] that each token was sent to, weighed."""
        if torch.compiler.is_compiling() or _capturing(hidden_states):
            return self._all_of_them(hidden_states, top_k_index, top_k_weights)
        tokens, k = top_k_index.shape
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self)).tolist()
        outputs = [
            self._expert(number, hidden_states[places // k])
            for number, places in enumerate(order.split(counts))
            if len(places)
        ]
        if not outputs:
            return torch.zeros_like(hidden_states)
        # Back in the order of the tokens, and summed up per token: the same bits in every run.
        by_token = torch.cat(outputs)[order.argsort()] * top_k_weights.reshape(-1, 1)
        return by_token.view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)

    def _all_of_them(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Every token through every expert: what a graph can hold, where shapes may not depend on routing."""
        out = torch.zeros_like(x, dtype=top_k_weights.dtype)
        for number in range(len(self)):
            share = (top_k_weights * (top_k_index == number)).sum(dim=1, keepdim=True)
            # Not share · output alone: an expert may give infinities for tokens that are not for it.
            out = out + torch.where(share != 0, share * self._expert(number, x), 0)
        return out.to(x.dtype)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        like: Any = self._like[0]
        expert = cast(nn.ModuleDict, self[number])
        ups = [expert[name](x) for name in self.up_names]
        up = ups[0] if len(ups) == 1 else torch.cat(ups, dim=-1)
        middle = like._apply_gate(up) if getattr(like, "has_gate", True) else like.act_fn(up)
        return cast(Tensor, expert[self.down_name](middle))


def open_experts_(model: nn.Module) -> dict[str, OpenExperts]:
    """Take all stacked experts of a model apart, in place; the new modules by name.

    Those that cannot be (`select.stacked_experts` says why) stay as they are.
    """
    found = {
        name: (module, weights)
        for name, module in model.named_modules()
        if name and isinstance(weights := stacked_experts(module), tuple)
    }
    rules = weight_conversions(model) if found else []
    opened: dict[str, OpenExperts] = {}
    for name, (module, weights) in found.items():
        parts = {own: _names_in_files(f"{name}.{own}", rules) or [own] for own in weights}
        if len(parts[weights[-1]]) > 1 or len({n for names in parts.values() for n in names}) < 2:
            parts = {own: [own] for own in weights}
        opened[name] = OpenExperts(module, parts)
        model.set_submodule(name, opened[name])
    return opened


@contextmanager
def opened_experts(model: nn.Module) -> Iterator[dict[str, OpenExperts]]:
    """The model with its stacked experts apart, and together again afterwards, with what was changed.

    Those that are removed from the dictionary meanwhile stay apart.
    """
    before = dict(model.named_modules())
    opened = open_experts_(model)
    try:
        yield opened
    finally:
        for name, experts in opened.items():
            _put_back(before[name], experts)
            model.set_submodule(name, before[name])


@torch.no_grad()
def stack_experts_(model: nn.Module) -> None:
    """What `open_experts_` took apart as one tensor again, in place: parameters are new, and copies.

    Experts of which one is not a plain linear layer any more (packed, or with a correction) stay apart.
    """
    opened = {name: m for name, m in model.named_modules() if isinstance(m, OpenExperts)}
    for name, experts in opened.items():
        plain = all(type(linear) is nn.Linear for expert in experts for linear in expert.children())
        if plain:
            model.set_submodule(name, _stacked(experts))


def _stacked(experts: OpenExperts) -> nn.Module:
    whole = copy.copy(experts._like[0])
    whole._parameters = {}
    for own, names in zip(experts.stacked_names, (experts.up_names, [experts.down_name]), strict=True):
        linears = [[expert.get_submodule(name) for name in names] for expert in experts]
        for what, target in (("weight", own), ("bias", f"{own}_bias")):
            rows = [[linear._parameters.get(what) for linear in parts] for parts in linears]
            there: list[list[Tensor]] = [[row for row in parts if row is not None] for parts in rows]
            if there[0]:
                trained = any(row.requires_grad for parts in there for row in parts)
                together = torch.stack([torch.cat(parts) for parts in there])
                whole.register_parameter(target, nn.Parameter(together, requires_grad=trained))
    return whole.train(experts.training)


def with_open_experts(verb: Verb) -> Verb:
    """A verb whose first argument is a model to change in place, run on it with its experts apart."""

    @functools.wraps(verb)
    def run(model: nn.Module, *args: Any, **named: Any) -> Any:
        with opened_experts(model):
            return verb(model, *args, **named)

    return cast(Verb, run)


def weight_conversions(model: nn.Module) -> list[Any]:
    """transformers' rules for how the tensors in files become those of this model; none for other modules."""
    if not hasattr(model, "base_model_prefix"):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(cast(Any, model)))


def makes_one_of(rule: Any, stacked: Sequence[str]) -> bool:
    """Whether a rule of `weight_conversions` puts one of these weights together: not while they are apart."""
    return hasattr(rule, "operations") and any(
        name.endswith(_plain(target)) for name in stacked for target in rule.target_patterns
    )


def _names_in_files(weight: str, rules: Sequence[Any]) -> list[str]:
    """What the files call the linears of each expert that this stacked weight is made of; [] if not known."""
    module, _, own = weight.rpartition(".")
    for rule in rules:
        done = [(type(op).__name__, getattr(op, "dim", None)) for op in getattr(rule, "operations", ())]
        if done not in _STACKED or len(rule.target_patterns) != 1 or not makes_one_of(rule, [weight]):
            continue
        before = _plain(rule.target_patterns[0]).removesuffix(own)
        if not f"{module}.".endswith(before):
            continue
        sources = [
            re.fullmatch(rf"{re.escape(before)}\*\.(\w+)\.weight", _plain(source))
            for source in rule.source_patterns
        ]
        if sources and all(sources):
            return [source[1] for source in sources if source]
    return []


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _plain(pattern: str) -> str:
    """A pattern of transformers' rules as the text that it stands for, but for its star."""
    return pattern.replace("\\", "").removeprefix("^").removesuffix("$")


def _linear(weight: Tensor, bias: Tensor | None, expert: int, part: int, parts: int) -> nn.Linear:
    """Rows of one expert's matrix as a layer."""
    own = weight.detach()[expert].chunk(parts)[part]
    linear = nn.Linear(own.shape[1], own.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(own, requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach()[expert].chunk(parts)[part], requires_grad=bias.requires_grad)
    return linear


@torch.no_grad()
def _put_back(stacked: nn.Module, experts: OpenExperts) -> None:
    """What the linears hold into the stacked weights, where it is not the same memory any more."""
    names = cast("tuple[str, ...]", stacked_experts(stacked))
    for own, parts in zip(names, (experts.up_names, [experts.down_name]), strict=True):
        for what, target in (("weight", own), ("bias", f"{own}_bias")):
            whole = stacked._parameters.get(target)
            for number, expert in enumerate(experts if whole is not None else ()):
                assert whole is not None
                for rows, name in zip(whole[number].chunk(len(parts)), parts, strict=True):
                    new = expert.get_submodule(name).get_parameter(what)
                    if new.data_ptr() != rows.data_ptr():
                        rows.copy_(new)

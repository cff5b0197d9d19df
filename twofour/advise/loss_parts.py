"""What a small change of each layer's weight does to a model's loss, for all layers in a few passes.

Pruning a layer changes its weight by D. To second order the loss on a text then rises by

    E[∇loss·D]  +  ½ · E[(g·D)²],   g = gradient of log p(y), with the label y drawn from the model itself

The second part is the divergence (KL) from the dense model's predictions: it is there on any text, and never
negative. The first part has either sign. It is zero on text that the model has written itself, and not where
the model is not at its best: a text of another kind than it was trained on, weights that were rounded.

Neither needs the gradient of a weight: its product with D is the gradient at the layer's output times D·x,
summed over the tokens of a window. So one forward pass over a window with a product D·x beside every layer's
own, and then a backward pass for each signal at the logits, serve all layers at once: the time of about five
forward passes, where pruning each layer in turn and looking takes one for every layer.

The signals are the gradient of the text's own loss (first part), and *probes* (second part): random signs r,
made v = √p·r - p·(√p·r), in place of a drawn label. A probe has the same covariance, diag(p) - p·pᵀ, without
the long tails of a rare word. Every window and probe gives one square, so the relative error of the second
part is about √(2 / squares).

The first part is noisy: which words a text happens to have moves it by √(2·divergence / tokens), for a layer
that changes little as much as the whole rise. `kept_share` says how much of it to believe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from twofour.calibrate.examples import evaluating
from twofour.errors import TwoFourError
from twofour.progress import OnProgress, silent
from twofour.select import Layer

#: Probes for each window: a further one costs a backward pass, the forward pass is there already.
PROBES = 2


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        if not values:
            return Mean(0.0, 0.0)
        spread, mean = torch.std_mean(torch.tensor(values, dtype=torch.float64), correction=0)
        return Mean(float(mean), float(spread) / math.sqrt(max(len(values) - 1, 1)))


@dataclass(frozen=True)
class LossParts:
    """Both parts for one layer as they came out on the text, in nats a token."""

    first_order: Mean  # the spread is that between windows
    divergence: Mean


def loss_parts(
    model: nn.Module,
    changed: Mapping[Layer, Tensor],
    windows: Tensor,
    *,
    labels: bool = True,
    probes: int = PROBES,
    seed: int = 0,
    on_progress: OnProgress = silent,
) -> dict[Layer, LossParts]:
    """The parts of the loss that each changed weight alone would add on the windows [count, length].

    Without `labels` there is no first part: for windows that the model has written itself, where it would be
    nothing but noise.
    """
    device = next(model.parameters()).device
    random = torch.Generator(device).manual_seed(seed)
    slopes: dict[Layer, list[float]] = {layer: [] for layer in changed}
    squares: dict[Layer, list[float]] = {layer: [] for layer in changed}
    with _backward_to_layers(model, changed) as products:

        def send_back(logits: Tensor, signal: Tensor, again: bool) -> Iterator[tuple[Layer, float]]:
            """The signal's product with what each layer would change."""
            for layer in changed:
                products[layer] = torch.zeros((), device=device)
            torch.autograd.backward(logits, signal, retain_graph=again)
            gathered = torch.stack([products[layer] for layer in changed]).double().cpu()
            return zip(changed, gathered.tolist(), strict=True)

        for number, tokens in enumerate(windows.to(device)):
            # One window at a time: an expert's tokens do not say which window they came from.
            logits = model(tokens[None], use_cache=False).logits
            if not bool(logits.isfinite().all()):
                raise TwoFourError(
                    "the dense model gives NaN or infinite logits on this text.",
                    hint="Check its weights, or run it in bfloat16 or float32.",
                )
            if labels:
                signal = _gradient(logits.detach(), tokens[None])
                for layer, value in send_back(logits, signal, again=probes > 0):
                    slopes[layer].append(value / (len(tokens) - 1))
            for probe in range(probes):
                signal = _probe(logits.detach(), random)
                for layer, value in send_back(logits, signal, again=probe + 1 < probes):
                    squares[layer].append(0.5 * value * value / len(tokens))
            del logits  # or what the layers would change waits beside that of the next window
            on_progress(number + 1, len(windows), f"window {number}")
    for layer in changed:
        if not all(map(math.isfinite, slopes[layer] + squares[layer])):
            raise TwoFourError(
                "the gradient at its output is NaN or infinite.",
                layer=layer.name,
                hint="Run the model in bfloat16 or float32: float16 overflows in some models.",
            )
    return {layer: LossParts(Mean.of(slopes[layer]), Mean.of(squares[layer])) for layer in changed}


def kept_share(firsts: Iterable[Mean]) -> float:
    """How much of the first-order parts to keep: what is left after noise as large as their errors.

    One share for all layers, from the mean square of value/error, which is 1 where there is noise only:
    0 there, and near 1 where most layers stand out. A share for each layer would be noise itself.
    """
    ratios = [(mean.value / mean.error) ** 2 for mean in firsts if mean.error > 0]
    total = sum(ratios)
    return max(0.0, 1 - len(ratios) / total) if total else 0.0


def _gradient(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of the summed loss on the tokens, at the logits."""
    signal = logits.float().softmax(-1)
    signal[:, -1] = 0  # what comes after the window is not known
    ahead = tokens[:, 1:, None]
    signal[:, :-1].scatter_add_(-1, ahead, signal.new_tensor(-1.0).expand(ahead.shape))
    return signal.to(logits.dtype)


def _probe(logits: Tensor, random: torch.Generator) -> Tensor:
    """Random signals at the logits whose covariance is that of log p's gradient."""
    p = logits.float().softmax(-1)
    signs = torch.randint(0, 2, p.shape, generator=random, device=p.device, dtype=torch.int8)
    rooted = p.sqrt().mul_(signs.mul_(2).sub_(1))
    return rooted.sub_(p.mul_(rooted.sum(-1, keepdim=True))).to(logits.dtype)


@contextmanager
def _backward_to_layers(model: nn.Module, changed: Mapping[Layer, Tensor]) -> Iterator[dict[Layer, Tensor]]:
    """In here a backward pass adds (gradient at its output)·(D·x) to the entry of every layer it reaches."""
    products: dict[Layer, Tensor] = {}

    def watch(layer: Layer, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if not out.requires_grad:
                # Nothing before it does: the graph begins here. A copy, for models that write into it.
                out = out.requires_grad_().clone()
            # Now, not in the backward passes: there are several, and it is the same for all.
            difference = _difference(module, changed[layer], args[0])

            def add(gradient: Tensor) -> None:
                products[layer] += (difference.float() * gradient.float()).sum()

            out.register_hook(add)
            return out

        return module.register_forward_hook(hook)

    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.enable_grad())
        for layer in changed:
            handle = watch(layer, model.get_submodule(layer.name))
            stack.callback(handle.remove)
        stack.callback(lambda: [parameter.requires_grad_() for parameter in frozen])
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield products


@torch.no_grad()
def _difference(module: nn.Module, new: Tensor, x: Tensor) -> Tensor:
    """What the module would give more for x with the new weight: D·x, whatever way the module multiplies."""
    weight = module.get_parameter("weight")
    instead = {"weight": new.to(weight.device) - weight}
    if (bias := getattr(module, "bias", None)) is not None:
        instead["bias"] = torch.zeros_like(bias)
    hooks, module._forward_hooks = module._forward_hooks, type(module._forward_hooks)()  # ours among them
    try:
        out: Tensor = functional_call(module, instead, (x,))
    finally:
        module._forward_hooks = hooks
    return out

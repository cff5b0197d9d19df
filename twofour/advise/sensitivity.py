"""How much pruning each layer alone would raise the loss of the dense model, for all layers in a few passes.

Pruning a layer changes its weight by D. To second order the divergence from the dense model's predictions is

    KL = ½ · E[(g·D)²],   g = gradient of log p(y), with the label y drawn from the model itself

and there is no first-order term, because at the dense model the divergence is smallest. (The loss on real
text has one, of either sign, that is small for a trained model and mostly noise.) g·D needs no gradient of a
weight: it is the gradient at the layer's output times D·x, summed over the tokens of a window. So one forward
and one backward pass over a window, and a product D·x beside every layer's own, give an unbiased estimate for
all layers at once: the time of about three forward passes, where pruning each layer in turn and looking takes
one for every layer.

Instead of a drawn label a *probe* is sent back through the model: random signs r, made v = √p·r - p·(√p·r).
It has the same covariance, diag(p) - p·pᵀ, without the long tails of a rare word. Every window and probe
gives one square, so the estimate's relative error is about √(2 / squares).

D is what the pruning method itself does to the layer, on inputs of the dense model (`prune_alone`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from twofour.calibrate.blocks import Block, run_blocks
from twofour.calibrate.examples import evaluating
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import sample_windows
from twofour.calibrate.written import write_windows
from twofour.errors import InputError, TwoFourError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed
from twofour.io.load import load_causal_lm
from twofour.io.prune_calibrated import FLOAT32_UP_TO, SELF, CalibrationOptions
from twofour.io.structure import checkpoint_layers
from twofour.progress import OnProgress, silent
from twofour.prune import Method, chosen_method, prune_weight
from twofour.select import Layer

#: The pruned weights may take this share of a GPU's free memory; otherwise they wait on the CPU.
RESIDENT_SHARE = 0.5

#: Probes for each window: the second costs a backward pass, the forward pass is there already.
PROBES = 2

#: Windows that the loss is looked at on, at most: with two probes, an error of about an eighth for a layer.
SCORED = 64

#: Tokens of a forward pass where a loss is measured: bounds the logits, this × vocabulary × 4 bytes.
LOSS_TOKENS = 2048


@dataclass(frozen=True)
class Pruned:
    """What a method makes of one layer, pruned alone on inputs of the dense model."""

    weight: Tensor
    relative_error: float  # of the weights
    output_error: float | None  # of the outputs; None: the method saw no inputs
    tokens: int | None  # that reached the layer


@dataclass(frozen=True)
class LayerSensitivity:
    """Nats a token that pruning this layer alone adds, as estimated, and the estimate's standard error."""

    loss_increase: float
    standard_error: float
    relative_error: float
    output_error: float | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Sensitivity:
    """What `twofour sensitivity` says."""

    model: str
    method: str
    calib: str
    samples: int  # windows that the method saw
    scored: int  # others, that the loss was looked at on
    seqlen: int
    seed: int
    probes: int
    dense_loss: float  # nats a token, on the windows scored
    seconds: float
    layers: dict[str, LayerSensitivity]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def prune_alone(
    model: nn.Module,
    layers: Sequence[Layer],
    windows: Tensor,
    method: Method,
    on_progress: OnProgress = silent,
) -> dict[Layer, Pruned]:
    """Every layer pruned as if it were the only one; the model stays as it is."""
    device = next(model.parameters()).device
    nbytes = sum(model.get_parameter(f"{layer.name}.weight").nbytes for layer in layers)
    stays = device.type != "cuda" or nbytes < RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
    found: dict[Layer, Pruned] = {}

    def take(layer: Layer, weight: Tensor, gram: Any = None) -> None:
        new, lost = prune_weight(layer, weight.detach(), method, gram)
        found[layer] = Pruned(
            new if stays else new.cpu(),
            lost["relative_error"],
            lost.get("output_error"),
            gram.tokens if gram is not None else None,
        )

    def look(block: Block) -> None:
        for layer in block.layers:
            name = layer.name.removeprefix(f"{block.name}.")
            take(layer, block.module.get_parameter(f"{name}.weight"), block.grams.pop(layer))

    if method.needs_inputs:
        # As `prune` does it, but for tuning whole blocks, which says nothing about a layer.
        run_blocks(*(model, layers, windows.to(device), look), device=device, on_progress=on_progress)
    else:
        with torch.no_grad():
            for layer in layers:
                take(layer, model.get_parameter(f"{layer.name}.weight"))
    return found


def estimate(
    model: nn.Module,
    pruned: Mapping[Layer, Pruned],
    windows: Tensor,
    *,
    probes: int = PROBES,
    seed: int = 0,
    on_progress: OnProgress = silent,
) -> dict[Layer, LayerSensitivity]:
    """The loss that each of the pruned layers alone would add on the windows [count, length]."""
    device = next(model.parameters()).device
    random = torch.Generator(device).manual_seed(seed)
    squares: dict[Layer, list[float]] = {layer: [] for layer in pruned}
    with _backward_to_layers(model, pruned) as products:
        for number, tokens in enumerate(windows.to(device)):
            # One window at a time: an expert's tokens do not say which window they came from.
            logits = model(tokens[None], use_cache=False).logits
            if not bool(logits.isfinite().all()):
                raise TwoFourError(
                    "the dense model gives NaN or infinite logits on this text.",
                    hint="Check its weights, or run it in bfloat16 or float32.",
                )
            for probe in range(probes):
                for layer in pruned:
                    products[layer] = torch.zeros((), device=device)
                signal = _probe(logits.detach(), random)
                torch.autograd.backward(logits, signal, retain_graph=probe + 1 < probes)
                gathered = torch.stack([products[layer] for layer in pruned]).double().cpu()
                for layer, value in zip(pruned, gathered.tolist(), strict=True):
                    squares[layer].append(0.5 * value * value / len(tokens))
            on_progress(number + 1, len(windows), f"window {number}")
    found: dict[Layer, LayerSensitivity] = {}
    for layer, values in squares.items():
        if not all(map(math.isfinite, values)):
            raise TwoFourError(
                "the gradient at its output is NaN or infinite.",
                layer=layer.name,
                hint="Run the model in bfloat16 or float32: float16 overflows in some models.",
            )
        spread, mean = torch.std_mean(torch.tensor(values, dtype=torch.float64), correction=0)
        own = pruned[layer]
        found[layer] = LayerSensitivity(
            float(mean),
            float(spread) / math.sqrt(max(len(values) - 1, 1)),
            own.relative_error,
            own.output_error,
            own.tokens,
        )
    return found


def _probe(logits: Tensor, random: torch.Generator) -> Tensor:
    """Random signals at the logits whose covariance is that of log p's gradient."""
    p = logits.float().softmax(-1)
    signs = torch.randint(0, 2, p.shape, generator=random, device=p.device, dtype=torch.int8)
    rooted = p.sqrt().mul_(signs.mul_(2).sub_(1))
    return rooted.sub_(p.mul_(rooted.sum(-1, keepdim=True))).to(logits.dtype)


@contextmanager
def _backward_to_layers(model: nn.Module, pruned: Mapping[Layer, Pruned]) -> Iterator[dict[Layer, Tensor]]:
    """In here a backward pass adds (gradient at its output)·(D·x) to the entry of every layer it reaches."""
    products: dict[Layer, Tensor] = {}

    def watch(layer: Layer, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if not out.requires_grad:
                # Nothing before it does: the graph begins here. A copy, for models that write into it.
                out = out.requires_grad_().clone()
            x = args[0].detach()

            def add(gradient: Tensor) -> None:
                with torch.no_grad():
                    weight = module.get_parameter("weight")
                    instead = {"weight": pruned[layer].weight.to(weight.device) - weight}
                    if (bias := getattr(module, "bias", None)) is not None:
                        instead["bias"] = torch.zeros_like(bias)
                    with _unhooked(module):
                        change = functional_call(module, instead, (x,))
                    products[layer] += (change.float() * gradient.float()).sum()

            out.register_hook(add)
            return out

        return module.register_forward_hook(hook)

    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.enable_grad())
        for layer in pruned:
            handle = watch(layer, model.get_submodule(layer.name))
            stack.callback(handle.remove)
        stack.callback(lambda: [parameter.requires_grad_() for parameter in frozen])
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield products


@contextmanager
def _unhooked(module: nn.Module) -> Iterator[None]:
    """The module's hooks, ours among them, are not called in here."""
    hooks, module._forward_hooks = module._forward_hooks, type(module._forward_hooks)()
    try:
        yield
    finally:
        module._forward_hooks = hooks


@torch.no_grad()
def loss_with(model: nn.Module, pruned: Mapping[Layer, Pruned], windows: Tensor) -> float:
    """Nats a token on the windows with all of the pruned layers in place; the model is as before after it."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with _in_place(model, pruned), evaluating(model):
        for tokens in windows.to(device).split(max(1, LOSS_TOKENS // windows.shape[1])):
            logits = model(tokens, use_cache=False).logits[:, :-1].float()
            wanted = tokens[:, 1:]
            total += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
            count += wanted.numel()
    return total / count


@contextmanager
def _in_place(model: nn.Module, pruned: Mapping[Layer, Pruned]) -> Iterator[None]:
    before: dict[nn.Parameter, Tensor] = {}
    try:
        for layer, new in pruned.items():
            parameter = model.get_parameter(f"{layer.name}.weight")
            before[parameter] = parameter.data
            parameter.data = new.weight.to(parameter.device)  # swapped, not copied: the old one waits
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data


class Measured:
    """A dense checkpoint with its layers pruned one by one, and the text to look at losses on."""

    def __init__(
        self,
        source: str | Path,
        calibration: CalibrationOptions,
        method: str | Method | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        *,
        on_progress: OnProgress = silent,
    ) -> None:
        start = time.perf_counter()
        chosen = chosen_method(method, has_text=True)
        checkpoint = Checkpoint(source)
        if is_packed(checkpoint.config):
            raise InputError(
                f"{source} is packed already.", hint="Give the dense checkpoint that it was made from."
            )
        layers = list(checkpoint_layers(checkpoint, include, exclude).by_tensor.values())
        wide = 2 * checkpoint.nbytes <= FLOAT32_UP_TO
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        self.model, tokenizer = load_causal_lm(source, device, torch.float32 if wide else "auto")
        longest = self.model.config.get_text_config().max_position_embeddings
        length = min(calibration.seqlen or 2048, longest)
        if length < 2 or calibration.samples < 1:
            raise InputError(f"{calibration.samples} windows of {length} tokens say nothing about a loss.")
        scored = min(calibration.samples, SCORED)
        samples, seed = calibration.samples, calibration.seed

        # Other windows of the same text: on those that the method saw, it looks better than it is.
        if str(calibration.calib) == SELF:
            both = write_windows(self.model, tokenizer, samples + scored, length, seed, on_progress)
            windows, self.windows = both[:samples], both[samples:]
        else:
            documents = read_documents(calibration.calib)
            windows = sample_windows(tokenizer, documents, samples, length, seed)
            self.windows = sample_windows(tokenizer, documents, scored, length, seed + 1)
        try:
            self.pruned = prune_alone(self.model, layers, windows, chosen, on_progress)
            self.dense_loss = loss_with(self.model, {}, self.windows)
            found = estimate(self.model, self.pruned, self.windows, seed=seed, on_progress=on_progress)
        except torch.OutOfMemoryError as error:
            raise TwoFourError(
                "the model and what a backward pass keeps do not fit into the GPU's memory.",
                hint="Give a smaller --seqlen.",
            ) from error
        self.sensitivity = Sensitivity(
            model=str(source),
            method=chosen.name,
            calib=str(calibration.calib),
            samples=samples,
            scored=scored,
            seqlen=length,
            seed=seed,
            probes=PROBES,
            dense_loss=self.dense_loss,
            seconds=round(time.perf_counter() - start, 1),
            layers={layer.name: result for layer, result in found.items()},
        )

    def loss_increase(self, names: Collection[str]) -> float:
        """Nats a token that these layers add together, each pruned as it was alone: measured, not told."""
        chosen = set(names)
        together = {layer: new for layer, new in self.pruned.items() if layer.name in chosen}
        return loss_with(self.model, together, self.windows) - self.dense_loss


def sensitivity(
    source: str | Path,
    calibration: CalibrationOptions,
    method: str | Method | None = "sparsegpt",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    on_progress: OnProgress = silent,
) -> Sensitivity:
    """How much pruning each layer of a checkpoint alone raises its loss on text."""
    return Measured(source, calibration, method, include, exclude, on_progress=on_progress).sensitivity

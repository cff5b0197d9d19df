"""How much pruning each layer alone would raise the loss of the dense model.

Every layer is pruned as the method itself would do it, on inputs of the dense model (`prune_alone`), and put
back. What that change of weights does to the loss is then told for all layers at once from a few passes over
other windows of the text: loss_parts.py has the reasoning. `Measured` keeps the pruned weights, so that the
loss of several layers together can be looked at too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.advise.loss_parts import PROBES, LossParts, kept_share, loss_parts
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

#: Windows that the loss is looked at on, at most: with two probes, a divergence is right to an eighth.
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
    """Nats a token that pruning this layer alone adds, as estimated, and the estimate's standard error.

    Of two parts, `first_order` (its share that is no noise, of either sign) and `divergence`.
    """

    loss_increase: float
    standard_error: float
    first_order: float
    divergence: float
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
    first_order_kept: (
        float  # the share of what was seen on this text; 0: it was noise, or the model's own text
    )
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


def weigh(
    parts: Mapping[Layer, LossParts], pruned: Mapping[Layer, Pruned], kept: float
) -> dict[Layer, LayerSensitivity]:
    """The parts added up, with this share of the first-order ones."""
    found = {}
    for layer, own in parts.items():
        first, second = own.first_order, own.divergence
        found[layer] = LayerSensitivity(
            kept * first.value + second.value,
            math.hypot(kept * first.error, second.error),
            kept * first.value,
            second.value,
            pruned[layer].relative_error,
            pruned[layer].output_error,
            pruned[layer].tokens,
        )
    return found


@torch.no_grad()
def loss_with(model: nn.Module, pruned: Mapping[Layer, Pruned], windows: Tensor) -> float:
    """Nats a token on the windows with all of the pruned layers in place; the model is as before after it."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with in_place(model, pruned), evaluating(model):
        for tokens in windows.to(device).split(max(1, LOSS_TOKENS // windows.shape[1])):
            logits = model(tokens, use_cache=False).logits[:, :-1].float()
            wanted = tokens[:, 1:]
            total += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
            count += wanted.numel()
    return total / count


@contextmanager
def in_place(model: nn.Module, pruned: Mapping[Layer, Pruned]) -> Iterator[None]:
    """In here the pruned weights are the model's."""
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
    """A dense model with its layers pruned one by one, and the text to look at losses on.

    The method sees the windows `seen`, losses are looked at on `scored`: on those that a method saw, it looks
    better than it is. `name` and `calib` are what the document calls the model and the text.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        seen: Tensor,
        scored: Tensor,
        method: Method,
        *,
        name: str,
        calib: str,
        seed: int = 0,
        started: float | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        start = time.perf_counter()
        self.model, self.windows = model, scored
        try:
            self.pruned = prune_alone(model, layers, seen, method, on_progress)
            pruning = time.perf_counter() - start
            self.dense_loss = loss_with(model, {}, scored)
            estimating = time.perf_counter()
            #: As they came out, before noise is taken from the first-order ones.
            changed = {layer: new.weight for layer, new in self.pruned.items()}
            own_text = calib == SELF
            self.parts = loss_parts(
                model, changed, scored, labels=not own_text, seed=seed, on_progress=on_progress
            )
        except torch.OutOfMemoryError as error:
            raise TwoFourError(
                "the model and what a backward pass keeps do not fit into the GPU's memory.",
                hint="Give a smaller --seqlen.",
            ) from error
        #: Seconds; both end with figures on the CPU, so a GPU has done its part.
        self.took = {"pruning": pruning, "estimating": time.perf_counter() - estimating}
        kept = kept_share(parts.first_order for parts in self.parts.values())
        self.sensitivity = Sensitivity(
            model=name,
            method=method.name,
            calib=calib,
            samples=len(seen),
            scored=len(scored),
            seqlen=scored.shape[1],
            seed=seed,
            probes=PROBES,
            first_order_kept=kept,
            dense_loss=self.dense_loss,
            seconds=round(time.perf_counter() - (started or start), 1),  # a checkpoint's loading with it
            layers={layer.name: own for layer, own in weigh(self.parts, self.pruned, kept).items()},
        )

    def loss_increase(self, names: Collection[str]) -> float:
        """Nats a token that these layers add together, each pruned as it was alone: measured, not told."""
        chosen = set(names)
        together = {layer: new for layer, new in self.pruned.items() if layer.name in chosen}
        return loss_with(self.model, together, self.windows) - self.dense_loss


def measure(
    source: str | Path,
    calibration: CalibrationOptions,
    method: str | Method | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    device: str | None = None,
    on_progress: OnProgress = silent,
) -> Measured:
    """A dense checkpoint, loaded and measured on text. On a GPU, if there is one, unless told otherwise."""
    start = time.perf_counter()
    chosen = chosen_method(method, has_text=True)
    checkpoint = Checkpoint(source)
    if is_packed(checkpoint.config):
        raise InputError(
            f"{source} is packed already.", hint="Give the dense checkpoint that it was made from."
        )
    layers = list(checkpoint_layers(checkpoint, include, exclude).by_tensor.values())
    wide = 2 * checkpoint.nbytes <= FLOAT32_UP_TO
    device = device or (f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_causal_lm(source, device, torch.float32 if wide else "auto")
    samples, seed, length = calibration.samples, calibration.seed, calibration.length_for(model)
    scored = min(samples, SCORED)
    if str(calibration.calib) == SELF:
        both = write_windows(model, tokenizer, samples + scored, length, seed, on_progress)
        seen, others = both[:samples], both[samples:]
    else:
        documents = read_documents(calibration.calib)
        seen = sample_windows(tokenizer, documents, samples, length, seed, on_progress)
        others = sample_windows(tokenizer, documents, scored, length, seed + 1, on_progress)
    return Measured(
        *(model, layers, seen, others, chosen),
        name=str(source),
        calib=str(calibration.calib),
        seed=seed,
        started=start,
        on_progress=on_progress,
    )


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
    return measure(source, calibration, method, include, exclude, on_progress=on_progress).sensitivity

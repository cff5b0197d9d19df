"""What `advise` says in words: the verdict, the easier ways beside 2:4, and what the figures rest on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from twofour.advise.gpus import Gpu
from twofour.advise.layers import COLUMN_MULTIPLE, ROW_MULTIPLE, Network
from twofour.advise.products import SMALLEST
from twofour.advise.schemes import SCHEMES
from twofour.advise.steps import Step, TimeModel

if TYPE_CHECKING:
    from twofour.advise.advice import Form, LayerAdvice

#: A gain below this is within what two runs of the same thing differ by.
PAYS = 1.03


def what_it_rests_on(
    network: Network, gpu: Gpu, times: TimeModel, prefill: Step, decode: Step, fused: bool
) -> list[str]:
    notes = []
    if not gpu.hopper:
        notes.append(
            "Our kernels for many tokens, and those that multiply 8 bits with 8 bits, are for Hopper. "
            "Elsewhere 2:4 needs cuSPARSELt for many tokens (10/16 of the bytes), which was "
            "not measured there, and 8 and 4 bits are decoded to 16 first: expect less."
        )
    notes.append(
        "Dense fp8 and int4 are PyTorch's kernels: _scaled_mm, tokens rounded first; _weight_int4pack_mm, "
        "measured up to 256 tokens. Above 512 a dense int4 weight is told as decoded to 16 bit before the "
        "product, which was not measured. Nor were kernels of other libraries."
    )
    scaled = [s.name for s in SCHEMES if s.name not in times.curves and gpu.rate(s.arithmetic) is not None]
    if scaled:
        notes.append(
            f"Measured nowhere: {', '.join(scaled)}. Told from 16 bit by the bytes and the data sheet's "
            "ratios, without the time to round activations: expect less."
        )
    if fused:
        notes.append(
            "Both sides after twofour.fuse_: dense with its norms and its rotary embedding as one kernel "
            "each, 2:4 with its products fused as well."
        )
    if network.decoder is None:
        notes.append("The config does not say what attention is like: only products are counted.")
    odd = [g.name for g in network.groups if g.eligible and g.is_product and any(g.padding)]
    if odd:
        notes.append(
            f"{', '.join(odd[:3])}{' …' if len(odd) > 3 else ''}: rows are no multiple of {ROW_MULTIPLE} or "
            f"columns none of {COLUMN_MULTIPLE}, so slower kernels than those measured run them: expect less."
        )
    for name, step in (("Prefill", prefill), ("Decode", decode)):
        if step.host_bound:
            notes.append(
                f"{name} is bound by Python, not by the GPU: without CUDA graphs or torch.compile 2:4 by "
                "itself gains nothing there, and fusing only what it saves in launches."
            )
    if network.untimed:
        notes.append(
            f"{network.untimed / network.parameters:.0%} of the weights are in modules whose time is not "
            "known (convolutions, experts): they count in the memory alone."
        )
    return notes


def verdict_of(forms: Mapping[str, Form], layers: tuple[LayerAdvice, ...], batch: int) -> str:
    """One sentence: where 2:4 pays, where not, which layers are to blame."""
    sparse, dense = forms["2:4"], forms["dense"]
    phases = {"prefill": sparse.prefill_x, f"decode at batch {batch}": sparse.decode_x}
    pays = [f"{name} {ratio:.2f}×" for name, ratio in phases.items() if ratio >= PAYS]
    not_ = [f"{name} {ratio:.2f}×" for name, ratio in phases.items() if ratio < PAYS]
    parts = []
    small, guessed = _too_small(layers), _guessed(layers)
    all_guessed = set(guessed) == {_shape(layer) for layer in layers if layer.eligible and layer.prefill}
    if pays:
        parts.append(("Perhaps worth it for " if all_guessed else "Worth it for ") + " and ".join(pays))
        if not_:
            parts.append("not for " + not_[0])
    else:
        parts.append("Not worth it for speed: " + ", ".join(not_))
    if small:
        parts.append(f"the {', '.join(small[:3])} layers are too small to gain in either")
    guessed = [shape for shape in guessed if shape not in small]
    if guessed:
        parts.append(f"the {', '.join(guessed[:3])} layers are smaller than any measured, their gain a guess")
    saved = f"{dense.weight_bytes / 1e9:.3g} to {sparse.weight_bytes / 1e9:.3g} GB"
    parts.append(f"weights go from {saved}")
    if dense.fits is False and sparse.fits:
        parts.append("only the sparse model fits into the memory")
    elif sparse.fits is False:
        parts.append("neither fits into the memory of one GPU")
    return "; ".join(parts) + "."


def cannot_tell(network: Network, forms: Mapping[str, Form]) -> str:
    dense, sparse = (forms[name].weight_bytes / 1e9 for name in ("dense", "2:4"))
    return (
        f"Cannot tell the speed: {network.untimed / network.parameters:.0%} of the weights are in modules "
        f"whose time is not known; weights go from {dense:.3g} to {sparse:.3g} GB."
    )


def _guessed(layers: tuple[LayerAdvice, ...]) -> list[str]:
    """Shapes smaller than any that was measured."""
    small = [layer for layer in layers if layer.rows * layer.columns < SMALLEST]
    return list(dict.fromkeys(_shape(layer) for layer in small if layer.eligible and layer.prefill))


def _shape(layer: LayerAdvice) -> str:
    return f"{layer.rows}×{layer.columns}"


def _too_small(layers: tuple[LayerAdvice, ...]) -> list[str]:
    """Shapes that gain in neither phase."""
    shapes = []
    for layer in layers:
        if layer.eligible and layer.prefill and layer.decode:
            gains = [phase.us["dense"] / phase.us["2:4"] for phase in (layer.prefill, layer.decode)]
            if max(gains) < PAYS:
                shapes.append(_shape(layer))
    return list(dict.fromkeys(shapes))


def what_instead(forms: Mapping[str, Form]) -> str:
    """The easier ways beside it, and 2:4 on top of them."""
    sparse = forms["2:4"]

    def figures(form: Form) -> str:
        return f"{form.prefill_x:.2f}× in prefill, {form.decode_x:.2f}× in decode"

    parts = []
    for bits in ("fp8", "int4"):
        dense, both = forms.get(f"dense {bits}"), forms.get(f"2:4 {bits}")
        if dense is None or both is None:
            continue
        gap = dense.request_x / sparse.request_x
        place = "ahead of" if gap >= PAYS else "behind" if gap <= 1 / PAYS else "level with"
        worth = both.request_x >= PAYS * dense.request_x
        text = f"dense {bits} is predicted {place} 16-bit 2:4 ({figures(dense)})"
        text += f", 2:4 on top of it {'gives more' if worth else 'adds little'} ({figures(both)})"
        if worth and both.request_x < PAYS * sparse.request_x:
            text += " but no more than in 16 bit"
        parts.append(text)
    # Whose kernels, as others may be faster.
    return f"With PyTorch's kernels and over a whole request, {'; '.join(parts)}." if parts else ""

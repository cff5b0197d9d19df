"""The CUDA source of a Hopper kernel: constants, and the one instruction whose operands depend on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twofour.kernels import nvrtc
from twofour.kernels.hopper import Config, Decode, Decode4, Prefill, Prefill8, why_not
from twofour.kernels.nvrtc import cuda_text

ARCHITECTURE = "sm_90a"

#: Activations of a gated product, as the kernels number them.
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}

#: Types as the kernels number them, as the instruction names sums and operands, and the sums' registers.
_TYPES = {
    torch.bfloat16: (0, "f32.bf16.bf16", "f"),
    torch.float16: (0, "f32.f16.f16", "f"),
    torch.float8_e4m3fn: (1, "f32.e4m3.e4m3", "f"),
    torch.int8: (2, "s32.s8.s8", "r"),
}


def source(
    config: Config,
    dtype: torch.dtype,
    activation: str | None = None,
    codes: torch.dtype | None = None,
    ordered: bool = False,
) -> str:
    """The CUDA source with its constants, and the one instruction whose operands depend on them.

    `dtype` is that of the output, and of everything where there are no codes. `ordered`: the positions lie as
    cuSPARSELt wants them (cuda/positions_sm90.cuh).
    """
    number, kind, register = _TYPES[codes or dtype]
    at_once = config.at_once if isinstance(config, Prefill8) else config.tokens
    count = at_once // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{register}"((d)[{i}])' for i in range(count))
    # Add to the sums; leave the signs of both operands, and the order of their elements, as they are.
    flags = {0: "1, 1, 1, 0, 0", 1: "1, 1, 1", 2: "1"}[number]
    name = f"wgmma.mma_async.sp.sync.aligned.m64n{at_once}k{64 if number else 32}.{kind}"
    if isinstance(config, Decode4):  # W from registers; `add` to the sums, or begin with them
        places = [f"%{count + i}" for i in range(8)]
        instruction = f"{name} {{{sums}}}, {{{', '.join(places[:4])}}}, {', '.join(places[4:])}, 1, 1, 0;"
        macro = "WGMMA(d, a, b, e, selector, add)"
        inputs = '"r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"(e), "n"(selector), "n"(add)'
    else:
        places = [f"%{count + i}" for i in range(4)]
        instruction = f"{name} {{{sums}}}, {', '.join(places)}, {flags};"
        macro = "WGMMA(d, a, b, e, selector)"
        inputs = '"l"(a), "l"(b), "r"(e), "n"(selector)'
    constants = {
        "TOKENS": config.tokens,
        "WARPGROUPS": config.warpgroups,
        "FP16": int(dtype == torch.float16),
        "GATED": ACTIVATIONS[activation],
        "CODES": number,
        "ORDERED": int(ordered),
        "COLUMNS": 8 * config.position_bytes,
    }
    if isinstance(config, Prefill):
        constants["LEAVING"] = config.leaving
    if isinstance(config, Decode):
        constants |= {"SPLIT": config.split, "STEP": config.step, "STAGES": config.stages}
        constants |= {"HEIGHT": config.height}
    elif isinstance(config, Prefill8):
        constants |= {"CLUSTER": config.cluster, "STAGES": config.stages, "E_STAGES": config.e_stages}
        constants |= {"AT_ONCE": at_once}
    else:
        constants |= {
            "CLUSTER": config.cluster,
            "A_STAGES": config.a_stages,
            "B_STAGES": config.b_stages,
            "E_STAGES": config.e_stages,
        }
    shared = ["few_sm90.cuh" if isinstance(config, Decode) else "tiles_sm90.cuh"]
    if isinstance(config, Decode4):
        constants |= {"TEAMS": config.teams, "RESIDENT": config.resident, "X_STAGES": config.x_stages}
        shared.append("numbers.cuh")
    elif not isinstance(config, Prefill8):
        shared.append("positions_sm90.cuh")
    return (
        "".join(f"#define {name} {value}\n" for name, value in constants.items())
        + f'#define {macro} asm volatile("{instruction}" : {outputs} : {inputs})\n'
        + cuda_text("common.cuh", "sm90.cuh", *shared, f"{config.source}_sm90.cu")
    )


def compile_all(
    configs: Sequence[Config],
    dtype: torch.dtype,
    device: torch.device,
    activation: str | None = None,
    codes: torch.dtype | None = None,
    ordered: bool = False,
) -> None:
    """Compile what is not in the cache yet."""
    if why_not(device, dtype, 128, 128) is None:
        sources = (source(c, dtype, activation, codes, ordered) for c in configs)
        nvrtc.compile_sources(sources, ARCHITECTURE)

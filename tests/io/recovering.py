"""What the tests of `recover` share."""

import torch
from safetensors.torch import load_file

from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

SHORT = {"tokens": 12 * 4 * 16, "batch": 4, "seqlen": 16, "save_every": 2, "eval_every": 3, "lr": 3e-3}


def flags(**changed):
    return [
        x for name, value in {**SHORT, **changed}.items() for x in (f"--{name.replace('_', '-')}", str(value))
    ]


def tensors(directory):
    return load_file(directory / "model.safetensors")


def require_same(one, other):
    one, other = tensors(one), tensors(other)
    assert set(one) == set(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def quantized(source, out, scheme):
    quantize_checkpoint(source, out, QuantizeOptions(scheme, 32 if scheme == "int4" else None, "nearest"))
    return out

"""The Triton kernel of the loss: in Triton's interpreter, and compiled for GPUs that are not here."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twofour.recover import losses

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (torch for CUDA brings it)"
)

#: Arguments: the capability, the student's dtype, the teacher's or "none", whether there is a temperature.
COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from twofour.recover import fused_loss

capability, dtype, teacher, tempered = sys.argv[1:]

def compiled(kernel, types, fixed):
    types = {**types, **dict.fromkeys(fixed, "constexpr")}
    source = ASTSource(kernel, types, constexprs=fixed)
    options = {"num_warps": fused_loss.WARPS}
    found = triton.compile(source, target=GPUTarget("cuda", int(capability), 32), options=options)
    assert len(found.asm["cubin"]) > 1000

types = {"losses": "*fp32", "gradient": "*" + dtype, "logits": "*" + dtype, "teacher": "*" + teacher}
types |= {"targets": "*i64", "each_task": "*fp32", "each_kl": "fp32", "temperature": "fp32"}
types |= {"stride": "i32", "teacher_stride": "i32"}
fixed = {"vocabulary": 32003, "TASK": True, "TEMPERED": tempered == "True", "NONE": -100}
fixed["BLOCK"] = fused_loss.BLOCK
compiled(fused_loss._rows, types, fixed if teacher != "none" else {**fixed, "teacher": None})
types = {"values": "*" + dtype, "by": "*fp32", "count": "i64"}
compiled(fused_loss._scale, types, {"BLOCK": fused_loss.BLOCK})
print("compiled")
"""


def run(*arguments, **environment):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.strip()


@needs_triton
def test_agrees_with_the_plain_loss():
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    cases = Path(__file__).with_name("interpreted_loss.py")
    found = run("-m", "pytest", cases, "-p", "no:cacheprovider", "-W", "ignore", TRITON_INTERPRET="1")
    assert " passed" in found


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "teacher", "tempered"),
    [("bf16", "bf16", False), ("bf16", "fp32", True), ("fp32", "none", False)],
)
def test_compiles(capability, dtype, teacher, tempered, tmp_path):
    found = run("-c", COMPILED, capability, dtype, teacher, tempered, TRITON_CACHE_DIR=str(tmp_path))
    assert found == "compiled"


def test_where_triton_cannot_run_it_says_so_once():
    losses._kernel_works.cache_clear()
    with pytest.warns(UserWarning, match="without its Triton kernel"):
        assert not losses._kernel_works(torch.device("cpu"))
    assert not losses._kernel_works(torch.device("cpu"))

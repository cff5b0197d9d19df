"""The Triton sweep against the plain one, in Triton's interpreter; compiled for GPUs that are not here."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (torch for CUDA brings it)"
)

#: In a process of its own: Triton decides when it is imported whether it interprets.
INTERPRETED = """
import torch
from twofour.prune import sweep_triton
from twofour.prune.sparsegpt import factors, sweep_panel

random = torch.Generator().manual_seed(0)
for rows, width, columns in ((11, 64, 96), (3, 20, 20), (8, 4, 8)):
    for jointly in (True, False):
        x = torch.randn(200, columns, generator=random) @ torch.randn(columns, columns, generator=random)
        gram = x.t() @ x / 200
        factor, removal = factors(gram, torch.zeros(columns, dtype=torch.bool), 0.01, jointly, None)
        weight = torch.randn(rows, columns, generator=random)
        weight[0, -8:] = 0.0  # every choice costs the same
        panel = slice(columns - width, columns)  # not at the start: pointers and strides are a view's
        plain, ours = weight.clone(), weight.clone()
        given = factor[panel, panel], removal[panel.start // 4 :], jointly
        expected = sweep_panel(plain[:, panel], *given)
        errors = sweep_triton.sweep_panel(ours[:, panel], *given)
        assert torch.equal(plain == 0, ours == 0)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(errors, expected, rtol=1e-4, atol=1e-5)
        assert (ours[:, panel] != weight[:, panel]).any(0).all()  # every column was worked on
        assert torch.equal(ours[:, : panel.start], weight[:, : panel.start])
print("agree")
"""

COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from twofour.prune import sweep_triton

pointers = dict.fromkeys(("weight", "errors", "factor", "removal"), "*fp32")
numbers = dict.fromkeys(("rows", "stride", "factor_stride"), "i32")
fixed = {"width": 128, "WIDTH": 128, "ROWS": sweep_triton.ROWS, "JOINTLY": sys.argv[2] == "True"}
source = ASTSource(
    sweep_triton._sweep, {**pointers, **numbers, **dict.fromkeys(fixed, "constexpr")}, constexprs=fixed
)
compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 4})
assert len(compiled.asm["cubin"]) > 1000
print("compiled")
"""


def run(code, *arguments, **environment):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_agrees_with_the_plain_sweep():
    assert run(INTERPRETED, TRITON_INTERPRET="1") == "agree"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("jointly", [True, False])
def test_compiles(capability, jointly, tmp_path):
    assert run(COMPILED, capability, jointly, TRITON_CACHE_DIR=str(tmp_path)) == "compiled"

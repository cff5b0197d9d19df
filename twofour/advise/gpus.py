"""The GPUs that `advise` knows, as their data sheets describe them.

Throughputs are without the factor that data sheets print for sparsity, in TFLOP/s (TOP/s for int8), with
32-bit sums: the GeForce cards halve their rate for these, and libraries for language models use them. They
are ceilings for the time model in products.py, which knows what share of them was reached on an H200.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from twofour.errors import InputError


@dataclass(frozen=True)
class Gpu:
    """Ceilings of one GPU. A rate of None: its Tensor Cores do not have the type."""

    name: str
    bandwidth_gb_s: float
    memory_gb: float | None
    multiprocessors: int
    l2_mb: float | None
    tflops_16bit: float
    tflops_fp8: float | None
    tops_int8: float | None
    aliases: tuple[str, ...] = ()
    hopper: bool = False  # our kernels for many tokens were written for it
    from_measurement: bool = False

    def rate(self, arithmetic: str) -> float | None:
        """TFLOP/s of a dense product in "16bit", "fp8" or "int8"; 2:4 doubles each on every GPU here."""
        known = {"16bit": self.tflops_16bit, "fp8": self.tflops_fp8, "int8": self.tops_int8}
        return known[arithmetic]

    @property
    def ridge(self) -> float:
        """Operations per byte above which a dense 16-bit product is bound by arithmetic, at the ceilings."""
        return self.tflops_16bit * 1e3 / self.bandwidth_gb_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


GPUS: tuple[Gpu, ...] = (
    Gpu("A100 40GB SXM", 1555, 40, 108, 40, 312, None, 624, ("A100-SXM4-40GB", "A100 40GB")),
    Gpu("A100 40GB PCIe", 1555, 40, 108, 40, 312, None, 624, ("A100-PCIE-40GB",)),
    Gpu("A100 80GB SXM", 2039, 80, 108, 40, 312, None, 624, ("A100-SXM4-80GB", "A100 80GB", "A100")),
    Gpu("A100 80GB PCIe", 1935, 80, 108, 40, 312, None, 624),
    Gpu("A10", 600, 24, 72, 6, 125, None, 250),
    Gpu("L4", 300, 24, 58, 48, 121, 242, 242),
    Gpu("L40S", 864, 48, 142, 96, 362, 733, 733),
    Gpu("RTX 3090", 936, 24, 82, 6, 71, None, 284, ("GeForce RTX 3090",)),
    Gpu("RTX 4090", 1008, 24, 128, 72, 165.2, 330.3, 660.6, ("GeForce RTX 4090",)),
    Gpu("RTX 5090", 1792, 32, 170, 96, 209.5, 419, 838, ("GeForce RTX 5090",)),
    Gpu("H100 PCIe", 2039, 80, 114, 50, 756, 1513, 1513, hopper=True),
    Gpu("H100 SXM", 3350, 80, 132, 50, 989, 1979, 1979, ("H100 80GB HBM3", "H100"), hopper=True),
    Gpu("H200", 4800, 141, 132, 50, 989, 1979, 1979, ("H200 SXM",), hopper=True),
    Gpu("B200", 8000, 180, 148, 126, 2250, 4500, 4500),
)

#: Whose efficiencies are shipped.
MEASURED = "H200"


def find_gpu(name: str) -> Gpu:
    """The GPU of a name, as data sheets, people or the driver write it.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name
    'H100 SXM'
    >>> find_gpu("rtx4090").bandwidth_gb_s
    1008
    """
    wanted = _plain(name)
    for gpu in GPUS:
        if wanted in {_plain(known) for known in (gpu.name, *gpu.aliases)}:
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise InputError(
        f"the data sheet of the GPU {name!r} is not known.",
        hint=f"Known are: {known}. For another one: twofour bench --shapes 8B --json > rows.json there, "
        "then twofour advise MODEL --measured rows.json.",
    )


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in ("nvidia", "geforce"))


def this_machine() -> str | None:
    """The first GPU's name, asked of the driver's own command: importing torch for it would take seconds."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        ran = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
    return names[0] if ran.returncode == 0 and names else None

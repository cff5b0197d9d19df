"""The data sheets: consistent with each other, and found by any name people use."""

import itertools

import pytest

from twofour.advise.gpus import GPUS, find_gpu, this_machine
from twofour.errors import InputError


def test_no_two_gpus_share_a_name():
    names = [name.lower() for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_figures_of_one_gpu_fit_together(gpu):
    # 8 bits are twice as fast as 16; int8 four times on GeForce cards, which halve 16 bit with 32-bit sums.
    assert gpu.tops_int8 / gpu.tflops_16bit == pytest.approx(4 if "RTX" in gpu.name else 2, rel=0.02)
    if gpu.tflops_fp8 is not None:
        assert gpu.tflops_fp8 / gpu.tflops_16bit == pytest.approx(2, rel=0.02)
    # Operations of one multiprocessor in one cycle are 512 to 8192 at the 1 to 3 GHz that GPUs run at.
    cycles = gpu.tflops_16bit * 1e12 / gpu.multiprocessors
    assert any(1.0e9 < cycles / operations < 3.0e9 for operations in (512, 1024, 2048, 4096, 8192))
    assert 1 <= gpu.bandwidth_gb_s / gpu.memory_gb <= 60
    assert 50 < gpu.ridge < 450


def test_newer_ones_are_faster():
    in_order = [find_gpu(name) for name in ("A100", "H100", "H200", "B200")]
    for older, newer in itertools.pairwise(in_order):
        assert newer.bandwidth_gb_s > older.bandwidth_gb_s
        assert newer.tflops_16bit >= older.tflops_16bit
    assert find_gpu("H200").tflops_16bit == find_gpu("H100").tflops_16bit
    assert (
        find_gpu("RTX 3090").tflops_16bit
        < find_gpu("RTX 4090").tflops_16bit
        < find_gpu("RTX 5090").tflops_16bit
    )


def test_fp8_came_after_ampere():
    without = {gpu.name.split()[0] for gpu in GPUS if gpu.tflops_fp8 is None}
    assert without == {"A100", "A10", "RTX"}
    assert find_gpu("RTX 3090").rate("fp8") is None
    assert find_gpu("L4").rate("fp8") == 242


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("a100-pcie-40gb", "A100 40GB PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx5090", "RTX 5090"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_names(written, name):
    assert find_gpu(written).name == name


@pytest.mark.parametrize("written", ["L40", "V100", "", "A1000"])
def test_an_unknown_name_lists_the_known_ones(written):
    with pytest.raises(InputError) as raised:
        find_gpu(written)
    assert all(gpu.name in str(raised.value) for gpu in GPUS)
    assert "twofour bench" in str(raised.value)


def test_this_machine_is_asked_through_the_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine() is None
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA L4'\necho 'NVIDIA L40S'\n")
    command.chmod(0o755)
    assert this_machine() == "NVIDIA L4"
    command.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert this_machine() is None

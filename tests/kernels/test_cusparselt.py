"""The cuSPARSELt backend without a GPU: a stand-in for the library records what it is asked."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from twofour.errors import InputError, TwoFourError
from twofour.kernels import cusparselt, cusparselt_library, relaunch
from twofour.kernels.cusparselt import Algorithm, algorithms, plan_for, why_not

CUDA = torch.device("cuda", 0)
SHAPE = (64, 32, 8, torch.bfloat16, CUDA)


class Library:
    """Answers every cusparseLt function: writes plausible results, keeps the plain arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list]] = []
        self.refuse: dict[str, int] = {}
        self.refuse_splits = False
        self.workspace = 256
        self.capturing = False

    def __getattr__(self, name: str):
        if name == "cusparseLtMatmulDescriptorDestroy" or not name.startswith("cusparseLt"):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name.removeprefix("cusparseLt"), arguments)

    def answer(self, name: str, arguments: tuple):
        if name == "GetErrorName":
            return b"CUSPARSE_STATUS_NOT_SUPPORTED"
        if name == "GetProperty":
            arguments[1]._obj.value = (0, 8, 1)[arguments[0]]
        if name == "MatmulAlgGetAttribute":
            arguments[3]._obj.value = 3
        if name == "MatmulGetWorkspace":
            arguments[2]._obj.value = self.workspace
        plain = []
        for argument in arguments:
            target = getattr(argument, "_obj", argument)
            plain.append(target.value if isinstance(target, ctypes._SimpleCData) else target)
        self.calls.append((name, plain))
        if self.refuse_splits and name == "MatmulAlgSetAttribute" and plain[2] == 3:
            return 3
        return self.refuse.get(name, 0)

    def of(self, name: str) -> list[list]:
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setattr(cusparselt, "load", lambda: fake)
    monkeypatch.setattr(cusparselt, "_handles", {})
    monkeypatch.setattr(cusparselt, "_workspaces", {})
    monkeypatch.setattr(cusparselt, "_plans", type(cusparselt._plans)())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: fake.capturing, raising=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **kw: empty(*size, **kw))
    cusparselt._why_not.cache_clear()
    yield fake
    cusparselt._why_not.cache_clear()


def test_import_opens_nothing():
    code = (
        "import ctypes, torch; ctypes.CDLL = None\n"
        "from twofour.kernels import cusparselt as c, cusparselt_library as l\n"
        "assert l._open.cache_info().currsize == 0 and not c._handles"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_why_not_says_what_is_missing(library, monkeypatch):
    assert "CUDA device, not cpu" in str(why_not(torch.device("cpu"), torch.float16, 64, 64))
    assert why_not(CUDA, torch.float16, 64, 64) is None
    assert "not float32" in str(why_not(CUDA, torch.float32, 64, 64))
    assert "[64, 72]" in str(why_not(CUDA, torch.float16, 64, 72))
    cusparselt._why_not.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "7.5" in str(why_not(CUDA, torch.float16, 64, 64))


def test_a_missing_library_is_told_with_the_places(library, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cusparselt_library, "_SONAME", "libnothing-of-the-kind.so.0")
    cusparselt_library._open.cache_clear()
    with pytest.raises(TwoFourError, match=r"looked for libnothing.*torch/lib.*system's.*Install"):
        cusparselt_library.load()
    cusparselt_library._open.cache_clear()


def test_a_plan_describes_the_product_without_transposes(library):
    plan_for(*SHAPE, Algorithm(2, -1, 0), 4096)
    bf16, row, column = 14, 2, 1
    assert library.of("StructuredDescriptorInit")[0][2:] == [64, 32, 32, 16, bf16, row, 0]
    x, y = library.of("DenseDescriptorInit")
    assert x[2:] == [8, 32, 32, 16, bf16, row]
    assert y[2:] == [64, 8, 64, 16, bf16, column]
    assert library.of("MatmulDescriptorInit")[0][2:4] == [0, 1]  # only x is read transposed
    assert library.of("MatmulDescriptorInit")[0][-1] == 2  # float32
    assert library.of("MatmulDescSetAttribute")[0][2:] == [8, 4096, 8]
    assert [call[2:] for call in library.of("MatmulAlgSetAttribute")] == [[0, 2, 4], [3, -1, 4]]
    names = [name for name, _ in library.calls if name not in ("GetProperty", "Init")]
    assert names[-2:] == ["MatmulPlanInit", "MatmulGetWorkspace"]
    assert ctypes.addressof(library.of("MatmulPlanInit")[0][1]) % 16 == 0


def test_the_same_key_builds_nothing_and_runs_with_the_right_pointers(library):
    plan = plan_for(*SHAPE, Algorithm())
    built = len(library.calls)
    assert plan_for(*SHAPE, Algorithm()) is plan
    assert len(library.calls) == built
    x, w, y = torch.zeros(8, 32), torch.zeros(9), torch.zeros(8, 64)
    plan.run(x, w, y)
    plan.run(x, w, y)
    first, second = library.of("Matmul")
    scratch = cusparselt._workspaces[0, 7][0].data_ptr()
    pointers = [w.data_ptr(), x.data_ptr(), 0.0, y.data_ptr(), y.data_ptr(), scratch]
    assert first[2:9] == [1.0, *pointers]
    assert list(first[9]) == [7]
    assert first[10] == 1
    assert second[:9] == first[:9]
    assert len(library.of("Init")) == 1


def test_a_workspace_grows_and_none_is_freed(library):
    small = plan_for(*SHAPE, Algorithm(0))
    small._bind(7)
    library.workspace = 300
    plan_for(*SHAPE, Algorithm(1))._bind(7)
    small._bind(7)
    assert [tensor.numel() for tensor in cusparselt._workspaces[0, 7]] == [256, 512]


def test_a_graph_has_a_workspace_of_its_own(library):
    """Two graphs that were captured on one stream may be replayed at the same time, on others."""
    plan, tensors = plan_for(*SHAPE, Algorithm()), (torch.zeros(8, 32), torch.zeros(9), torch.zeros(8, 64))
    plan.run(*tensors)
    library.capturing = True
    plan.run(*tensors)
    eager, captured = (call[8] for call in library.of("Matmul"))
    assert eager == cusparselt._workspaces[0, 7][0].data_ptr() != captured
    assert captured


def test_a_launch_that_was_learnt_does_without_the_library(library, monkeypatch):
    launched, asked = [], []

    class Launch:
        needs = frozenset({0, 1, 2})
        __call__ = staticmethod(lambda addresses, stream: launched.append((addresses, stream)))

    def learn(call, addresses, wanted):
        assert list(wanted) == [0, 1, 2]
        asked.append(addresses)
        return Launch()

    monkeypatch.setattr(relaunch, "learn", learn)
    plan = plan_for(*SHAPE, Algorithm())
    memory = torch.zeros(4096)
    start = -memory.data_ptr() % 256 // 4
    x, w, y = (memory[start + 512 * i :][:512].view(8, 64) for i in range(3))
    library.capturing = True  # not the time to learn
    plan.run(x, w, y)
    assert len(library.of("Matmul")) == 1
    library.capturing = False
    for _ in range(3):
        plan.run(x, w, y)
    assert len(asked) == len(library.of("Matmul")) == 1
    assert launched == [((w.data_ptr(), x.data_ptr(), y.data_ptr(), 0), 7)] * 3
    assert not cusparselt._workspaces, "its kernel is not given one"
    beside = memory[start + 4 :][:512].view(8, 64)  # aligned to 16 bytes, which was not learnt
    plan.run(beside, w, y)
    assert library.of("Matmul")[-1][4] == beside.data_ptr()
    assert library.of("Matmul")[-1][8] == cusparselt._workspaces[0, 7][0].data_ptr()
    assert (len(asked), len(launched)) == (1, 3)


def test_dropped_plans_are_destroyed_late(library, monkeypatch):
    monkeypatch.setattr(cusparselt, "KEPT_PLANS", 1)
    monkeypatch.setattr(cusparselt, "_retired", type(cusparselt._retired)(maxlen=1))
    for number in range(2):
        plan_for(*SHAPE, Algorithm(number))
    gc.collect()
    assert not library.of("MatmulPlanDestroy")
    plan_for(*SHAPE, Algorithm(2))
    gc.collect()
    assert len(library.of("MatmulPlanDestroy")) == 1
    assert len(library.of("MatDescriptorDestroy")) == 3


def test_failures_name_the_function(library):
    plan = plan_for(*SHAPE, Algorithm())
    library.refuse = {"Matmul": 10, "DenseDescriptorInit": 10}
    zeros = torch.zeros(8, 64)
    with pytest.raises(TwoFourError, match=r"cusparseLtMatmul failed: CUSPARSE_STATUS_NOT_SUPPORTED"):
        plan.run(zeros, zeros, zeros)
    with pytest.raises(TwoFourError, match=r"cusparseLtDenseDescriptorInit failed.*multiple of 8"):
        plan_for(64, 32, 3, torch.float16, CUDA, Algorithm())
    with pytest.raises(InputError, match="multiples of 16"):
        plan_for(60, 32, 8, torch.float16, CUDA, Algorithm())
    with pytest.raises(InputError, match="need a matrix"):
        cusparselt.compress(torch.zeros(4))


def test_algorithms_are_those_that_make_a_plan(library):
    ids = [Algorithm(i) for i in range(3)]
    assert algorithms(*SHAPE) == ids
    assert algorithms(64, 32, 2048, torch.bfloat16, CUDA) == ids
    library.refuse_splits = True
    assert algorithms(*SHAPE) == ids

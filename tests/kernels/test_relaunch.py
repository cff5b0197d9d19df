"""Learning a launch, with a driver that keeps in Python what it is given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from twofour.errors import TwoFourError
from twofour.kernels import nvrtc, relaunch

W, X, Y, SCRATCH = 0x7F00_0000_0000, 0x7F00_1000_0000, 0x7F00_2000_0000, 0x7F00_3000_0000


def kernel(arguments, function=77, cluster=(2, 1, 1)):
    return SimpleNamespace(kind=0, function=function, cluster=cluster, arguments=arguments)


def word(value):
    return value.to_bytes(8, "little")


def product(addresses):
    """As a library might: a tensor map of x, a struct with parts of the weight and the output, a number."""
    w, x, y, _ = addresses
    return [kernel([word(x) + bytes(range(120)), word(w) + word(w + 4096) + word(y), b"\1\0\0\0"])]


class Driver:
    """What `relaunch` calls of libcuda."""

    def __init__(self):
        self.streams, self.captured, self.launched, self.kept = 0, [], [], []
        self.context, self.graphs = 5, 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal + 100
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = device.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0

    def cuStreamCreate(self, stream, flags):
        self.streams += 1
        stream._obj.value = 5
        return 0

    def cuStreamDestroy_v2(self, stream):
        self.streams -= 1

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert (stream.value, mode) == (5, 2)
        self.captured = []
        return 0

    def cuStreamEndCapture(self, stream, graph):
        graph._obj.value = 1
        self.graphs += 1
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        count._obj.value = len(self.captured)
        for i in range(len(self.captured) if nodes is not None else 0):
            nodes[i] = i + 1
        return 0

    def cuGraphDestroy(self, graph):
        self.kept.clear()
        self.graphs -= 1

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.captured[node.value - 1].kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, found):
        this, into = self.captured[node.value - 1], found._obj
        buffers = [ctypes.create_string_buffer(a, len(a)) for a in this.arguments]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(b) for b in buffers))
        self.kept += [buffers, pointers]
        into.kernel, into.grid[:], into.block[:], into.shared_bytes = (
            this.function,
            (132, 1, 1),
            (384, 1, 1),
            9000,
        )
        into.arguments = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuKernelGetFunction(self, function, of):
        function._obj.value = of.value
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        arguments = self.captured[0].arguments
        if index.value >= len(arguments):
            return 1
        size._obj.value = len(arguments[index.value])
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, number, value):
        if number != 4:
            return 1
        value._obj[:3] = self.captured[node.value - 1].cluster
        return 0

    def cuLaunchKernelEx(self, at, function, arguments, extra):
        config = nvrtc.LaunchConfig.from_address(at)
        given = [
            ctypes.string_at(p, len(a)) for p, a in zip(arguments, self.captured[0].arguments, strict=True)
        ]
        attributes = [(config.attributes[i].id, *config.attributes[i].value[:3]) for i in range(config.count)]
        shape = (*config.grid, *config.block, config.shared_bytes)
        self.launched.append((function.value, shape, attributes, config.stream, given))
        return 0


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(relaunch, "driver", lambda: fake)
    monkeypatch.setattr(nvrtc, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return fake


def learnt(driver, launches, addresses=(W, X, Y, SCRATCH), wanted=(1,)):
    return relaunch.learn(
        lambda addresses, stream: driver.captured.extend(launches(addresses)), addresses, wanted
    )


def test_the_kernel_gets_what_the_library_would_give_it(driver):
    launch = learnt(driver, product, wanted=(0, 1, 2))
    assert launch.needs == {0, 1, 2}, "the workspace is in none of the arguments"
    assert driver.streams == 0
    assert not driver.launched, "to capture runs nothing"
    for shift in (0, 16, 123456):
        addresses = (W + shift, X - shift, Y + 2 * shift, 0)
        launch(addresses, 9)
        wanted = product(addresses)[0].arguments
        assert driver.launched[-1] == (77, (132, 1, 1, 384, 1, 1, 9000), [(4, 2, 1, 1)], 9, wanted)


def test_a_thread_that_has_not_used_cuda_yet(driver, monkeypatch):
    driver.context = None
    launch = learnt(driver, product)
    assert driver.context == 103, "to learn it takes one, too: that of torch's current device"
    driver.context = None
    launch_kernel = driver.cuLaunchKernelEx
    launch._run = lambda *given: launch_kernel(*given) if driver.context else 201
    launch((W, X, Y, 0), 9)
    assert len(driver.launched) == 1
    driver.context = 5
    launch._run = lambda *given: 700
    driver.cuGetErrorString = lambda status, words: 0
    with pytest.raises(TwoFourError, match=r"cuLaunchKernelEx failed.*700"):
        launch((W, X, Y, 0), 9)
    assert driver.context == 5


@pytest.mark.parametrize(
    "launches",
    [
        lambda a: [],
        lambda a: product(a) * 2,
        lambda a: [SimpleNamespace(kind=2)],  # memory that is set to zero
        lambda a: [kernel([word(a[1] >> 4)])],  # an address in a form of its own
        lambda a: [kernel([word(a[1] + a[2])])],
        lambda a: [kernel([word(a[1])], function=77 + (a[0] != W))],
        lambda a: [kernel([word(a[1])], cluster=(1 + (a[1] > X + 2000), 1, 1))],
        lambda a: [kernel([word(a[1] if a[1] < X + 2000 else 7)])],  # told by the third call alone
        lambda a: [kernel([word(a[1])] * (1 + (a[1] > X)))],
        lambda a: [kernel([])],
        lambda a: [kernel([word(a[0]), word(a[2])])],  # it has x from somewhere else
        lambda a: [kernel([word(a[1] % 2**32), word(a[1] >> 32)])],  # in halves
    ],
)
def test_what_is_not_one_kernel_of_addresses_is_left_to_the_library(driver, launches):
    assert learnt(driver, launches) is None
    assert driver.streams == driver.graphs == 0


def test_addresses_that_are_less_aligned_are_not_learnt_from(driver):
    assert learnt(driver, product, (W, X + 16, Y, SCRATCH)) is None


def test_arguments_that_cannot_be_read(driver, monkeypatch):
    monkeypatch.setattr(Driver, "cuFuncGetParamInfo", lambda *_: 999)
    driver.cuGetErrorString = lambda status, words: 0
    assert learnt(driver, product) is None


def test_a_call_that_fails_leaves_no_capture_open(driver):
    def fails(addresses, stream):
        raise TwoFourError("no")

    assert relaunch.learn(fails, (W, X, Y, SCRATCH), (1,)) is None
    assert driver.streams == driver.graphs == 0


def test_an_old_driver(driver, monkeypatch):
    monkeypatch.delattr(Driver, "cuFuncGetParamInfo")
    assert learnt(driver, product) is None

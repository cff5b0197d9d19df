"""How we time: what is in a figure, and what is kept out of it.

* `time_graph`: the calls are captured in a CUDA graph and replays are timed with device events, so the host
  is out of the figure. Give it one call per copy of the weight (`copies_past_l2`): a single weight of up to
  60 MB stays in the L2 of a Hopper GPU from replay to replay, which no model that runs whole ever sees.
* `time_eager`: device events around one plain call on an idle device. Here the host is in the figure.
* `host_microseconds`: how long a plain call holds the host before it returns.
* `time_cpu`: the same call on a machine without a GPU.
* `in_turns`: several contenders of one comparison. A chip at its power limit, or a machine that others use
  too, is slower at one time than at another, so all of them get a part of every stretch of time. Each is
  given as a `Timer`: `graph_timer`, `eager_timer` or `cpu_timer`.

All of them warm up first and give 20th, 50th and 80th percentiles, never a mean. Time on random data:
a product of zeros draws less power, and a GPU at its power limit then runs faster than it ever will.
"""

from __future__ import annotations

import datetime
import gc
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Call = Callable[[], object]

#: Milliseconds by percentile: "p20", "p50", "p80".
Times = dict[str, float]

#: Milliseconds of as many calls as it is asked for, or of fewer where they take long, but of one at least.
Timer = Callable[[int], list[float]]

WARM_UP = 3

#: Turns of each contender. An odd number, so that the median is of one of them.
ROUNDS = 5

#: A replay shorter than this would measure its launch; the calls are then captured several times over.
REPLAY_MS = 2.0

#: A turn warms up for at least so long, so that what ran before is out of the caches and the pipelines.
WARM_MS = 20.0

#: A chip at its power limit takes so long to settle on the clock that it can hold with what runs now.
SETTLE_MS = 400.0

#: Calls in one graph at most: every call is several nodes, and capturing them takes host time.
GRAPH_CALLS = 256

#: Calls between two synchronisations while the host is timed. A full launch queue would block it, and a host
#: that has just slept through long kernels is slow at first.
CALLS_IN_QUEUE = 32


def percentiles(times: Sequence[float]) -> Times:
    """
    >>> percentiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    {'p20': 2.0, 'p50': 3.5, 'p80': 5.0}
    """
    if len(times) == 1:
        return {"p20": times[0], "p50": times[0], "p80": times[0]}
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    return {"p20": cuts[0], "p50": statistics.median(times), "p80": cuts[3]}


def copies_past_l2(weight_bytes: int, device: torch.device | str, times: float = 3.0) -> int:
    """How many copies of a weight exceed `times` the L2 together, so that no copy is still there in its turn.

    Ask with the bytes of the smallest form that will be timed, so that all contenders rotate alike.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(times * cache / max(weight_bytes, 1)))


def in_turns(
    timers: Mapping[str, Callable[[], Timer]], repeats: int, rounds: int = ROUNDS
) -> dict[str, Times | Exception]:
    """Times of several contenders, each once in every round; all of them are made before the first turn.

    `repeats` calls of each, shared out among its turns. "p50" is the median of the turns' medians, the others
    are over all calls. One that raises gives what it raised, and the others go on without it.
    """
    results: dict[str, Times | Exception] = {}
    ready: dict[str, Timer] = {}
    for name, make in timers.items():
        try:
            ready[name] = make()
        except Exception as error:
            results[name] = error
    turns: dict[str, list[list[float]]] = {name: [] for name in ready}
    names, orders = list(ready), balanced_orders(len(ready))
    for number in range(rounds if ready else 0):
        for name in (names[i] for i in orders[number % len(orders)]):
            if name not in ready:
                continue
            try:
                turns[name].append(ready[name](max(1, round(repeats / rounds))))
            except Exception as error:
                results[name] = error
                del ready[name]
    for name in ready:
        middle = statistics.median(statistics.median(turn) for turn in turns[name])
        results[name] = percentiles([ms for turn in turns[name] for ms in turn]) | {"p50": middle}
    return {name: results[name] for name in timers}


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of 0 … count - 1 in which, taken together, each comes as often after any one as after any other.

    Who comes after the one that heats the chip most pays for it. (E. J. Williams, 1949.)

    >>> balanced_orders(4)
    [[0, 3, 1, 2], [1, 0, 2, 3], [2, 1, 3, 0], [3, 2, 0, 1]]
    """
    first = [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]
    orders = [[(i + start) % count for i in first] for start in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


@contextmanager
def many_graphs() -> Iterator[None]:
    """Where hundreds of graphs are captured: torch collects garbage before each, and looks at every object of
    the process for that. What is there already is left out of it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def time_graph(calls: Sequence[Call], repeats: int = 30) -> Times:
    """Milliseconds per call, from replays of one CUDA graph of all of them in turn."""
    return percentiles(graph_timer(calls)(repeats))


def graph_timer(calls: Sequence[Call], replay_ms: float = REPLAY_MS, warm_ms: float = WARM_MS) -> Timer:
    """As `time_graph`, captured now and replayed when it is asked for.

    A replay takes `replay_ms` at least, and those that are not timed `warm_ms`. Less is quicker to measure,
    with more of the launch in the figure, and more of what ran before.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = _capture(calls, stream, rounds=1)
    once = statistics.median(_replay(graph, 5))
    rounds = min(math.ceil(replay_ms / max(once, 1e-3)), max(1, GRAPH_CALLS // len(calls)))
    if rounds > 1:
        del graph  # its memory goes to the next one
        graph = _capture(calls, stream, rounds)
    warm_up = max(WARM_UP, math.ceil(warm_ms / max(rounds * once, 1e-3)))
    return lambda repeats: [ms / (rounds * len(calls)) for ms in _replay(graph, repeats, warm_up)]


def _capture(calls: Sequence[Call], stream: torch.cuda.Stream, rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, repeats: int, warm_up: int = WARM_UP) -> list[float]:
    for _ in range(warm_up):  # also at the start of a turn: the chip comes from other work
        graph.replay()
    pairs = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def time_eager(call: Call, repeats: int = 50, seconds: float = 1.0) -> Times:
    """Milliseconds of one plain call on an idle device. The L2 is left as the call before it left it.

    Stops after `seconds`, with at least five calls timed.
    """
    return percentiles(eager_timer(call, seconds, at_least=5)(repeats))


def eager_timer(call: Call, seconds: float, at_least: int = 1) -> Timer:
    """As `time_eager`, with `seconds` for each turn."""
    for _ in range(WARM_UP):
        call()

    def timer(repeats: int) -> list[float]:
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        begin = time.perf_counter()
        while len(pairs) < repeats and (len(pairs) < at_least or time.perf_counter() - begin < seconds):
            torch.cuda.synchronize()
            start, end = _event(), _event()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    return timer


def host_microseconds(call: Call, repeats: int = 200, seconds: float = 1.0) -> float:
    """Host time of one plain call that nothing waits for: the median, in microseconds.

    Stops after `seconds`, with at least 20 calls timed.
    """
    for _ in range(WARM_UP):
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < repeats and (len(times) < 20 or time.perf_counter() - begin < seconds):
        if len(times) % CALLS_IN_QUEUE == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def time_cpu(call: Call, repeats: int = 20, seconds: float = 1.0) -> Times:
    """Milliseconds of one call on the CPU. Stops after `seconds`, with at least five calls timed."""
    return percentiles(cpu_timer(call, seconds, at_least=5)(repeats))


def cpu_timer(call: Call, seconds: float, at_least: int = 1) -> Timer:
    """As `time_cpu`, with `seconds` for each turn."""
    call()

    def timer(repeats: int) -> list[float]:
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < repeats and (len(times) < at_least or time.perf_counter() - begin < seconds):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    return timer


def about(device: torch.device | str) -> dict[str, Any]:
    """The machine and the versions, without which a time says nothing."""
    device = torch.device(device)
    gpu = device.type == "cuda"
    cusparselt = torch.backends.cusparselt.version() if gpu else None
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "driver": _driver() if gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cusparselt": cusparselt,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)

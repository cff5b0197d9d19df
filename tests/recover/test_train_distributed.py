"""`recover` by two gloo processes, each with a copy (DDP) or a part (FSDP2), against one process."""

import datetime
import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from tests.recover.processes import leave
from twofour.io.check import check
from twofour.io.quantize import QuantizeOptions, quantize_checkpoint
from twofour.io.recover import recover_checkpoint
from twofour.recover import Recover
from twofour.recover.options import SCALES
from twofour.recover.state import Store

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 30
SHORT = {"tokens": 12 * 8 * 16, "batch": 8, "seqlen": 16, "save_every": 5, "eval_every": 3, "lr": 1e-3}


class Killed(BaseException):
    pass


def cut(done, total, label):
    """All processes stop at the same step, after a state was saved."""
    if done >= 6:
        raise Killed


def run(source, out, data, teacher, fsdp=False, stops=False, recipe=None, scheme=None):
    options = Recover(**SHORT, fsdp=fsdp, recipe=recipe, scheme=scheme)
    try:
        recover_checkpoint(
            *(source, out, data, teacher, options), resume=True, **({"on_progress": cut} if stops else {})
        )
        assert not stops
    except Killed:
        assert stops


def work(rank, port, jobs):
    torch.set_num_threads(1)
    here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(here, MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("localhost", port, is_master=False),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    if rank:
        Store.final = late(Store.final)
    for arguments, named in jobs:
        run(*arguments, **named)
    leave()


def late(read):
    """The first process takes the run's directory away in the end: not before all have read it."""

    def final(store):
        time.sleep(0.5)
        return read(store)

    return final


def by_two(*jobs):
    """All in one pair of processes: starting them takes longer than the training."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(work, (store.port, jobs), nprocs=2)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def require_alike(one, two, masks_fixed=True):
    assert check(two).ok
    logs = [[json.loads(line) for line in (d / "recover.jsonl").read_text().splitlines()] for d in (one, two)]
    for key in ("loss", "held_out_loss"):
        figures = [[(e["step"], e[key]) for e in log if key in e] for log in logs]
        assert len(figures[0]) > 3
        torch.testing.assert_close(figures[1], figures[0], rtol=2e-4, atol=2e-5)
    one, two = (load_file(directory / "model.safetensors") for directory in (one, two))
    for name in one:
        if one[name].dtype == torch.float8_e4m3fn:
            assert torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)), name
            continue
        torch.testing.assert_close(two[name], one[name], rtol=1e-2, atol=2e-4)
        if name.endswith("proj.weight") and masks_fixed:
            assert torch.equal(one[name] == 0, two[name] == 0), name


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_two_processes_give_what_one_gives(dense, pruned, text, tmp_path, fsdp):
    """Through the command and torchrun; text of both kinds, the teacher's shared out too."""
    rest = ["--data", str(text), "--data", "self", "--teacher", str(dense)]
    rest += [x for name, value in SHORT.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for out, start, extra in (
        ("one", [], []),
        ("two", launch, ["--accumulate", "2", *(["--fsdp"] if fsdp else [])]),
    ):
        command = ["twofour", "recover", str(pruned), str(tmp_path / out), *rest, *extra]
        arguments = [sys.executable, "-m", *start, *command]
        ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("Recovered") == 1  # by the first process only
    require_alike(tmp_path / "one", tmp_path / "two")
    assert not list(tmp_path.glob(".*.recover"))


@pytest.mark.parametrize(
    ("recipe", "fsdp", "scheme"),
    [
        ("distill", False, None),
        ("distill", True, None),
        ("adaptive", True, None),
        ("lora", False, None),
        ("lora", True, None),
        ("distill", False, "int8-weight"),  # rounded tokens would jump where a sum differs in its last bit
        ("adaptive", True, "int8-weight"),
        (SCALES, False, "fp8-weight"),
    ],
    ids=lambda value: {False: "ddp", True: "fsdp"}.get(value, value),
)
def test_a_state_of_two_processes_goes_on_in_one_and_back(
    dense, pruned, text, tmp_path, fsdp, recipe, scheme
):
    whole, there, back = (tmp_path / name for name in ("whole", "there", "back"))
    if recipe == SCALES:
        quantize_checkpoint(pruned, tmp_path / "codes", QuantizeOptions(scheme, None, "nearest"))
        pruned, scheme = tmp_path / "codes", None
    how = {"recipe": recipe, "scheme": scheme}
    run(pruned, whole, [text], dense, **how)
    run(pruned, back, [text], dense, **how, stops=True)
    by_two(
        ((pruned, there, [text], dense), {"fsdp": fsdp, "stops": True, **how}),
        ((pruned, back, [text], dense), {"fsdp": fsdp, **how}),
    )
    assert (tmp_path / ".there.recover" / "state.safetensors").exists()
    run(pruned, there, [text], dense, **how)
    for out in (there, back):
        require_alike(whole, out, recipe != "adaptive")

"""What the tests with several processes share."""

from typing import NoReturn

import torch.distributed as dist

from twofour.calibrate import parallel


def leave() -> NoReturn:
    """End a spawned process whose work is done."""
    dist.destroy_process_group()
    parallel.leave(0)

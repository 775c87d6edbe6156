"""A rank of `nxd_parity.ranks.run_ranks`: `python -m nxd_parity.rank_process FOLDER RANK`."""

import faulthandler
import pickle
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nxd_parity.float64 import InFloat64
from nxd_parity.record import record


def main(folder: Path, rank: int) -> None:
    """Call the function that the folder has, and record it."""
    function, given, options = pickle.loads((folder / "function").read_bytes())
    faulthandler.dump_traceback_later(options["timeout"], exit=True)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if options["world_size"] > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options["world_size"])
    with ExitStack() as stack:
        if options["dtype"] == torch.float64:
            stack.enter_context(InFloat64())
        torch.set_default_dtype(options["dtype"])
        stack.enter_context(record(options["recording"], steps=options["steps"], noise=options["noise"]))
        function(**given)
    if dist.is_initialized():
        dist.barrier()  # the first to leave would fail the others' last messages
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

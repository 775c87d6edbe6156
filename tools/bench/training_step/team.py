"""Processes that compute variants together, each waiting at a pipe, without using its core, until it is told to.

The parent calls functions on all of a team's ranks. What they can be asked is in `rounds`, `operators` and `traffic`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from nxd_state import destroy_model_parallel, initialize_model_parallel
from processes.rank_processes import RankProcesses

from training_step.sizes import Size
from training_step.step import Trainee
from training_step.variants import Variant

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """How many tensor-parallel ranks compute which variants of one model, with how many threads each."""

    ranks: int
    threads: int
    size: Size
    variants: tuple[Variant, ...]


class Team(RankProcesses):
    """The running processes of a layout; `with` ends them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        super().__init__(layout.ranks, _serve, layout)

    def call(self, function: Callable[[Trainee], T], variant: Variant) -> list[T]:
        """`function` of one variant's trainee, on every rank at once; results by rank.

        Raises:
            RuntimeError: a rank failed; it has printed its traceback.
        """
        return self.request((variant.name, function), f"at {variant.name!r}")


def _serve(layout: Layout, rank: int, store: Path, connection: Connection) -> None:
    """Make all variants, then call what the parent sends until it hangs up."""
    torch.set_num_threads(layout.threads)
    if layout.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=layout.ranks)
    initialize_model_parallel(layout.ranks)
    trainees = {variant.name: Trainee(variant, layout.size) for variant in layout.variants}
    while True:
        try:
            name, function = connection.recv()
        except EOFError:
            break
        connection.send(function(trainees[name]))
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()

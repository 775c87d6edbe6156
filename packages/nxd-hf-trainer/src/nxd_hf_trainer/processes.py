"""Which of the ranks a script takes for the main process, and where all of them wait.

The script's processes are the replicas: torch's default group is theirs (`nxd_state.show_replicas_as_world`), and
Accelerate counts them. But only one rank of all is the main process, and who waits for it are all ranks.
"""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from nxd_state import all_gather_object, barrier, get_group, get_world_group, is_cpu, rank_of_job
from transformers import TrainingArguments

from nxd_hf_trainer.replacing import Replacement, replaced


def is_main_process() -> bool:
    """Whether this is the one rank that writes and reports."""
    return rank_of_job() == 0


def wait_for_everyone() -> None:
    """Wait for all ranks."""
    barrier(get_world_group())


def check_nothing_started() -> None:
    """Raise a RuntimeError if Accelerate has counted its processes already."""
    if PartialState._shared_state:
        raise RuntimeError(
            "Accelerate has started before the layout was chosen; call under_trainer() before TrainingArguments, "
            "Accelerator and PartialState are made, best at the top of the script"
        )


def forget_processes() -> None:
    """Let Accelerate count its processes anew, for what follows in this process."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def seed_like_one_process() -> None:
    """Let Python's and NumPy's generators draw the same on all ranks of a replica, also in scripts without a seed."""
    seed = all_gather_object(random.getrandbits(31), get_world_group())[0] + get_group("dp").rank
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def main_process_is_one_rank() -> Iterator[None]:
    """Context in which Accelerate and TrainingArguments take rank 0 for the main process, and wait for all ranks."""
    if is_cpu():  # Accelerate takes processes on the CPU for ranks only if it is told
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ.setdefault("LOCAL_RANK", "0")  # else transformers would use all GPUs of a process that nobody launched
    with replaced(PartialState, _OF_STATE), replaced(TrainingArguments, _OF_ARGUMENTS):
        yield


def _main_process_first(_: Any) -> Any:
    @contextmanager
    def main_process_first(arguments: TrainingArguments, local: bool = True, desc: str = "work") -> Iterator[None]:
        state = arguments.distributed_state
        with state.local_main_process_first() if local else state.main_process_first():
            yield

    return main_process_first


def _should_save(_: Any) -> property:
    return property(
        lambda arguments: arguments.local_process_index == 0 if arguments.save_on_each_node else is_main_process()
    )


_OF_STATE: Mapping[str, Replacement] = {
    "is_main_process": lambda _: property(lambda state: is_main_process()),
    "is_last_process": lambda _: property(lambda state: rank_of_job() == get_world_group().size - 1),
    "wait_for_everyone": lambda _: lambda state: wait_for_everyone(),
}
_OF_ARGUMENTS: Mapping[str, Replacement] = {
    "should_save": _should_save,
    "main_process_first": _main_process_first,
}

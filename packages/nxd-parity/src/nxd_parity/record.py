"""`record`: writes down what a program computes, without a change of the program."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from nxd_parity.collectives import collectives_recorded
from nxd_parity.hooks import Progress, StepHooks
from nxd_parity.model_names import ModelNames
from nxd_parity.noise import Noise
from nxd_parity.writer import RankWriter, rank_folder


@contextmanager
def record(
    folder: Path | str, *, rename: Callable[[str], str] | None = None, noise: int | None = None
) -> Iterator[None]:
    """Record the steps that run in the `with` block: call it on every rank, around steps from a model's first one.

    Recorded are the parameters at the start and after each step; inputs of the models; outputs of all modules and
    their gradients; losses; parameters' gradients before clipping, and their norm; optimizer states; and which
    collectives of `torch.distributed` are called. Modules that run inside a compiled graph are not seen.

    A step ends with an optimizer's step; the parameters after it are those at the next call of a model, or at the end
    of the block. Values go to files as they come: memory holds 64 MiB of them, and one tensor.

    Args:
        folder: a new folder for the recording of all ranks; ranks on several machines may write to folders of the same
            name, to be copied into one.
        rename: gives a module or parameter the name that it has in the other program. It gets names without the
            prefixes of wrappers (DDP, FSDP, compile, activation checkpointing, PEFT). Stages of a pipeline need it if
            they count their layers from 0.
        noise: changes outputs of modules by about a unit in the last place, with random numbers of this seed. Such
            recordings of the reference show how large rounding becomes; see `compare`.

    Raises:
        FileExistsError: the folder has a recording of this rank.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    writer = RankWriter(Path(folder), rank)
    progress = Progress()
    hooks = StepHooks(writer, ModelNames(rename), progress, None if noise is None else Noise(noise))
    _describe(rank_folder(Path(folder), rank), rank)
    try:
        with hooks.installed(), collectives_recorded(writer, progress):
            yield
        hooks.end_step()
    finally:
        writer.flush()


def _describe(folder: Path, rank: int) -> None:
    facts = {"format": 1, "rank": rank, "torch": torch.__version__}
    (folder / "recording.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")

"""`record`: writes down what a program computes, without a change of the program."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxd_parity.by_hand import Recorder
from nxd_parity.collectives import collectives_recorded
from nxd_parity.hooks import Progress, StepHooks
from nxd_parity.model_names import ModelNames
from nxd_parity.noise import Noise
from nxd_parity.writer import DESCRIPTION, FORMAT, RAISED, REACHED, RankWriter, rank_folder

WITHOUT_STEPS = (
    "no torch.optim.Optimizer stepped while this program was recorded: the recording has no gradients of parameters, "
    "no optimizer states, and no parameters after a step. Use one, or record them with record(by_hand=True)"
)


@contextmanager
def record(
    folder: Path | str,
    *,
    steps: int | None = None,
    rename: Callable[[str], str] | None = None,
    noise: int | None = None,
    by_hand: bool = False,
    modules_of: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]] | None = None,
    alone: bool = False,
) -> Iterator[Recorder]:
    """Record the steps that run in the `with` block: call it on every rank, around steps from a model's first one.

    Recorded are the parameters at the start and after each step; inputs of the models; outputs of all modules and
    their gradients; losses; parameters' gradients before clipping, and their norm; optimizer states; and which
    collectives of `torch.distributed` are called. Modules that run inside a compiled graph are not seen.

    A step ends with the step of a `torch.optim.Optimizer`; the parameters after it are those at the next call of a
    model, or at the end of the block. A program that updates its parameters by other code has no steps, and `record`
    warns of it: use `by_hand`. Values go to files as they come, from a thread: memory holds 128 MiB of them, and one
    tensor.

    Args:
        folder: a new folder for the recording of all ranks; ranks on several machines may write to folders of the same
            name, to be copied into one.
        steps: how many steps to record; by default all of the block.
        rename: gives a module or parameter the name that it has in the other program. It gets names without the
            prefixes of wrappers (DDP, FSDP, compile, activation checkpointing, PEFT). Other names, such as those of
            pipeline stages that count their layers from 0, are inferred from initial values; `rename` is for models
            whose values start differently.
        noise: changes outputs of modules by about a unit in the last place, with random numbers of this seed. Such
            recordings of the reference show how large rounding becomes; see `compare`.
        by_hand: whether the program itself gives its losses, gradients, norms, parameters and optimizer states, and
            says when a step ends, by the `Recorder` that the block gets. A program that knows which part of a whole
            tensor each of its tensors is says it there, and nothing is to be inferred.
        modules_of: gives the modules of a model that is called, with their names; by default `model.named_modules()`.
            Calls of others are not recorded, such as those of stand-ins for other stages' modules.
        alone: whether this process records by itself, though the program has other ranks: for a reference that one
            rank computes before the others join. The recording is that of one process.

    Yields:
        what the program may record itself.

    Raises:
        FileExistsError: the folder has a recording of this rank.
        ValueError: `steps` is not a positive integer, `noise` not a seed, or `folder` is empty.
    """
    _check(folder, steps, noise)
    path = Path(folder)
    rank = 0 if alone else _rank()
    writer = RankWriter(path, rank)
    progress = Progress()
    with ExitStack() as installed:

        def stop_after_steps() -> None:
            if steps is not None and progress.step > steps:
                installed.close()
                writer.close()
                progress.is_over = True
                _describe(path, rank, alone, is_complete=True, end=REACHED, tensors=writer.tensors)

        hooks = StepHooks(
            writer,
            ModelNames(rename, modules_of),
            progress,
            None if noise is None else Noise(noise),
            stop_after_steps,
            by_hand=by_hand,
        )
        _describe(path, rank, alone)
        is_raised = False
        try:
            installed.enter_context(hooks.installed())
            installed.enter_context(collectives_recorded(writer, progress))
            yield Recorder(hooks)
            hooks.end_step()
            if hooks.lacks_steps:
                warnings.warn(WITHOUT_STEPS, stacklevel=3)
        except BaseException:
            is_raised = True
            raise
        finally:
            writer.close()
            if not progress.is_over:
                end = RAISED if is_raised or hasattr(sys, "last_value") else REACHED
                _describe(path, rank, alone, end=end, tensors=writer.tensors)


def description(folder: Path, rank: int) -> dict[str, Any]:
    """Return what is known of a rank's recording: its `rank`, `world_size`, whether it `is_complete`, and its `end`.

    The end is `REACHED`, `RAISED` if the program raised an error, or empty while it runs, and if it was killed.
    """
    facts: dict[str, Any] = json.loads((rank_folder(folder, rank) / DESCRIPTION).read_text(encoding="utf-8"))
    return facts


def _check(folder: Path | str, steps: object, noise: object) -> None:
    if not str(folder):
        raise ValueError("folder='' is no folder; give a new one for the recording")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"steps={steps!r}; record at least 1, or None for all of the block")
    if noise is not None and (type(noise) is not int or not 0 <= noise < 2**63):
        raise ValueError(f"noise={noise!r} is no seed of random numbers; use an integer of at least 0, or None")


def _describe(
    folder: Path, rank: int, alone: bool, *, is_complete: bool = False, end: str = "", tensors: int | None = None
) -> None:
    """Write a rank's description.

    Args:
        folder: the folder of the recording.
        rank: the rank.
        alone: whether it is the recording's only one.
        is_complete: whether it has as many steps as it is to have.
        end: how it ended.
        tensors: how many tensors are in its files, once all are.
    """
    facts = {
        "format": FORMAT,
        "rank": rank,
        "world_size": 1 if alone else _world_size(),
        "is_complete": is_complete,
        "end": end,
        "tensors": tensors,
        "torch": torch.__version__,
    }
    path = rank_folder(folder, rank) / DESCRIPTION
    path.with_suffix(".new").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)


def _rank() -> int:
    if _is_distributed():
        return dist.get_rank()
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0")  # Lightning's processes have no RANK


def _world_size() -> int:
    return dist.get_world_size() if _is_distributed() else int(os.environ.get("WORLD_SIZE") or "1")


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()

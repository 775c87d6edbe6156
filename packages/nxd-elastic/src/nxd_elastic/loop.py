"""`run`: trains, and when ranks are lost or join, continues with those that remain, in the same processes."""

import atexit
import gc
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import nxd_ckpt
import torch.distributed as dist
from nxd_ckpt.errors import RanksLostError
from nxd_engine.checkpoints.save import abandon_checkpoint
from nxd_state import (
    ParallelDegrees,
    PeerError,
    abort_model_parallel,
    destroy_model_parallel,
    initialize_mesh,
    is_cpu,
)
from nxd_state.processes import Process
from nxd_state.rank_failure import describe_failure, is_peer_failure

from nxd_elastic.members import Generation, GenerationEnd, GenerationKeys, GenerationStore, Member
from nxd_elastic.peers.starting import use_memory_servers
from nxd_elastic.rendezvous import RendezvousSettings, choose_layout, join
from nxd_elastic.supervisor import STEP_TAKEN, SupervisorPipe, supervise
from nxd_elastic.watch import Watch

T = TypeVar("T")

_SECONDS_TO_CONNECT = timedelta(seconds=60)
_SECONDS_TO_FIND_LOSS = 2.0  # within which the loss that caused an error is noticed
_POLL_SECONDS = 0.05

# torch keeps only the C++ half of a store alive; the Python half must outlive the generation's process groups.
_stores: list[GenerationStore] = []


class ChangeMembers(Exception):
    """Raised by all ranks of a generation between two steps, so that waiting trainers can join."""


@dataclass(frozen=True)
class Options:
    """The limits of an elastic run."""

    least: int  # minimum number of ranks
    most: int  # maximum number of ranks; others are spares
    grace: float = 30.0  # seconds to wait for a lost rank before continuing with fewer
    silence: float = 10.0  # seconds without a heartbeat after which a rank counts as lost

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"{self.least}:{self.most} is not a range of ranks; use one such as 2:8")
        for name in ("grace", "silence"):
            if not 1 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of seconds, 1 or more")


@dataclass(frozen=True)
class TrainingResult(Generic[T]):
    """The result of the training, on a rank that took part until its end."""

    value: T


class Membership:
    """This process's place in a generation.

    Attributes:
        generation: number of the generation, from 1.
        degrees: degrees of its mesh.
        rank: rank of this process among those that train.
        stopping: whether the run had been asked to stop before this process started.
        stopped: set by a training that returns early, so that another launch can resume it.
    """

    def __init__(
        self, generation: Generation, rank: int, store: dist.Store, watch: Watch, pipe: SupervisorPipe
    ) -> None:
        self.generation, self.rank = generation.number, rank
        self.degrees = generation.degrees
        self.stopping, self.stopped = pipe.stopping, False
        self._store, self._watch, self._pipe = store, watch, pipe
        self._boundaries = 0

    @property
    def world_size(self) -> int:
        """Number of ranks that train."""
        return self.degrees.world_size

    def initialize(self) -> None:
        """Initialize model parallelism with these degrees and ranks."""
        initialize_mesh(self.degrees, store=self._store)

    def step_boundary(self) -> bool:
        """Whether another trainer waits to join. Call it between steps, as it also reports progress to the supervisor.

        Ranks may find out at different steps: they agree first, save, and then all raise `ChangeMembers`.
        """
        self._boundaries += 1
        if self._boundaries > 1:
            self._pipe.send(STEP_TAKEN)
        return self._watch.change_wanted


def run(
    train_once: Callable[[Membership], T],
    *,
    min_ranks: int,
    max_ranks: int | None = None,
    layouts: Sequence[ParallelDegrees] = (ParallelDegrees(),),
    accepts: Callable[[ParallelDegrees], bool] = lambda degrees: True,
    grace: float = 30.0,
    silence: float = 10.0,
    keeps_memory: bool = False,
) -> T:
    """Train with the available ranks. Call it in a script that torchrun starts, before anything is computed.

    The calling process becomes a supervisor and does not return: it forks trainers, in which this function calls
    `train_once`, and calls it again whenever ranks are lost or join. torchrun's `--max-restarts` limits how often each
    rank is replaced; the default is never.

    SIGTERM and SIGINT are forwarded to the trainers, which they end unless the script handles them. To end with a
    checkpoint, record the signal; once all ranks agree, save, set `Membership.stopped` and return. A rank that dies
    after the others have returned prints a message and exits without running the rest of the script.

    Args:
        train_once: function that initializes model parallelism with `Membership.initialize`, builds the model, loads
            the newest checkpoint and trains. It must release everything when it ends, may raise `ChangeMembers` on all
            ranks, and must not catch `nxd_ckpt.RanksLostError`, which is a `CheckpointError`.
        min_ranks: minimum number of ranks.
        max_ranks: maximum number of ranks; all that torchrun starts if None.
        layouts: layouts in order of preference; data parallelism uses the remaining factor.
        accepts: function that returns whether a layout and its replicas suit the run, such as its global batch.
        grace: seconds to wait for a lost rank before continuing with fewer.
        silence: seconds without a heartbeat after which a rank counts as lost.
        keeps_memory: whether to start a memory server on each host; `nxd_elastic.peers.store.job_url()` is then a path
            for checkpoints in host memory.

    Returns:
        The result of the last call of `train_once`.

    Raises:
        RuntimeError: this process was not started by torchrun, has threads, or is not on Linux.
        PeerError: there are too few ranks, or another rank failed with an error of its own.
    """
    check_launch()
    most = int(os.environ["WORLD_SIZE"]) if max_ranks is None else max_ranks
    options = Options(min_ranks, most, grace, silence)
    pipe = supervise(silence=options.silence, keeps_memory=keeps_memory)
    if isinstance(pipe, int):
        sys.exit(pipe)
    trained = run_as_trainer(train_once, pipe, options, layouts, accepts)
    if trained is None:
        print(
            f"nxd elastic: rank {os.environ['RANK']} was lost and the others have finished the training; it exits "
            "without running the rest of the script",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(0)
    return trained.value


def check_launch() -> None:
    """Raise RuntimeError if the launcher has no store that outlives ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "RANK" not in os.environ:
        raise RuntimeError(
            "elastic training needs a store that outlives ranks: start it with torchrun (--standalone, or "
            "--rdzv-backend c10d; with --max-restarts 100), or with nxd train --nproc N"
        )


def run_as_trainer(
    train_once: Callable[[Membership], T],
    pipe: SupervisorPipe,
    options: Options,
    layouts: Sequence[ParallelDegrees],
    accepts: Callable[[ParallelDegrees], bool],
) -> TrainingResult[T] | None:
    """Like `run`, in a process that a supervisor forked.

    Returns:
        The result of `train_once`; None if the other ranks finished the training without this process.
    """
    try:
        trainer = _Trainer(pipe, options, layouts, accepts)
        with trainer.watched():
            return trainer.run(train_once)
    except dist.DistError as error:
        raise PeerError(
            f"the job's store cannot be reached, so its host is gone; start the job again, it resumes from the newest "
            f"checkpoint: {error}"
        ) from error


class _Trainer:
    def __init__(
        self,
        pipe: SupervisorPipe,
        options: Options,
        layouts: Sequence[ParallelDegrees],
        accepts: Callable[[ParallelDegrees], bool],
    ) -> None:
        self._pipe = pipe
        self._slot, slots = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, wait_for_workers=False, timeout=_SECONDS_TO_CONNECT)
        self._keys = GenerationKeys(self._store)
        own = Process.of(os.getpid())
        self._own = Member(self._slot, f"{self._slot}-{secrets.token_hex(6)}", own, pipe.launcher)
        if pipe.server:
            self._keys.set_memory_server(pipe.launcher, pipe.server)
        self._watch = Watch(self._keys, self._own, pipe, silence=options.silence)
        self._settings = RendezvousSettings(
            slots,
            options.grace,
            options.silence,
            lambda ranks: choose_layout(layouts, ranks, least=options.least, most=options.most, accepts=accepts),
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the thread that sends heartbeats; the supervisor gets them until the interpreter exits."""
        self._watch.start()
        atexit.register(self._watch.stop_thread)
        try:
            yield
        finally:
            self._watch.finish()

    def run(self, train_once: Callable[[Membership], T]) -> TrainingResult[T] | None:
        before: Generation | None = None
        while not self._has_been_stopped():
            after = before.number if before else 0
            generation = join(self._keys, self._own, self._settings, after, replaces=self._pipe.replaces)
            if generation is None:
                return None
            self._check_progress(before, generation)
            before = generation
            self._watch.enter(generation)
            ranks = [member.incarnation for member in generation.active]
            if self._own.incarnation not in ranks:
                end = self._wait_for_end(generation)
                if end.ending in ("done", "stopped"):
                    return None
                continue
            result = self._take_part(train_once, generation, ranks.index(self._own.incarnation))
            if result is not None:
                return result
        return None

    def _take_part(
        self, train_once: Callable[[Membership], T], generation: Generation, rank: int
    ) -> TrainingResult[T] | None:
        """Train in a generation; None if another one follows."""
        _set_environment(generation, rank, self._own)
        servers = self._keys.servers(generation)
        use_memory_servers([*servers.values()], servers.get(self._own.launcher, ""))
        store = GenerationStore(self._keys.store_of(generation.number), self._reason_to_end)
        _stores.append(store)
        try:
            membership = Membership(generation, rank, store, self._watch, self._pipe)
            result = train_once(membership)
            end = GenerationEnd("stopped" if membership.stopped else "done", "the training has ended")
            end = self._keys.end(generation.number, end)
            if end.ending in ("stopped", "done"):
                return TrainingResult(result)
            if end.ending == "failed":
                raise PeerError(end.reason)
            del result  # a rank was lost before it knew that everything is saved: all check again
        except ChangeMembers:
            self._keys.end(generation.number, GenerationEnd("change", "another trainer joins"))
        except Exception as error:
            if not self._can_continue_after(error, generation):
                raise
            _release_frames(error)
        self._clean_up()
        return None

    def _reason_to_end(self) -> str | None:
        end = self._watch.end_of_generation
        return None if end is None else end.reason

    def _can_continue_after(self, error: Exception, generation: Generation) -> bool:
        """Whether an exception comes from the loss of a rank, which ends the generation; any other ends the run."""
        of_peer = is_peer_failure(error) or isinstance(error, RanksLostError)
        if not of_peer and not self._finds_loss(generation):
            self._keys.end(
                generation.number, GenerationEnd("failed", f"rank {self._slot} of the launch failed: {error}")
            )
            return False
        reason = f"rank {self._slot} of the launch lost contact: {describe_failure(error)}"
        end = self._keys.end(generation.number, GenerationEnd("lost", reason))
        if end.ending == "lost" and self._slot == generation.members[0].slot:
            print(f"nxd elastic: generation {generation.number} is over: {end.reason}", file=sys.stderr, flush=True)
        if end.ending == "failed":
            raise PeerError(end.reason) from error
        return True

    def _finds_loss(self, generation: Generation) -> bool:
        """Whether a member is lost, or turns out to be within two seconds."""
        deadline = time.monotonic() + _SECONDS_TO_FIND_LOSS
        while time.monotonic() < deadline:
            end = self._keys.end_of(generation.number)
            if end is not None:
                return end.ending == "lost"
            if self._watch.find_lost(generation.members) is not None:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _has_been_stopped(self) -> bool:
        """Whether the run was stopped while this process started."""
        end = self._keys.end_of(self._keys.latest()) if self._pipe.stopping else None
        return end is not None and end.ending == "stopped"

    def _wait_for_end(self, generation: Generation) -> GenerationEnd:
        """Wait, as a spare, until the generation of the others ends."""
        while (end := self._keys.end_of(generation.number)) is None:
            time.sleep(_POLL_SECONDS)
        if end.ending == "failed":
            raise PeerError(end.reason)
        self._watch.pause()
        self._watch.settle()
        return end

    def _check_progress(self, before: Generation | None, after: Generation) -> None:
        """Raise on all ranks if contact was lost although no process ended: it would only be lost again."""
        if before is None or before.incarnations != after.incarnations:
            return
        end = self._keys.end_of(before.number)
        if end is not None and end.ending == "lost":
            raise PeerError(f"{end.reason}. No process has ended: check the network, or raise --elastic-silence")

    def _clean_up(self) -> None:
        """End the generation's communication and saves, and free its memory."""
        self._watch.pause()
        abort_model_parallel("this generation is over")
        abandon_checkpoint()
        nxd_ckpt.end_async_saves()
        destroy_model_parallel()
        if dist.is_initialized():  # the generation ended during initialization
            dist.destroy_process_group()
        _stores.clear()
        gc.collect()
        self._watch.settle()


def _release_frames(error: BaseException) -> None:
    """Release the objects that the frames of an exception hold: a model, its optimizer, a lock."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__, following = None, link.__cause__ or link.__context__
        link.__cause__ = link.__context__ = None
        link = following


def _set_environment(generation: Generation, rank: int, own: Member) -> None:
    """Set the variables that a launcher of these ranks would set."""
    here = [member.slot for member in generation.active if member.launcher == own.launcher]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(generation.degrees.world_size)}
    if is_cpu():  # an accelerator stays the one that the launcher assigned
        os.environ |= {"LOCAL_RANK": str(here.index(own.slot)), "LOCAL_WORLD_SIZE": str(len(here))}

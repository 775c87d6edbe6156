"""The error that the parent process raises when a job fails, root cause first; and the scaling of timeouts."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def deadline(seconds: float) -> float:
    """Scale a timeout for an idle, current machine by the environment variable NXD_TESTING_SLOWNESS (default 1)."""
    return seconds * float(os.environ.get("NXD_TESTING_SLOWNESS", "1"))


_LONGEST_OUTPUT = 10_000

# Errors of gloo, of shared memory and of a pipeline on a rank whose peer has failed.
_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connectFullMesh failed",
    "has left group",
    "this rank stopped because",
)


@dataclass(frozen=True)
class FailedRank:
    """How one rank of a job failed.

    Attributes:
        rank: the rank.
        summary: one line, such as `ValueError: ...`, `killed by SIGKILL` or `still running after timeout=2.0 s`.
        traceback: the traceback, or the stacks of all threads of a rank that hung or crashed.
        time: `time.monotonic()` of the failure.
        stopped: whether the pool stopped this rank because another one had failed.
    """

    rank: int
    summary: str
    traceback: str
    time: float
    stopped: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether this rank failed only because another one had failed."""
        return self.stopped or any(phrase in self.summary for phrase in _PEER_IS_GONE)


class RankFailure(RuntimeError):
    """At least one rank of a job failed.

    Attributes:
        failures: the failed ranks: the earliest failure, later ones, then ranks that failed because a peer was gone.
        outputs: stdout and stderr of each rank that printed.
    """

    failures: dict[int, FailedRank]
    outputs: dict[int, str]

    def __init__(self, failures: Sequence[FailedRank], world_size: int, outputs: Mapping[int, str]) -> None:
        ordered = sorted(failures, key=lambda failed: (failed.is_consequence, failed.time, failed.rank))
        self.failures = {failed.rank: failed for failed in ordered}
        self.outputs = dict(outputs)
        super().__init__(_message(ordered, world_size, self.outputs))


def describe_exit(returncode: int) -> str:
    """Describe how a process ended: `exited with code 3`, `killed by SIGKILL (exit code -9)`."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name} (exit code {returncode})"
    return f"exited with code {returncode}"


def prefix_output(rank: int, output: str) -> str:
    """Prefix each line of a rank's output with `[rank 1] `; keep only the end of a very long output."""
    if len(output) > _LONGEST_OUTPUT:
        output = f"... {len(output) - _LONGEST_OUTPUT} characters left out ...\n{output[-_LONGEST_OUTPUT:]}"
    return "".join(f"[rank {rank}] {line}\n" for line in output.splitlines())


def _message(ordered: Sequence[FailedRank], world_size: int, outputs: Mapping[int, str]) -> str:
    first = ordered[0]
    sections = [f"rank {first.rank} of {world_size} failed: {first.summary}"]
    # Ranks with the same error share a section.
    for (summary, traceback), alike in itertools.groupby(ordered, lambda failed: (failed.summary, failed.traceback)):
        ranks = [failed.rank for failed in alike]
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        sections.append(f"----- {label}: {summary.splitlines()[0]} -----\n{traceback.rstrip()}")
    sections += [
        f"----- output of rank {rank} -----\n{prefix_output(rank, outputs[rank]).rstrip()}" for rank in sorted(outputs)
    ]
    return "\n".join(sections)

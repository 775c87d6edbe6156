"""The error that the parent process raises when a job fails, and how it reads: root cause first.

`job_run` detects failures.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LONGEST_OUTPUT = 10_000

# What gloo, or shared memory, says on a rank whose peer is gone.
_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connectFullMesh failed",
    "has left group",
)


@dataclass(frozen=True)
class FailedRank:
    """How one rank of a job failed.

    Attributes:
        rank: the rank.
        summary: one line: `ValueError: ...`, `killed by SIGKILL`, `still running after timeout=2.0 s`.
        traceback: the exception's traceback, or the stacks of all threads of a rank that hung or crashed.
        time: `time.monotonic()` of the failure.
        stopped: whether the pool ended this rank because another one had failed.
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
        failures: the failed ranks, root cause first: the earliest failure, then the later ones, then the
            ranks that only failed because a peer was gone.
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
    """Says how a process ended: `exited with code 3`, `killed by SIGKILL (exit code -9)`."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name} (exit code {returncode})"
    return f"exited with code {returncode}"


def prefix_output(rank: int, output: str) -> str:
    """Puts `[rank 1] ` before each line of what a rank printed; of a very long output, keeps the end."""
    if len(output) > _LONGEST_OUTPUT:
        output = f"... {len(output) - _LONGEST_OUTPUT} characters left out ...\n{output[-_LONGEST_OUTPUT:]}"
    return "".join(f"[rank {rank}] {line}\n" for line in output.splitlines())


def _message(ordered: Sequence[FailedRank], world_size: int, outputs: Mapping[int, str]) -> str:
    first = ordered[0]
    sections = [f"rank {first.rank} of {world_size} failed: {first.summary}"]
    # Ranks that failed alike stand together: most often all ranks raise the same error.
    for (summary, traceback), alike in itertools.groupby(ordered, lambda failed: (failed.summary, failed.traceback)):
        ranks = [failed.rank for failed in alike]
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        sections.append(f"----- {label}: {summary.splitlines()[0]} -----\n{traceback.rstrip()}")
    sections += [
        f"----- output of rank {rank} -----\n{prefix_output(rank, outputs[rank]).rstrip()}" for rank in sorted(outputs)
    ]
    return "\n".join(sections)

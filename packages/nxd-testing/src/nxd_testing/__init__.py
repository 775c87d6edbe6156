"""Run a function on N ranks, for tests: warm processes, real collectives, failures that name the rank.

Contains the pool of ranks, its pytest plugin, the replicas that run XLA's graphs on a CPU, the stand-in for the native
`neuron` device and a runner for command lines under torchrun.
"""

from nxd_testing.deadlines import deadline
from nxd_testing.failure import FailedRank, RankFailure
from nxd_testing.logical import LogicalPiece, assemble_logical, logical_pieces
from nxd_testing.neuron_ranks import register_neuron_ranks, run_on_neuron
from nxd_testing.operations import collectives_of, operations_of, sent_dtypes_of
from nxd_testing.pool import RankPool, run_on_ranks
from nxd_testing.replicas import run_on_replicas
from nxd_testing.torchrun import TorchrunResult, run_torchrun

__all__ = [
    "logical_pieces",
    "assemble_logical",
    "LogicalPiece",
    "run_on_ranks",
    "run_on_replicas",
    "run_on_neuron",
    "register_neuron_ranks",
    "RankPool",
    "RankFailure",
    "FailedRank",
    "run_torchrun",
    "TorchrunResult",
    "deadline",
    "operations_of",
    "collectives_of",
    "sent_dtypes_of",
]

"""Run a function on N ranks in tests: warm processes, real collectives, failures that name the rank.

Contains the pool of ranks, its pytest plugin, replicas that run XLA graphs on the CPU, a stand-in for the native
`neuron` device, and a runner for programs under torchrun.
"""

from nxd_testing.failure import FailedRank, RankFailure, deadline
from nxd_testing.logical import LogicalPiece, assemble_logical, logical_pieces
from nxd_testing.neuron_ranks import register_neuron_ranks, run_on_neuron
from nxd_testing.operations import collectives_of, operations_of, reads_of, sent_dtypes_of
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
    "reads_of",
]

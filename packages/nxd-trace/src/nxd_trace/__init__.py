"""Compile tensor-parallel models once, save them, load them, and call them like a function."""

from nxd_trace.buckets import BucketModelConfig
from nxd_trace.caching import TraceContent, source_digest
from nxd_trace.errors import MissingMainGuardError, ModelFolderError, WorkerError
from nxd_trace.model import TensorParallelModel
from nxd_trace.parallel_model import (
    ModelBuilder,
    parallel_model_load,
    parallel_model_save,
    parallel_model_trace,
    trace_module,
)
from nxd_trace.programs import Program, Signature, TensorSpec
from nxd_trace.sharding import rank_weights, shard_checkpoint, whole_weights, write_rank_weights
from nxd_trace.workers.fork_server import start_fork_server
from nxd_trace.workers.pickling import prepare_workers

__version__ = "0.1.0"

__all__ = [
    # trace, save, load
    "parallel_model_trace",
    "parallel_model_save",
    "parallel_model_load",
    "BucketModelConfig",
    "ModelBuilder",
    "shard_checkpoint",
    "prepare_workers",
    "start_fork_server",
    # cached traces
    "TraceContent",
    "source_digest",
    # existing models
    "trace_module",
    "Program",
    "rank_weights",
    "whole_weights",
    "write_rank_weights",
    # traced models
    "TensorParallelModel",
    "Signature",
    "TensorSpec",
    # errors
    "WorkerError",
    "ModelFolderError",
    "MissingMainGuardError",
]

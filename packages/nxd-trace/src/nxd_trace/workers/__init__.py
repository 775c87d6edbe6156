"""The processes that hold a model's shards: one per rank, started by this package without torchrun."""

from nxd_trace.workers.group import WorkerGroup

__all__ = ["WorkerGroup"]

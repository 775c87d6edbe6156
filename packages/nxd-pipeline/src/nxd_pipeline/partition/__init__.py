"""Cutting a model into pipeline stages: by a trace of it, or by hand."""

from nxd_pipeline.partition.cuts import check_cuts, even_cuts, layer_names
from nxd_pipeline.partition.manual import manual_partition
from nxd_pipeline.partition.stage import Stage, Wiring
from nxd_pipeline.partition.trace import trace_model
from nxd_pipeline.partition.traced import traced_partition

__all__ = [
    "Stage",
    "Wiring",
    # where to cut
    "layer_names",
    "even_cuts",
    "check_cuts",
    # ways to cut
    "manual_partition",
    "traced_partition",
    "trace_model",
]

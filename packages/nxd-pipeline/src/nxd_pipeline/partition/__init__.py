"""Cutting a model into pipeline stages: by a trace of it, by its structure, or by hand."""

from nxd_pipeline.partition.cuts import LayerClasses, balanced_cuts, check_cuts, even_cuts, layer_flops, layer_names
from nxd_pipeline.partition.hugging_face import hugging_face_structure
from nxd_pipeline.partition.local_parts import LocalParts, ParamInit, materialize, without_other_stages
from nxd_pipeline.partition.manual import LossFunction, StageOfLayers, manual_partition, sequence_partition
from nxd_pipeline.partition.options import (
    OLD_RUNTIME_FLAGS,
    Balance,
    PartitionedModel,
    PartitionOptions,
    Tracer,
    check_old_flags,
    partition_model,
    whole_model,
)
from nxd_pipeline.partition.stage import Stage, Wiring
from nxd_pipeline.partition.structure import ModelStructure, structural_partition
from nxd_pipeline.partition.trace import trace_model
from nxd_pipeline.partition.traced import traced_partition

__all__ = [
    "Stage",
    "Wiring",
    "PartitionOptions",
    "OLD_RUNTIME_FLAGS",
    "check_old_flags",
    "PartitionedModel",
    "partition_model",
    "whole_model",
    "Balance",
    "Tracer",
    "LayerClasses",
    "layer_names",
    "even_cuts",
    "balanced_cuts",
    "layer_flops",
    "check_cuts",
    "traced_partition",
    "trace_model",
    "structural_partition",
    "ModelStructure",
    "hugging_face_structure",
    "manual_partition",
    "sequence_partition",
    "LossFunction",
    "StageOfLayers",
    "LocalParts",
    "without_other_stages",
    "materialize",
    "ParamInit",
]

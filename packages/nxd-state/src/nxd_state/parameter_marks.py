"""Marks of parameters: attributes that tell optimizers, clipping and checkpoints how to treat a parameter.

The attributes have the names of the documented API, since scripts set some of them directly. Which elements of a
logical tensor a rank holds is not a mark: see `shard_spec`.

| attribute | meaning | set by |
|---|---|---|
| `sequence_parallel_enabled` | each tensor-parallel rank has a summand of the gradient | layers, adapters, scripts |
| `expert_model_parallel` | a weight of experts; its replicas are the ranks with the same experts | layers, adapters |
| `shared` | a duplicate of a weight tied over pipeline stages; neither counted nor saved | the pipeline, scripts |
| `summed_over_stages` | the pipeline adds gradients of other stages to `.grad` of a tied weight | the pipeline |
| `tensor_model_parallel` | split over the tensor-parallel ranks | layers, `set_partition_attributes` |
| `partition_dim`, `partition_stride`, `num_partitions` | how it is split; see `Partition` | the same |
| `matrix_layout` | which matrices it holds; see `MatrixLayout` | layers, `nxd_optim.muon_parameter_groups` |
"""

from typing import NamedTuple

from torch import Tensor

_SEQUENCE_PARALLEL = "sequence_parallel_enabled"
_EXPERT = "expert_model_parallel"
_TIED_COPY = "shared"
_SUMMED_OVER_STAGES = "summed_over_stages"
_TENSOR_PARALLEL = "tensor_model_parallel"
_MATRIX_LAYOUT = "matrix_layout"
_PARTITION_DIM, _PARTITION_STRIDE, _NUM_PARTITIONS = "partition_dim", "partition_stride", "num_partitions"


def is_sequence_parallel(parameter: Tensor) -> bool:
    """Whether each tensor-parallel rank sees only part of the sequence with this parameter.

    Its gradient is then a summand on each rank: optimizers sum it over the tensor-parallel ranks before their step.
    """
    return bool(getattr(parameter, _SEQUENCE_PARALLEL, False))


def mark_sequence_parallel(parameter: Tensor, enabled: bool = True) -> None:
    """Say whether `is_sequence_parallel` holds for a parameter."""
    setattr(parameter, _SEQUENCE_PARALLEL, enabled)


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter belongs to experts: its replicas are the ranks that hold the same experts."""
    return bool(getattr(parameter, _EXPERT, False))


def mark_expert(parameter: Tensor) -> None:
    """Mark a parameter as one of experts."""
    setattr(parameter, _EXPERT, True)


def is_tied_copy(parameter: Tensor) -> bool:
    """Whether this is a duplicate of a tied weight that another stage holds and counts."""
    return bool(getattr(parameter, _TIED_COPY, False))


def is_summed_over_stages(parameter: Tensor) -> bool:
    """Whether a pipeline adds the gradients of other stages to the parameter's `.grad`."""
    return bool(getattr(parameter, _SUMMED_OVER_STAGES, False))


def mark_tied_over_stages(parameter: Tensor, *, is_copy: bool) -> None:
    """Mark a parameter as one that several pipeline stages hold; `is_copy` on all but the first of them."""
    setattr(parameter, _TIED_COPY, is_copy)
    setattr(parameter, _SUMMED_OVER_STAGES, True)


def is_tensor_parallel(parameter: Tensor) -> bool:
    """Whether a parameter is marked as split over the tensor-parallel ranks."""
    return bool(getattr(parameter, _TENSOR_PARALLEL, False))


class Partition(NamedTuple):
    """The split of a parameter over the tensor-parallel ranks.

    Attributes:
        dim: the dim that is split.
        num_partitions: number of parts.
        stride: number of fused matrices along `dim`, each of which is split.
    """

    dim: int
    num_partitions: int
    stride: int


def get_partition(parameter: Tensor) -> Partition | None:
    """The split of a parameter; None if it is whole."""
    dim: int | None = getattr(parameter, _PARTITION_DIM, None)
    if dim is None:
        return None
    return Partition(dim, getattr(parameter, _NUM_PARTITIONS, 1), getattr(parameter, _PARTITION_STRIDE, 1))


def set_partition_attributes(parameter: Tensor, *, partition_dim: int, num_partitions: int, stride: int = 1) -> None:
    """Mark a parameter as split over the tensor-parallel ranks."""
    setattr(parameter, _TENSOR_PARALLEL, True)
    setattr(parameter, _PARTITION_DIM, partition_dim)
    setattr(parameter, _PARTITION_STRIDE, stride)
    setattr(parameter, _NUM_PARTITIONS, num_partitions)


class MatrixLayout(NamedTuple):
    """The matrices of linear maps in the last two dims of a parameter, or of each of its logical tensors.

    Attributes:
        outputs_dim: the dim of the outputs: -2 in `[..., outputs, inputs]`, as in `nn.Linear`; -1 in `[..., inputs,
            outputs]`.
        sections: numbers of outputs of several matrices that take turns along this dim, from its start to its end:
            `(q, kv, kv)` for queries above keys above values, `(1, 1)` for two matrices whose outputs alternate.
            Empty for one matrix.
    """

    outputs_dim: int = -2
    sections: tuple[int, ...] = ()


def get_matrix_layout(parameter: Tensor) -> MatrixLayout | None:
    """The matrices in a parameter; None if it is not marked, and so is one matrix `[outputs, inputs]`, or a stack."""
    layout: MatrixLayout | None = getattr(parameter, _MATRIX_LAYOUT, None)
    return layout


def mark_matrix_layout(parameter: Tensor, layout: MatrixLayout) -> None:
    """Say which matrices a parameter holds, for optimizers that treat each matrix as a whole."""
    setattr(parameter, _MATRIX_LAYOUT, layout)


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Copy all marks but `summed_over_stages` to a parameter that replaces another."""
    copied = (_TENSOR_PARALLEL, _EXPERT, _PARTITION_DIM, _PARTITION_STRIDE, _NUM_PARTITIONS, _SEQUENCE_PARALLEL)
    for attribute in (*copied, _TIED_COPY, _MATRIX_LAYOUT):
        if hasattr(source, attribute):
            setattr(target, attribute, getattr(source, attribute))

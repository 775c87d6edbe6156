"""Marks of parameters: attributes of the documented names, which scripts may set themselves."""

import pytest
import torch
from nxd_state.parameter_marks import (
    MatrixLayout,
    Partition,
    copy_marks,
    get_matrix_layout,
    get_partition,
    is_expert,
    is_sequence_parallel,
    is_summed_over_stages,
    is_tensor_parallel,
    is_tied_copy,
    mark_expert,
    mark_matrix_layout,
    mark_sequence_parallel,
    mark_tied_over_stages,
    set_partition_attributes,
)
from torch import nn

NAMES = {
    is_sequence_parallel: "sequence_parallel_enabled",
    is_expert: "expert_model_parallel",
    is_tied_copy: "shared",
    is_summed_over_stages: "summed_over_stages",
    is_tensor_parallel: "tensor_model_parallel",
}


def new_parameter():
    return nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize(("mark", "name"), NAMES.items())
def test_mark_is_the_attribute_of_the_documented_name(mark, name):
    parameter = new_parameter()
    assert mark(parameter) is False
    setattr(parameter, name, True)
    assert mark(parameter) is True


def test_marking_sets_the_documented_attributes():
    parameter = new_parameter()

    mark_expert(parameter)
    mark_sequence_parallel(parameter)
    mark_tied_over_stages(parameter, is_copy=False)
    set_partition_attributes(parameter, partition_dim=1, num_partitions=3, stride=2)

    assert parameter.__dict__ == {
        "expert_model_parallel": True,
        "sequence_parallel_enabled": True,
        "shared": False,
        "summed_over_stages": True,
        "tensor_model_parallel": True,
        "partition_dim": 1,
        "num_partitions": 3,
        "partition_stride": 2,
    }


def test_partition_of_a_whole_parameter_is_none_and_missing_numbers_are_one():
    parameter = new_parameter()
    assert get_partition(parameter) is None
    parameter.partition_dim = 1
    assert get_partition(parameter) == Partition(1, num_partitions=1, stride=1)


def test_matrix_layout_is_copied_with_the_marks():
    source, target = new_parameter(), new_parameter()
    assert get_matrix_layout(source) is None
    mark_matrix_layout(source, MatrixLayout(-1, (2, 1)))

    copy_marks(source, target)

    assert get_matrix_layout(target) == MatrixLayout(outputs_dim=-1, sections=(2, 1))


def test_copy_marks_leaves_sums_over_stages_to_the_pipeline():
    source, target = new_parameter(), new_parameter()
    set_partition_attributes(source, partition_dim=0, num_partitions=2)
    mark_tied_over_stages(source, is_copy=True)

    copy_marks(source, target)

    assert (get_partition(target), is_tied_copy(target)) == (Partition(0, 2, 1), True)
    assert not is_summed_over_stages(target)

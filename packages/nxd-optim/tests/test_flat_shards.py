"""A range of a flattened tensor is a handful of boxes, and their logical positions are those of the shard metadata."""

from itertools import pairwise
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from nxd_optim.flat_shards import boxes_of_flat_range, shards_of_range
from nxd_state import ShardSpec, fuse_along, set_shard_spec, shard_along

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    ends = draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape))))
    return shape, min(ends), max(ends)


@settings(deadline=None)
@given(ranges())
def test_boxes_hold_the_elements_of_the_range_in_order(case):
    shape, start, stop = case
    elements = torch.arange(prod(shape)).view(shape)

    boxes = boxes_of_flat_range(shape, start, stop)

    found = [value for box in boxes for value in elements[box.slices].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)


@st.composite
def specs(draw):
    """The specs of one parameter on all ranks: plain, strided, padded, copied, fused with another, or whole."""
    size = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["whole", "along", "strided", "padded", "copies", "fused"]))
    rows, columns, dim = draw(st.integers(1, 3)) * size, draw(st.integers(1, 4)), draw(st.integers(0, 1))
    shape = (rows, columns) if dim == 0 else (columns, rows)
    if kind == "whole":
        return [ShardSpec.whole(shape, copies=size)] * size
    if kind == "strided":
        shape = tuple(2 * length if index == dim else length for index, length in enumerate(shape))
    specs = []
    for rank in range(size):
        here = {"rank": rank, "size": size}
        if kind == "strided":
            specs.append(shard_along(shape, dim, **here, stride=2))
        elif kind == "padded":
            specs.append(shard_along(shape, dim, **here, padded_length=rows + size))
        elif kind == "copies":
            specs.append(shard_along(shape, dim, rank=0, size=1, copies=size))
        elif kind == "fused":
            specs.append(fuse_along([shard_along(shape, dim, **here, name=name) for name in "qk"], dim))
        else:
            specs.append(shard_along(shape, dim, **here))
    return specs


def with_spec(spec):
    parameter = torch.empty(spec.local_shape)
    set_shard_spec(parameter, spec)
    return parameter


@settings(deadline=None)
@given(specs(), st.integers(1, 5))
def test_shards_of_all_ranks_and_ranges_hold_each_logical_element_as_often_as_there_are_copies(specs, parts):
    held, promised = {}, {}
    for spec in specs:
        for start, stop in pairwise([prod(spec.local_shape) * cut // parts for cut in range(parts + 1)]):
            for shard in shards_of_range(with_spec(spec), start, stop, torch.zeros(stop - start)):
                shape = shard.logical_shape
                held.setdefault(shard.name, torch.zeros(shape))[shard.box.slices] += 1
                promised.setdefault(shard.name, torch.zeros(shape))[shard.box.slices] = shard.copies

    assert held
    for name, counts in held.items():
        assert torch.equal(counts, promised[name])


@settings(deadline=None)
@given(specs(), st.data())
def test_views_of_a_flat_range_are_the_logical_elements(specs, data):
    spec = data.draw(st.sampled_from(specs))
    wholes = {name: torch.rand(shape) for name, shape in spec.logical_shapes.items()}
    local = torch.full(spec.local_shape, -1.0)
    spec.copy_from_logical(wholes, local)
    start = data.draw(st.integers(0, local.numel()))
    stop = data.draw(st.integers(start, local.numel()))
    flat = local.reshape(-1)[start:stop].clone()

    for shard in shards_of_range(with_spec(spec), start, stop, flat):
        assert torch.equal(shard.tensor, wholes[shard.name][shard.box.slices])
        shard.tensor.fill_(-1)

    assert (flat == -1).all()  # the views share memory and cover all but the padding, which was -1 before


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_range_outside_the_tensor_raises(start, stop):
    with pytest.raises(ValueError, match=rf"range {start}:{stop} is outside the 6 elements of shape \(2, 3\)"):
        boxes_of_flat_range((2, 3), start, stop)

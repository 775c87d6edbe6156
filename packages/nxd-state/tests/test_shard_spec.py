"""Shard metadata: that the boxes of all ranks cover each logical tensor exactly, whatever the way it is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_state import (
    Box,
    ShardPiece,
    ShardSpec,
    check_shard_specs,
    copy_parameter_attributes,
    fuse_along,
    get_shard_spec,
    is_padded_on_some_rank,
    set_partition_attributes,
    set_shard_spec,
    shard_along,
)

sizes = st.integers(1, 5)
quick = settings(deadline=None, max_examples=100)


@st.composite
def shapes(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))


def cut(logical: torch.Tensor, spec: ShardSpec, padding: float = -1.0) -> torch.Tensor:
    """The local tensor that `spec` describes."""
    local = torch.full(spec.local_shape, padding)
    spec.copy_from_logical(logical, local)
    return local


def assemble(locals_: list[torch.Tensor], specs: list[ShardSpec], name: str = "") -> torch.Tensor:
    """The logical tensor from all ranks' parts; nan where nobody has anything."""
    shapes = {key: shape for spec in specs for key, shape in spec.logical_shapes.items()}
    logical = {key: torch.full(shape, float("nan")) for key, shape in shapes.items()}
    for local, spec in zip(locals_, specs, strict=True):
        spec.copy_to_logical(local, logical)
    return logical[name]


def holders(specs: list[ShardSpec], name: str = "") -> torch.Tensor:
    """How many ranks hold each element of the logical tensor, counted one by one."""
    shape = next(piece.logical_shape for spec in specs for piece in spec.pieces if piece.name == name)
    count = torch.zeros(shape, dtype=torch.int64)
    for spec in specs:
        for piece in spec.pieces:
            if piece.name == name:
                count[piece.logical.slices] += 1
    return count


@quick
@given(shapes(), sizes, sizes, st.data())
def test_plain_and_strided_shards_cover_the_tensor_once(shape, size, stride, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= size * stride
    logical = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    specs = [shard_along(shape, dim, rank=rank, size=size, stride=stride) for rank in range(size)]

    check_shard_specs(specs)
    assert (holders(specs) == 1).all()
    chunks = logical.chunk(size * stride, dim)
    for rank, spec in enumerate(specs):
        assert torch.equal(cut(logical, spec), torch.cat(chunks[rank::size], dim))


@quick
@given(shapes(), sizes, st.integers(0, 7), st.data())
def test_padded_shards_cover_the_tensor_once_and_name_the_padding(shape, size, padding, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] += 2 * size
    padded = -(-(shape[dim] + padding) // size) * size
    logical = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    specs = [shard_along(shape, dim, rank=rank, size=size, padded_length=padded) for rank in range(size)]

    check_shard_specs(specs)
    assert (holders(specs) == 1).all()
    locals_ = [cut(logical, spec) for spec in specs]
    assert torch.equal(torch.cat(locals_, dim).narrow(dim, 0, shape[dim]), logical)
    assert (torch.cat(locals_, dim).narrow(dim, shape[dim], padded - shape[dim]) == -1).all()


@quick
@given(sizes, sizes, sizes, st.integers(0, 7))
def test_padded_strided_shards_pad_each_fused_matrix_at_its_own_end(size, stride, rows, padding):
    padded = -(-(rows + padding) // size) * size
    logical = torch.arange(float(stride * rows * 2)).reshape(stride * rows, 2)

    specs = [
        shard_along(logical.shape, 0, rank=rank, size=size, stride=stride, padded_length=stride * padded)
        for rank in range(size)
    ]

    check_shard_specs(specs)
    assert (holders(specs) == 1).all()
    assert [spec.has_padding for spec in specs] == [padded * (rank + 1) > rows * size for rank in range(size)]
    locals_ = torch.stack([cut(logical, spec) for spec in specs])  # [size, stride * chunk, 2]
    matrices = locals_.unflatten(1, (stride, -1)).transpose(0, 1).flatten(1, 2)  # [stride, padded, 2]
    assert torch.equal(matrices[:, :rows], logical.view(stride, rows, 2))
    assert (matrices[:, rows:] == -1).all()


@quick
@given(sizes, sizes, sizes)
def test_replicated_shards_cover_the_tensor_as_often_as_there_are_copies(size, copies, rows):
    shape = (size * rows, 3)
    specs = [shard_along(shape, 0, rank=rank // copies, size=size, copies=copies) for rank in range(size * copies)]

    check_shard_specs(specs)
    assert (holders(specs) == copies).all()


@quick
@given(sizes, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 1, -1, -2]))
def test_fused_shards_cover_each_of_their_tensors(size, copies, head_rows, columns, dim):
    ranks = size * copies
    lengths = {"q_proj.weight": ranks * head_rows, "k_proj.weight": size * head_rows, "v_proj.weight": size * head_rows}
    along = {name: (n, columns) if dim in (0, -2) else (columns, n) for name, n in lengths.items()}
    logical = {name: torch.randn(shape) for name, shape in along.items()}

    def spec_of(rank):
        q = shard_along(along["q_proj.weight"], dim, rank=rank, size=ranks, name="q_proj.weight")
        kv = [
            shard_along(along[name], dim, rank=rank // copies, size=size, copies=copies, name=name)
            for name in ("k_proj.weight", "v_proj.weight")
        ]
        return fuse_along([q, *kv], dim)

    specs = [spec_of(rank) for rank in range(ranks)]

    check_shard_specs(specs)
    for name, expected_holders in (("q_proj.weight", 1), ("k_proj.weight", copies), ("v_proj.weight", copies)):
        assert (holders(specs, name) == expected_holders).all()
    for spec in specs:
        assert sum(piece.local.numel for piece in spec.pieces) == torch.Size(spec.local_shape).numel()
    locals_ = [torch.empty(spec.local_shape) for spec in specs]
    for local, spec in zip(locals_, specs, strict=True):
        spec.copy_from_logical(logical, local)
    assert all(torch.equal(assemble(locals_, specs, name), tensor) for name, tensor in logical.items())


def test_shard_along_gate_up_of_two_ranks_interleaves_as_documented():
    spec = shard_along((8, 2), 0, rank=1, size=2, stride=2)

    assert spec.local_shape == (4, 2)
    assert [(piece.local.offset[0], piece.logical.offset[0]) for piece in spec.pieces] == [(0, 2), (2, 6)]


def test_shard_along_rank_of_padding_alone_has_no_pieces():
    spec = shard_along((4, 2), 0, rank=2, size=3, padded_length=6)

    assert spec == ShardSpec((2, 2), ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 3}, r"3 shards do not divide dim 0 of shape \(10, 4\) \(length 10\); pad it to 12"),
        ({"size": 4, "padded_length": 11}, r"\(length 11\); pad it to 12 or use fewer ranks"),
        ({"size": 3, "stride": 2}, "3 shards of 2 fused matrices do not divide .*; pad it to 12"),
        ({"size": 2, "stride": 3}, r"\(10, 4\) cannot be 3 fused matrices of equal length; .* that 3 divides"),
        ({"size": 2, "stride": 3, "padded_length": 12}, "cannot be 3 fused matrices"),
        ({"size": 2, "padded_length": 8}, r"padded_length=8 is shorter than dim 0 of shape \(10, 4\); use 10 or more"),
        ({"size": 2, "rank": 2}, r"rank=2 is outside the 2 shards; use 0\.\.1"),
        ({"size": 2, "rank": -1}, "rank=-1 is outside the 2 shards"),
        ({"size": 2, "dim": 2}, r"dim=2 is outside a tensor of shape \(10, 4\)"),
    ],
)
def test_shard_along_impossible_cut_raises_naming_numbers_and_what_to_use(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_along((10, 4), **{"dim": 0, "rank": 0} | arguments)


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [shard_along((4, 2), 0, rank=0, size=2), shard_along((4, 3), 0, rank=0, size=2)],
        [shard_along((4, 2), 0, rank=0, size=2), shard_along((4, 2), 0, rank=0, size=2, axis="ep")],
    ],
    ids=["none", "widths", "axes"],
)
def test_fuse_along_specs_that_do_not_fit_raises(specs):
    with pytest.raises(ValueError, match=r"no specs to fuse|cannot be fused along dim 0"):
        fuse_along(specs, 0)


def test_copy_from_logical_converts_and_keeps_padding_and_copy_to_logical_is_its_inverse():
    spec = shard_along((5, 2), 0, rank=1, size=2, padded_length=6)
    whole = torch.arange(10.0).view(5, 2)
    parameter = torch.nn.Parameter(torch.full((3, 2), 7.0, dtype=torch.float64))

    spec.copy_from_logical(whole, parameter)

    assert parameter.tolist() == [[6.0, 7.0], [8.0, 9.0], [7.0, 7.0]]
    back = torch.zeros(5, 2)
    spec.copy_to_logical(parameter, back)
    assert torch.equal(back, torch.cat([torch.zeros(3, 2), whole[3:]]))


def test_whole_spec_copies_everything():
    spec = ShardSpec.whole((2, 3), copies=4)
    local = torch.zeros(2, 3)

    spec.copy_from_logical(torch.ones(2, 3), local)

    assert local.all()
    assert spec.logical_shapes == {"": (2, 3)}
    check_shard_specs([spec] * 4)


WHOLE = Box((0, 0), (2, 2))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([ShardPiece(WHOLE, Box((0, 0), (2, 1)), (2, 2))], "must have the same shape"),
        ([ShardPiece(WHOLE, Box((1, 0), (2, 2)), (2, 2))], "does not fit"),
        ([ShardPiece(Box((0, 1), (2, 2)), WHOLE, (2, 2))], "does not fit"),
        ([ShardPiece(Box((-1, 0), (2, 2)), WHOLE, (2, 2))], "does not fit"),
        ([ShardPiece(WHOLE, WHOLE, (2, 2, 1))], "does not fit"),
        ([ShardPiece(WHOLE, WHOLE, (2, 2)), ShardPiece(WHOLE, WHOLE, (2, 2), "other")], "overlaps another piece"),
    ],
)
def test_spec_of_impossible_boxes_raises(pieces, message):
    with pytest.raises(ValueError, match=message):
        ShardSpec((2, 2), tuple(pieces))


def test_check_of_specs_with_a_missing_rank_raises_naming_the_element():
    specs = [shard_along((6, 2), 0, rank=rank, size=3) for rank in (0, 2)]

    with pytest.raises(ValueError, match=r"element \(2, 0\) of logical tensor '' \(6, 2\) is held by 0 ranks"):
        check_shard_specs(specs)


def test_check_of_specs_with_a_rank_twice_raises_naming_the_element():
    specs = [shard_along((4, 2), 0, rank=rank, size=2) for rank in (0, 1, 1)]

    with pytest.raises(ValueError, match=r"element \(2, 0\) .* is held by 2 ranks, but its spec says 1"):
        check_shard_specs(specs)


def test_check_of_specs_that_disagree_about_the_shape_raises():
    specs = [shard_along((4, 2), 0, rank=0, size=2), shard_along((4, 3), 0, rank=1, size=2)]

    with pytest.raises(ValueError, match=r"logical tensor '' has several shapes: \[\(4, 2\), \(4, 3\)\]"):
        check_shard_specs(specs)


def test_check_of_specs_of_a_huge_tensor_needs_no_memory_of_its_size():
    shape = (1 << 40, 1 << 40)

    check_shard_specs([shard_along(shape, 0, rank=rank, size=64, stride=2) for rank in range(64)])


def test_set_shard_spec_of_another_shape_raises():
    with pytest.raises(ValueError, match=r"spec of local shape \(2, 2\) given for a tensor of \(3, 2\)"):
        set_shard_spec(torch.empty(3, 2), shard_along((4, 2), 0, rank=0, size=2))


def test_get_shard_spec_gives_what_was_set_and_none_otherwise():
    parameter, spec = torch.nn.Parameter(torch.empty(2, 2)), shard_along((4, 2), 0, rank=0, size=2)
    before = get_shard_spec(parameter)

    set_shard_spec(parameter, spec)

    assert before is None
    assert get_shard_spec(parameter) is spec


def test_copy_parameter_attributes_carries_spec_and_documented_attributes():
    source, target = (torch.nn.Parameter(torch.empty(2, 2)) for _ in range(2))
    set_shard_spec(source, shard_along((4, 2), 0, rank=1, size=2))
    set_partition_attributes(source, partition_dim=0, num_partitions=2)
    source.sequence_parallel_enabled = True
    source.shared = True

    copy_parameter_attributes(source, target)

    assert vars(target) == vars(source)


def test_copy_parameter_attributes_to_another_shape_raises():
    source = torch.nn.Parameter(torch.empty(2, 2))
    set_shard_spec(source, shard_along((4, 2), 0, rank=1, size=2))

    with pytest.raises(ValueError, match="given for a tensor of"):
        copy_parameter_attributes(source, torch.empty(4, 2))


def part_of_rank(specs: list[ShardSpec], num_ranks: int) -> torch.nn.Parameter:
    spec = fuse_along(specs, 0) if len(specs) > 1 else specs[0]
    parameter = torch.nn.Parameter(torch.zeros(spec.local_shape))
    set_shard_spec(parameter, spec)
    set_partition_attributes(parameter, partition_dim=0, num_partitions=num_ranks)
    return parameter


@pytest.mark.pairs
@pytest.mark.parametrize(("length", "is_padded"), [(8, False), (7, True), (5, True), (1, True)])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("is_fused", [False, True])
def test_padding_on_one_rank_is_known_on_all(length, is_padded, copies, is_fused):
    ranks = 4
    whole = [shard_along((8, 3), 0, rank=rank, size=ranks, name="whole") for rank in range(ranks)]
    split = [
        shard_along(
            (length, 3), 0, rank=rank // copies, size=ranks // copies, padded_length=8, copies=copies, name="split"
        )
        for rank in range(ranks)
    ]
    parts = [part_of_rank([whole[rank]] * is_fused + [split[rank]], ranks) for rank in range(ranks)]

    assert [is_padded_on_some_rank(part) for part in parts] == [is_padded] * ranks


def test_padding_of_a_parameter_that_is_not_split_is_nowhere():
    assert not is_padded_on_some_rank(torch.nn.Parameter(torch.zeros(3)))

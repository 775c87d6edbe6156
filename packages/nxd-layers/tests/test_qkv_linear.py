"""`GQAQKVColumnParallelLinear` against three `nn.Linear` in one process, in float64."""

import itertools
import warnings

import pytest
import torch
from nxd_layers import scatter_to_sequence_parallel_region
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_state import (
    active_group,
    all_gather,
    all_gather_object,
    check_shard_specs,
    get_group,
    get_shard_spec,
    get_world_group,
    initialize_model_parallel,
)
from nxd_testing import assemble_logical, logical_pieces, run_on_ranks
from torch import nn
from torch.nn import functional as F

INPUT, HEAD = 6, 2
FLOAT64 = {"dtype": torch.float64}
# tensor-parallel degree: query heads, key/value heads, multiplier
HEADS = {
    1: [(4, 4, 1), (4, 2, 1)],
    2: [(4, 4, 1), (4, 2, 1), (4, 1, 2), (6, 3, 2), (4, 2, 2)],
    4: [(8, 4, 1), (4, 2, 2), (8, 1, 4), (12, 3, 4), (12, 6, 2), (8, 2, 4)],
}


def make_layer(heads, **arguments):
    query, key_value, multiplier = heads
    torch.manual_seed(0)
    return GQAQKVColumnParallelLinear(
        INPUT,
        [query * HEAD, key_value * HEAD],
        kv_size_multiplier=multiplier,
        num_key_value_heads=key_value,
        **{**FLOAT64, **arguments},
    )


def whole_tensors(layer, *, grads=False):
    """Weights and biases, or their gradients, by logical name; copies that differ raise."""
    group = active_group("tp")
    named = [(name, p, p.grad if grads else p) for name, p in layer.named_parameters()]
    for _, parameter, _ in named:
        check_shard_specs(all_gather_object(get_shard_spec(parameter), group))
    pieces = all_gather_object(logical_pieces(named), group)
    return {name.partition(":")[2]: tensor for name, tensor in assemble_logical(pieces).items()}


def own_heads(whole, multiplier):
    """This rank's part of q, k or v `[..., heads * HEAD]`: each head `multiplier` times, then equal parts."""
    group = active_group("tp")
    repeated = whole.unflatten(-1, (-1, HEAD)).repeat_interleave(multiplier, dim=-2).flatten(-2)
    return repeated.chunk(group.size, dim=-1)[group.rank]


@pytest.fixture
def check_against_linears(assert_same):
    """Compares outputs and every gradient of a layer with those of `F.linear` on the logical weights."""

    def check(layer, *, sequence_dim=None):
        torch.manual_seed(1)
        whole_input = torch.randn(4, 8, INPUT, dtype=torch.float64, requires_grad=True)
        wholes = {name: tensor.requires_grad_() for name, tensor in whole_tensors(layer).items()}
        expected = [
            F.linear(whole_input, wholes[f"{name}_proj.weight"], wholes.get(f"{name}_proj.bias")) for name in "qkv"
        ]
        multipliers = [1, layer.kv_size_multiplier, layer.kv_size_multiplier]
        if not layer.gather_output:
            expected = [own_heads(whole, times) for whole, times in zip(expected, multipliers, strict=True)]
        # Every rank, and every copy of a head, gets a gradient of its own; together they are those of one process.
        torch.manual_seed(2 if layer.gather_output else 3 + active_group("tp").rank)
        output_grads = [torch.randn_like(output) for output in expected]
        torch.autograd.backward(expected, output_grads)

        own_input, input_grad = whole_input.detach().clone(), whole_input.grad
        group = active_group("tp")
        if not layer.gather_output:
            input_grad = all_gather(input_grad.unsqueeze(0), group).sum(dim=0) if group.size > 1 else input_grad
            for tensor in wholes.values():
                tensor.grad = all_gather(tensor.grad.unsqueeze(0), group).sum(dim=0) if group.size > 1 else tensor.grad
        if sequence_dim is not None:
            own_input = scatter_to_sequence_parallel_region(own_input, sequence_dim)
            input_grad = scatter_to_sequence_parallel_region(input_grad, sequence_dim)
        own_input.requires_grad_()
        outputs = layer(own_input)
        torch.autograd.backward(outputs, output_grads)

        for output, tensor in zip(outputs, expected, strict=True):
            assert_same(output, tensor)
        assert_same(own_input.grad, input_grad)
        found = whole_tensors(layer, grads=True)
        assert found.keys() == wholes.keys()
        for name, tensor in wholes.items():
            assert_same(found[name], tensor.grad)

    return check


@pytest.mark.sample(2)
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("tp", HEADS)
def test_qkv_linear_equals_three_linears(on_tp, check_against_linears, tp, sequence_dim):
    def job():
        for heads, fuse, (bias, gather) in itertools.product(HEADS[tp], (False, True), [(True, False), (False, True)]):
            layer = make_layer(
                heads,
                bias=bias,
                gather_output=gather,
                fuse_qkv=fuse,
                sequence_parallel_enabled=sequence_dim is not None,
                sequence_dimension=sequence_dim or 0,
            )
            try:
                check_against_linears(layer, sequence_dim=sequence_dim)
            except AssertionError as error:
                raise AssertionError(f"{layer}: {error}") from error

    on_tp(tp, job)


@pytest.mark.parametrize("tp", HEADS)
def test_weights_at_initialisation_are_those_of_three_linears(on_tp, assert_same, tp):
    def job():
        for heads, fuse, bias in itertools.product(HEADS[tp], (False, True), (False, True)):
            found = whole_tensors(make_layer(heads, bias=bias, fuse_qkv=fuse, dtype=torch.float32))
            torch.manual_seed(0)
            linears = {name: nn.Linear(INPUT, heads[name != "q"] * HEAD, bias) for name in "qkv"}
            for name, linear in linears.items():
                for kind, parameter in linear.named_parameters():
                    assert_same(found[f"{name}_proj.{kind}"], parameter, rtol=0, atol=0)
            assert len(found) == (6 if bias else 3)

    on_tp(tp, job)


def test_init_method_fills_each_whole_weight(on_tp):
    def job():
        seen = []

        def fill(weight):
            seen.append(tuple(weight.shape))
            weight.fill_(len(seen))

        weights = whole_tensors(make_layer((4, 2, 2), bias=False, init_method=fill))
        return seen, [float(weights[f"{name}_proj.weight"].unique()) for name in "qkv"]

    assert on_tp(4, job)[1] == ([(8, INPUT), (4, INPUT), (4, INPUT)], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_copies_get_bitwise_equal_gradients(on_tp, fuse, autocast):
    def job():
        for heads in [(4, 2, 2), (12, 6, 2), (8, 2, 4)]:
            layer = make_layer(heads, fuse_qkv=fuse, gather_output=False, dtype=torch.float32)
            torch.manual_seed(5 + get_group("tp").rank)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = layer(torch.randn(7, INPUT))
            torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
            key = layer.weight_k.grad if not fuse else layer.weight_qkv.grad.split(layer._local_sizes)[1]
            by_head = all_gather(key, get_group("tp")).view(heads[1], heads[2], HEAD, INPUT)
            assert torch.equal(by_head, by_head[:, :1].expand_as(by_head))
            assert by_head.count_nonzero() == by_head.numel()
            assert (outputs[0].dtype, by_head.dtype) == (torch.bfloat16 if autocast else torch.float32, torch.float32)

    on_tp(4, job)


def test_parameters_have_the_documented_shapes_and_attributes(on_tp):
    def job():
        fused, apart = make_layer((8, 2, 2)), make_layer((8, 2, 2), fuse_qkv=False)
        return (
            {name: tuple(p.shape) for layer in (fused, apart) for name, p in layer.named_parameters()},
            {(p.tensor_model_parallel, p.partition_dim, p.num_partitions) for p in fused.parameters()},
            [(piece.name, piece.copies) for piece in get_shard_spec(fused.weight_qkv).pieces],
        )

    rows = {"qkv": 8, "q": 4, "k": 2, "v": 2}
    shapes = {f"weight_{name}": (length, INPUT) for name, length in rows.items()}
    shapes |= {f"bias_{name}": (length,) for name, length in rows.items()}
    names = [("q_proj.weight", 1), ("k_proj.weight", 2), ("v_proj.weight", 2)]
    assert on_tp(4, job) == [(shapes, {(True, 0, 4)}, names)] * 4


def test_rank_with_two_copies_of_a_head_says_so(on_tp):
    def job():
        layer = make_layer((6, 3, 2), fuse_qkv=False)
        return [
            (p.local.offset[0], p.logical.offset[0], p.local.shape[0]) for p in get_shard_spec(layer.weight_k).pieces
        ]

    # Rank 0 holds heads 0, 0 and 1, rank 1 heads 1, 2 and 2; consecutive heads make one box.
    assert on_tp(2, job) == [[(0, 0, 2), (2, 0, 4)], [(0, 2, 4), (4, 4, 2)]]


@pytest.mark.parametrize(("tp", "heads"), [(2, (4, 2, 1)), (4, (4, 2, 2))])
def test_documented_call_needs_no_number_of_heads_for_one_per_rank(on_tp, assert_same, tp, heads):
    def job():
        query, key_value, multiplier = heads
        torch.manual_seed(0)
        sizes = [query * HEAD, key_value * HEAD]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer = GQAQKVColumnParallelLinear(INPUT, sizes, True, False, False, torch.float64, None, multiplier)
        texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
        assert len(texts) == (multiplier > 1 and get_world_group().rank == 0)
        assert all("pass num_key_value_heads of the model" in text for text in texts)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = make_layer(heads, gather_output=False)
        input_ = torch.ones(3, INPUT, **FLOAT64)
        for output, expected in zip(layer(input_), other(input_), strict=True):
            assert_same(output, expected)

    on_tp(tp, job)


@pytest.mark.parametrize("sizes", [{"output_sizes": 8}, {"output_size": 8}, {"output_size": [8, 8]}])
def test_one_size_serves_all_three(on_tp, sizes):
    def job():
        return [tuple(o.shape) for o in GQAQKVColumnParallelLinear(INPUT, **sizes)(torch.ones(3, INPUT))]

    assert on_tp(2, job) == [[(3, 8)] * 3] * 2


def backward_of(outputs):
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("heads", "sequence_parallel", "gather", "forward", "backward"),
    [
        ((8, 4, 1), False, False, [], ["allreduce_"]),
        ((8, 4, 1), True, False, ["_allgather_base_"], ["alltoall_base_"]),  # gloo: a reduce-scatter as all-to-all
        ((8, 4, 1), False, True, ["_allgather_base_"], ["allreduce_"]),
        ((4, 2, 2), False, False, [], ["allreduce_", "allreduce_"]),
        ((4, 2, 2), True, False, ["_allgather_base_"], ["alltoall_base_", "allreduce_"]),
    ],
)
def test_qkv_linear_communicates_once_per_direction_and_once_for_copies(
    on_tp, collectives, heads, sequence_parallel, gather, forward, backward, fuse
):
    def job():
        layer = make_layer(heads, gather_output=gather, sequence_parallel_enabled=sequence_parallel, fuse_qkv=fuse)
        input_, outputs = torch.ones(3, 2, INPUT, requires_grad=True, **FLOAT64), []
        in_forward = collectives(lambda: outputs.extend(layer(input_)))
        in_backward = collectives(lambda: backward_of(outputs))
        return [[name.removeprefix("c10d::") for name in names] for names in (in_forward, in_backward)]

    assert on_tp(4, job) == [[forward, backward]] * 4


def test_copies_on_one_rank_alone_need_no_collective(on_tp, collectives):
    def job():
        layer = make_layer((4, 2, 2), gather_output=False)
        outputs = layer(torch.ones(3, INPUT, **FLOAT64))
        return collectives(lambda: backward_of(outputs))

    assert on_tp(2, job) == [[], []]


def test_sum_of_copies_is_on_its_way_while_the_query_gradient_is_computed(on_tp, operations):
    def job():
        layer = make_layer((4, 2, 2), gather_output=False)
        outputs = layer(torch.ones(3, INPUT, requires_grad=True, **FLOAT64))
        shown = {"aten::mm": "matmul", "wait": "wait", "c10d::allreduce_": "start"}
        return [shown[name] for name in operations(lambda: backward_of(outputs)) if name in shown]

    input_gradient, key_value_gradient, query_gradient = ["matmul"], ["matmul"], ["matmul"]
    expected = [*input_gradient, "start", *key_value_gradient, "start", *query_gradient, "wait", "wait"]
    assert on_tp(4, job) == [expected] * 4


@pytest.mark.parametrize("learning", ["weight_v", "bias_k", "weight_q"])
def test_frozen_parameters_leave_the_others_their_gradients(on_tp, assert_same, learning):
    def job():
        frozen, free = (make_layer((4, 2, 2), fuse_qkv=False) for _ in range(2))
        frozen.requires_grad_(False).get_parameter(learning).requires_grad_(True)
        for layer in (frozen, free):
            backward_of(layer(torch.arange(3.0 * INPUT, **FLOAT64).view(3, INPUT)))
        assert_same(frozen.get_parameter(learning).grad, free.get_parameter(learning).grad)
        assert [name for name, p in frozen.named_parameters() if p.grad is not None] == [learning]

    on_tp(4, job)


def bfloat16_errors(heads):
    """Of the gradients against float32's, relative to their norm."""
    layer = make_layer(heads, dtype=torch.bfloat16, gather_output=False)
    torch.manual_seed(1)
    input_ = torch.randn(256, INPUT, dtype=torch.bfloat16, requires_grad=True)
    whole_grads = [torch.randn(256, count * HEAD, dtype=torch.bfloat16) for count in (heads[0], heads[1], heads[1])]
    grads = [own_heads(grad, times) for grad, times in zip(whole_grads, [1, heads[2], heads[2]], strict=True)]
    outputs = layer(input_)
    torch.autograd.backward(outputs, grads)

    exact_input = input_.detach().float().requires_grad_()
    exact = {name: tensor.float().requires_grad_() for name, tensor in whole_tensors(layer).items()}
    for name, grad, times in zip("qkv", whole_grads, [1, heads[2], heads[2]], strict=True):
        output = F.linear(exact_input, exact[f"{name}_proj.weight"], exact[f"{name}_proj.bias"])
        output.backward(times * grad.float())  # every copy of a head has got this gradient
    found = {**whole_tensors(layer, grads=True), "input": input_.grad}
    expected = {**{name: tensor.grad for name, tensor in exact.items()}, "input": exact_input.grad}
    assert {tensor.dtype for tensor in [*outputs, *found.values()]} == {torch.bfloat16}
    return {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}


def test_bfloat16_errs_no_more_than_in_one_process(on_tp):
    [alone] = on_tp(1, bfloat16_errors, (8, 4, 1))
    for tp, heads in [(2, (8, 4, 1)), (4, (8, 2, 2)), (4, (12, 6, 2))]:
        for name, error in on_tp(tp, bfloat16_errors, heads)[0].items():
            # A sum over the ranks rounds each of its terms; a number that is no such sum is rounded once, too.
            assert 0 < error < 2 * alone[name], (tp, heads, name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_compiled_qkv_linear_equals_the_eager_one(assert_same, debug):
    cases = [((4, 2, 2), True, False)]
    if debug == "0":
        cases += [((8, 4, 1), True, True), ((4, 2, 2), True, True), ((12, 6, 2), False, False)]

    def job():
        initialize_model_parallel(tensor_model_parallel_size=4)
        for heads, fuse, gather in cases:
            layer, results = make_layer(heads, fuse_qkv=fuse, gather_output=gather), []
            torch.compiler.reset()
            for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
                layer.zero_grad()
                input_ = torch.arange(3.0 * INPUT, **FLOAT64).view(3, INPUT).requires_grad_()
                outputs = function(input_)
                backward_of(outputs)
                results.append([*outputs, input_.grad, *(p.grad for p in layer.parameters())])
            for found, expected in zip(*results, strict=True):
                assert_same(found, expected)

    run_on_ranks(job, 4, env={"NXD_DEBUG_COLLECTIVES": debug})


def test_without_mesh_it_is_three_linears(assert_same):
    layer = make_layer((4, 2, 1))
    input_ = torch.randn(3, INPUT, **FLOAT64)

    for name, output in zip("qkv", layer(input_), strict=True):
        weights = whole_tensors(layer)
        assert_same(output, F.linear(input_, weights[f"{name}_proj.weight"], weights[f"{name}_proj.bias"]))


def test_meta_layer_draws_its_weights_later(on_tp, assert_same):
    def job():
        from nxd_state import get_device, move_model_to_device

        expected = whole_tensors(make_layer((4, 2, 2)))
        with torch.device("meta"):
            layer = make_layer((4, 2, 2))
        move_model_to_device(layer, get_device())
        torch.manual_seed(0)
        layer.reset_parameters()
        for name, tensor in whole_tensors(layer).items():
            assert_same(tensor, expected[name])

    on_tp(4, job)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"output_sizes": [8, 4], "num_key_value_heads": 2},
            "=1 does not fit 2 key/value heads over tp 4; use kv_size_multiplier=2",
        ),
        (
            {"output_sizes": [24, 6], "num_key_value_heads": 3, "kv_size_multiplier": 2},
            "=2 does not fit 3 key/value heads over tp 4; use kv_size_multiplier=4",
        ),
        ({"output_sizes": [8, 2]}, "=1 does not fit k and v of length 2 over tp 4; give num_key_value_heads"),
        (
            {"output_sizes": [8, 4], "num_key_value_heads": 2, "kv_size_multiplier": 3},
            "kv_size_multiplier=3 does not divide tensor_model_parallel_size=4; use kv_size_multiplier=2",
        ),
        ({"output_sizes": [8, 8], "kv_size_multiplier": 0}, "kv_size_multiplier=0 does not divide"),
        ({"output_sizes": [10, 8]}, "tensor_model_parallel_size=4 does not divide the length of q, 10"),
        ({"output_sizes": [8, 8], "num_key_value_heads": 3}, "num_key_value_heads=3 does not divide .* k and v, 8"),
        (
            {"output_sizes": [8, 4], "num_key_value_heads": 2, "kv_size_multiplier": 4},
            r"q of length 8 is 4 heads of 2; expected a multiple of .*\(the smallest that fits is 2\)",
        ),
        ({"output_sizes": [8, 8, 8]}, r"output_sizes=\[8, 8, 8\]: give \[length of q, length of k and v\]"),
        ({}, "output_sizes=None: give"),
        ({"output_sizes": [8, 0]}, "output_size=0: both must be positive"),
        ({"output_sizes": 8, "sequence_parallel_enabled": torch.bfloat16}, "pass dtype, device .* by keyword"),
    ],
)
def test_wrong_arguments_raise_on_every_rank(on_tp, arguments, message):
    def job():
        with pytest.raises(ValueError, match=message):
            GQAQKVColumnParallelLinear(INPUT, **arguments)

    on_tp(4, job)


def test_layer_built_before_the_mesh_raises_when_used(on_tp):
    from nxd_state import destroy_model_parallel, initialize_model_parallel

    def job():
        destroy_model_parallel()
        layer = make_layer((4, 2, 1))
        initialize_model_parallel(tensor_model_parallel_size=2)
        with pytest.raises(RuntimeError, match="built for tensor_model_parallel_size=1, but it is 2 now"):
            layer(torch.ones(3, INPUT, **FLOAT64))

    on_tp(2, job)


def test_qkv_linear_shows_its_local_and_whole_sizes(on_tp):
    def job():
        return repr(make_layer((4, 2, 2)))

    assert on_tp(4, job)[0] == (
        "GQAQKVColumnParallelLinear(in=6, q=8, kv=4, local=(2, 2, 2), bias=True, kv_size_multiplier=2, fuse_qkv=True, "
        "gather_output=True, sequence_parallel=False)"
    )

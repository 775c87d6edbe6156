"""Adafactor: torch's own in one process, and the same at layouts whose ranks hold parts of tensors."""

import copy

import pytest
import torch
from nxd_optim import Adafactor, NeuronZero1Optimizer, StochasticRounding, fully_shard
from nxd_state import (
    Box,
    ShardPiece,
    ShardSpec,
    active_group,
    count_traffic,
    fuse_along,
    get_group,
    initialize_model_parallel,
    set_shard_spec,
    shard_along,
    whole_parameters,
)
from nxd_state.parameter_marks import mark_expert
from nxd_testing import LogicalPiece, assemble_logical, logical_pieces
from torch import nn

STEPS = 4
SETTINGS = {"lr": 0.3, "weight_decay": 0.1, "d": 1.5}
LOGICAL = {
    "column": (24, 10),
    "row": (10, 24),
    "gate_up": (16, 5),  # two matrices, one parameter also in one process
    "square": (13, 13),  # on all tensor-parallel ranks
    "vocabulary": (22, 6),  # padded to 24 rows
    "kv": (8, 6),  # two heads, copied where there are more ranks
    "qkv:q.weight": (16, 10),
    "qkv:k.weight": (8, 10),
    "experts": (4, 6, 5),
    "bias": (24,),
    "norm": (9,),
    "scale": (),
}


def values(kind, step):
    generator = torch.Generator().manual_seed(100 * step + kind)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in LOGICAL.items()}


def specs():
    tp, ep, etp = (active_group(axis) for axis in ("tp", "ep", "etp"))
    here = {"rank": tp.rank, "size": tp.size}
    fused = [shard_along(LOGICAL[f"qkv:{name}"], 0, name=name, **here) for name in ("q.weight", "k.weight")]
    experts, rows, columns = LOGICAL["experts"]
    each, share = experts // ep.size, columns if ep.size == 1 or etp.size == 1 else columns // etp.size
    local = Box((0, 0, 0), (each, rows, share))
    piece = ShardPiece(local, Box((ep.rank * each, 0, 0), local.shape), LOGICAL["experts"], copies=etp.size)
    copies = max(1, tp.size // 2)
    return {
        "column": shard_along(LOGICAL["column"], 0, **here),
        "row": shard_along(LOGICAL["row"], 1, **here),
        "gate_up": shard_along(LOGICAL["gate_up"], 0, stride=2, **here),
        "square": None,
        "vocabulary": shard_along(LOGICAL["vocabulary"], 0, padded_length=24, **here),
        "kv": shard_along(LOGICAL["kv"], 0, rank=tp.rank // copies, size=tp.size // copies, copies=copies),
        "qkv": fuse_along(fused, 0),
        "experts": ShardSpec(local.shape, (piece,), axis="ep") if ep.size > 1 else None,
        "bias": shard_along(LOGICAL["bias"], 0, **here),
        "norm": None,
        "scale": None,
    }


def local_values(wholes, name, spec):
    if spec is None:
        return wholes[name].clone()
    local = torch.zeros(spec.local_shape, dtype=torch.float64)
    logical = {it.name: wholes[f"{name}:{it.name}" if it.name else name] for it in spec.pieces}
    spec.copy_from_logical(logical, local)
    return local


def make_model(dtype=torch.float64):
    model, wholes = nn.Module(), values(0, 0)
    for name, spec in specs().items():
        parameter = nn.Parameter(local_values(wholes, name, spec).to(dtype))
        if spec is not None:
            set_shard_spec(parameter, spec)
        model.register_parameter(name, parameter)
    if active_group("ep").size > 1:
        mark_expert(model.experts)
    return model


def grouped(parameters):
    plain = ("bias", "norm", "scale", "kv")
    return [
        {"params": [p for name, p in parameters.items() if name not in plain]},
        {"params": [p for name, p in parameters.items() if name in plain], "weight_decay": 0.0, "lr": 0.02},
    ]


def train(optimizer, model, steps=range(1, STEPS + 1)):
    # As in training, where the gradients of experts are sums over the tokens of all ranks whose tokens come here.
    is_averaged = isinstance(optimizer, NeuronZero1Optimizer) and active_group("ep").size > 1
    tokens = active_group("dp", "cp").size / active_group("dp_exp").size if is_averaged else 1
    for step in steps:
        wholes = values(1, step)
        for (name, parameter), spec in zip(model.named_parameters(), specs().values(), strict=True):
            if (name, step) != ("row", 2):  # unused once
                grad = local_values(wholes, name, spec).to(parameter.dtype)
                parameter.grad = grad * tokens if name == "experts" else grad
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model):
    with whole_parameters(model.parameters()):
        return logical_pieces((name, p, p) for name, p in model.named_parameters())


def states_of(model, optimizer):
    """The states as pieces of logical tensors, under names such as "qkv:q.weight/row_var"; they share memory."""
    names, pieces = {id(p): name for name, p in model.named_parameters()}, []
    for entry in optimizer.sharded_state():
        name = names[id(entry.parameter)]
        for it in entry.shards:
            logical = f"{name}:{it.name}" if it.name else name
            pieces.append(LogicalPiece(f"{logical}/{entry.key}", it.logical_shape, it.box, it.tensor.detach()))
        if entry.scalar is not None:
            pieces.append(LogicalPiece(f"{name}/{entry.key}", (), Box((), ()), entry.scalar))
    return pieces


def trained_by_torch():
    """The logical tensors as the parameters of torch's Adafactor."""
    weights = {name: nn.Parameter(it.clone()) for name, it in values(0, 0).items()}
    optimizer = torch.optim.Adafactor(grouped(weights), **SETTINGS)
    for step in range(1, STEPS + 1):
        for name, whole in values(1, step).items():
            weights[name].grad = None if (name, step) == ("row", 2) else whole.clone()
        optimizer.step()
    states = {f"{name}/{key}": it for name, p in weights.items() for key, it in optimizer.state[p].items()}
    fused = {f"qkv/{key}": it for key, it in optimizer.state[weights["qkv:q.weight"]].items() if key == "step"}
    return weights, {name: it for name, it in (states | fused).items() if not name.endswith(".weight/step")}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].double(), tensor.detach().double(), rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def optimizer_of(model, zero, shard_group_size=None):
    if zero == 0:
        return Adafactor(grouped(dict(model.named_parameters())), **SETTINGS)
    if zero == 3:
        fully_shard([model], [model], shard_group_size=shard_group_size)
    return NeuronZero1Optimizer(
        grouped(dict(model.named_parameters())),
        Adafactor,
        grad_clipping=False,
        bucket_cap_mb_reduce_scatter=0.002,
        shard_gradients=zero > 1,
        shard_group_size=shard_group_size,
        save_master_weights=True,
        **SETTINGS,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"maximize": True, "beta2_decay": -0.5, "eps": (1e-8, 0.1), "foreach": True}])
def test_one_process_equals_torch_bit_by_bit(dtype, settings):
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=dtype) for shape in ((8, 5), (5, 8), (6, 6, 2), (7,))]
    ours, theirs = ([nn.Parameter(it.clone()) for it in start] for _ in range(2))
    set_shard_spec(ours[0], shard_along((8, 5), 0, rank=0, size=1, stride=2, name="gate_up.weight"))
    optimizers = [
        cls([{"params": it[:2]}, {"params": it[2:], "weight_decay": 0.1}], lr=0.02, **settings)
        for cls, it in ((Adafactor, ours), (torch.optim.Adafactor, theirs))
    ]

    for step in range(5):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = None if step == index else torch.randn_like(mine)
            other.grad = None if step == index else mine.grad.clone()
        for it in optimizers:
            it.step()

    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert optimizers[0].state_dict()["state"].keys() == optimizers[1].state_dict()["state"].keys()


def train_layout(tp, ep, etp, zero, shard_group_size=None, steps=STEPS):
    initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=etp)
    model = make_model()
    optimizer = optimizer_of(model, zero, shard_group_size)
    train(optimizer, model, range(1, steps + 1))
    return weights_of(model), states_of(model, optimizer)


LAYOUTS = {
    "one process": (1, 1, 1, -1, 0),
    "ZeRO-1 of 1": (1, 1, 1, -1, 1),
    "TP 2": (2, 2, 1, -1, 0),
    "TP 4": (4, 4, 1, -1, 0),
    "EP 2": (2, 1, 2, 1, 0),
    "ZeRO-1": (2, 1, 1, -1, 1),
    "ZeRO-1 of 3": (3, 1, 1, -1, 1),
    "ZeRO-2": (2, 1, 1, -1, 2),
    "ZeRO-3": (2, 1, 1, -1, 3),
    "TP 2 x ZeRO-1": (4, 2, 1, -1, 1),
    "TP 2 x ZeRO-3": (4, 2, 1, -1, 3),
    "TP 4 x ZeRO-1 of 1": (4, 4, 1, -1, 1),
    "EP 2 x ZeRO-1": (4, 1, 2, 1, 1),
    "EP 2 x ZeRO-3 of 1": (2, 1, 2, 1, 3),
    "hybrid": (4, 1, 1, -1, 1, 2),
    "TP 2 x hybrid": (4, 2, 1, -1, 2, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_torch_with_whole_tensors(run_ranks, layout):
    ranks, *arguments = LAYOUTS[layout]

    results = run_ranks(train_layout, ranks, *arguments)

    weights, states = trained_by_torch()
    assert_equal(assemble_logical([found for found, _ in results]), weights)
    assert_equal(assemble_logical([found for _, found in results]), states)


def resume_at_layout(weights, states, tp, ep, etp, zero, shard_group_size=None):
    """Load whole weights and states after two steps, and take the others."""
    initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=etp)
    model = make_model()
    with torch.no_grad():
        for (name, parameter), spec in zip(model.named_parameters(), specs().values(), strict=True):
            parameter.copy_(local_values(weights, name, spec))
    optimizer = optimizer_of(model, zero, shard_group_size)
    names = {id(p): name for name, p in model.named_parameters()}

    def stored(parameter):
        paths = {path: it for path, it in states.items() if path.split("/")[0].split(":")[0] == names[id(parameter)]}
        return {path.split("/")[1]: (it.dtype, tuple(it.shape)) for path, it in paths.items()}

    optimizer.allocate_state(stored)
    for piece in states_of(model, optimizer):
        piece.values.copy_(states[piece.name][piece.box.slices])
    optimizer.finish_loading(optimizer.other_state())
    train(optimizer, model, range(3, STEPS + 1))
    return weights_of(model), states_of(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("TP 2 x ZeRO-1", "TP 4"),
        ("TP 2", "ZeRO-3"),
        ("EP 2", "TP 2 x ZeRO-1"),
        ("hybrid", "EP 2 x ZeRO-1"),
        ("one process", "TP 2 x ZeRO-3"),
    ],
)
def test_states_of_one_layout_resume_at_another(run_ranks, saved, loaded):
    ranks, *arguments = LAYOUTS[saved]
    results = run_ranks(train_layout, ranks, *arguments, *([None] * (5 - len(arguments))), 2)
    weights, states = (assemble_logical([it[kind] for it in results]) for kind in (0, 1))

    ranks, *arguments = LAYOUTS[loaded]
    results = run_ranks(resume_at_layout, ranks, weights, states, *arguments)

    weights, states = trained_by_torch()
    assert_equal(assemble_logical([found for found, _ in results]), weights)
    assert_equal(assemble_logical([found for _, found in results]), states)


def resume_by_rank(zero, tp, saved=None):
    """Save this rank's state after two steps; or load what each rank has saved, and take the others."""
    initialize_model_parallel(tp)
    model = make_model()
    optimizer = optimizer_of(model, zero)
    if saved is None:
        train(optimizer, model, range(1, 3))
        state, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
        train(optimizer, model, range(3, 5))
        return state, weights, weights_of(model)
    state, weights, _ = saved[get_group("pp", "dp", "cp", "tp").rank]
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    optimizer.load_state_dict(state)
    train(optimizer, model, range(3, 5))
    return weights_of(model)


@pytest.mark.parametrize(("ranks", "tp", "zero"), [(2, 2, 0), (4, 2, 1)])
def test_resumed_training_is_that_which_never_stopped(run_ranks, ranks, tp, zero):
    whole = run_ranks(resume_by_rank, ranks, zero, tp)

    resumed = run_ranks(resume_by_rank, ranks, zero, tp, whole)

    expected = assemble_logical([it[2] for it in whole])
    assert all(torch.equal(it, expected[name]) for name, it in assemble_logical(resumed).items())


def test_step_sends_two_messages_of_the_length_of_rows_and_columns(run_ranks):
    def sent():
        initialize_model_parallel(2)
        model = make_model()
        optimizer = optimizer_of(model, 0)
        train(optimizer, model, [1])
        with count_traffic() as traffic:
            train(optimizer, model, [3])
        return {axis: (it.calls, it.sent_bytes) for axis, it in traffic.items()}

    split = [shape for name, shape in LOGICAL.items() if name not in ("square", "experts", "norm", "scale")]
    numbers = 2 * len(split) + sum(sum(shape) for shape in split if len(shape) > 1)
    assert run_ranks(sent, 2) == [{"tp": (2, numbers * 8)}] * 2


def memory_of_zero1():
    initialize_model_parallel()
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (64, 64), (512,))]
    optimizer = NeuronZero1Optimizer(weights, Adafactor, grad_clipping=False)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer.memory_report()


def test_states_of_matrices_take_almost_no_memory(run_ranks):
    for report in run_ranks(memory_of_zero1, 2):
        assert report.predicted.state == 512 * 4 // 2
        assert report.measured.state <= 512 * 4 // 2 + 2 * 128 * 4 + 3 * 4


@pytest.mark.parametrize(("argument", "message"), [({"d": 0.5}, "threshold d"), ({"beta2_decay": 1.0}, "beta2_decay")])
def test_wrong_arguments_raise_errors_of_torch(argument, message):
    with pytest.raises(ValueError, match=message):
        Adafactor([nn.Parameter(torch.ones(2, 2))], **argument)


def test_tensor_of_which_no_rank_holds_a_part_is_refused(run_ranks):
    def step_with_half_a_matrix():
        initialize_model_parallel(2)
        parameter = nn.Parameter(torch.ones(4, 3))
        set_shard_spec(parameter, shard_along((16, 3), 0, rank=active_group("tp").rank, size=4))
        parameter.grad = torch.ones(4, 3)
        Adafactor([parameter]).step()

    with pytest.raises(RuntimeError, match="holds 24 of the 48 elements of logical tensor ''"):
        run_ranks(step_with_half_a_matrix, 2)


def test_sparse_gradients_of_split_parameters_are_refused(run_ranks):
    def step():
        initialize_model_parallel(2)
        parameter = nn.Parameter(torch.ones(4, 3))
        set_shard_spec(parameter, shard_along((8, 3), 0, rank=active_group("tp").rank, size=2))
        parameter.grad = torch.ones(4, 3).to_sparse()
        Adafactor([parameter]).step()

    with pytest.raises(
        RuntimeError, match=r"Adafactor does not support gradients of torch\.float32, torch\.sparse_coo"
    ):
        run_ranks(step, 2)


def test_stochastic_rounding_of_sharded_states_is_refused():
    optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(2, 2).bfloat16())], Adafactor, torch.bfloat16)

    with pytest.raises(ValueError, match="Adafactor updates its states before the steps of ZeRO's buckets"):
        StochasticRounding(optimizer)

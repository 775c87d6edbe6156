"""Muon: torch's own in one process, and the same at layouts whose ranks hold parts of its matrices."""

import copy

import pytest
import torch
from nxd_optim import Muon, NeuronZero1Optimizer, StochasticRounding, muon_parameter_groups
from nxd_optim.zero import MASTER_KEY
from nxd_state import (
    Box,
    ShardPiece,
    ShardSpec,
    active_group,
    fuse_along,
    get_group,
    initialize_model_parallel,
    set_shard_spec,
    shard_along,
)
from nxd_state.parameter_marks import mark_expert
from nxd_testing import assemble_logical, logical_pieces
from torch import nn

STEPS = 4
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
LOGICAL = {
    "column": (24, 10),
    "row": (10, 24),
    "square": (13, 13),
    "vocabulary": (22, 6),  # padded to 24 rows
    "qkv:q.weight": (16, 10),
    "qkv:k.weight": (8, 10),
    "experts": (4, 6, 5),
    "bias": (9,),
}


def values(kind, step):
    generator = torch.Generator().manual_seed(100 * step + kind)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in LOGICAL.items()}


def specs():
    tp, ep, etp = (active_group(axis) for axis in ("tp", "ep", "etp"))
    here = {"rank": tp.rank, "size": tp.size}
    fused = [shard_along(LOGICAL[f"qkv:{name}"], 0, name=name, **here) for name in ("q.weight", "k.weight")]
    experts, rows, columns = LOGICAL["experts"]
    each, share = experts // ep.size, columns // etp.size if ep.size > 1 else columns
    local = Box((0, 0, 0), (each, rows, share))
    piece = ShardPiece(local, Box((ep.rank * each, 0, 0), local.shape), LOGICAL["experts"], copies=etp.size)
    return {
        "column": shard_along(LOGICAL["column"], 0, **here),
        "row": shard_along(LOGICAL["row"], 1, **here),
        "square": None,
        "vocabulary": shard_along(LOGICAL["vocabulary"], 0, padded_length=24, **here),
        "qkv": fuse_along(fused, 0),
        "experts": ShardSpec(local.shape, (piece,), axis="ep") if ep.size > 1 else None,
        "bias": None,
    }


def local_values(wholes, name, spec):
    if spec is None:
        return wholes[name].clone()
    local = torch.zeros(spec.local_shape, dtype=torch.float64)
    logical = {it.name: wholes[f"{name}:{it.name}" if it.name else name] for it in spec.pieces}
    spec.copy_from_logical(logical, local)
    return local


def make_parameters(dtype=torch.float64):
    parameters, wholes = {}, values(0, 0)
    for name, spec in specs().items():
        parameter = parameters[name] = nn.Parameter(local_values(wholes, name, spec).to(dtype))
        if spec is not None:
            set_shard_spec(parameter, spec)
    if active_group("ep").size > 1:
        mark_expert(parameters["experts"])
    return parameters


def grouped(parameters):
    matrices = [p for name, p in parameters.items() if name not in ("vocabulary", "bias")]
    others = [{"params": [parameters["vocabulary"]], "use_muon": True, "lr": 0.05, "ns_steps": 3}]
    return [
        {"params": matrices, "use_muon": True},
        *others,
        {"params": [parameters["bias"]], "use_muon": False, "weight_decay": 0.0},
    ]


def train(optimizer, parameters, steps=range(1, STEPS + 1)):
    for step in steps:
        wholes = values(1, step)
        for (name, parameter), spec in zip(parameters.items(), specs().values(), strict=True):
            parameter.grad = local_values(wholes, name, spec).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def pieces(parameters, tensors=None):
    return logical_pieces((name, p, p if tensors is None else tensors[p]) for name, p in parameters.items())


def trained_by_torch():
    """The logical matrices of the same model, with torch's Muon and AdamW."""
    weights = {}
    for name, whole in values(0, 0).items():
        parts = whole.unbind() if name == "experts" else [whole]
        weights[name] = [nn.Parameter(part.clone()) for part in parts]
    rest = ("vocabulary", "bias")
    optimizers = [
        torch.optim.Muon([p for name, parts in weights.items() if name not in rest for p in parts], **SETTINGS),
        torch.optim.Muon(weights["vocabulary"], **(SETTINGS | {"lr": 0.05, "ns_steps": 3})),
        torch.optim.AdamW(weights["bias"], lr=SETTINGS["lr"], weight_decay=0.0),
    ]
    for step in range(1, STEPS + 1):
        for name, whole in values(1, step).items():
            for parameter, grad in zip(weights[name], whole.unbind() if name == "experts" else [whole], strict=True):
                parameter.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    wholes = {name: torch.stack(list(parts)) if name == "experts" else parts[0] for name, parts in weights.items()}
    momenta = [optimizers[name == "vocabulary"].state for name in weights if name != "bias"]
    states = {
        name: [state[p]["momentum_buffer"] for p in weights[name]]
        for name, state in zip([it for it in weights if it != "bias"], momenta, strict=True)
    }
    return wholes, {name: torch.stack(it) if name == "experts" else it[0] for name, it in states.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor.detach(), rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.8}])
def test_one_process_equals_torch_bit_by_bit(dtype, settings):
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=dtype) for shape in ((8, 5), (5, 8), (60, 16), (7,))]
    ours, theirs = ([nn.Parameter(it.clone()) for it in start] for _ in range(2))
    groups = [{"params": ours[:3], "use_muon": True}, {"params": ours[3:], "use_muon": False, "lr": 0.1}]
    optimizer = Muon(groups, lr=0.02, **settings)
    expected = [torch.optim.Muon(theirs[:3], lr=0.02, **settings), torch.optim.AdamW(theirs[3:], 0.1, weight_decay=0.1)]

    for step in range(5):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = None if step == index else torch.randn_like(mine)
            other.grad = None if step == index else mine.grad.clone()
        for it in (optimizer, *expected):
            it.step()

    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def train_layout(tp, ep, etp, zero1):
    initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=etp)
    parameters = make_parameters()
    if not zero1:
        optimizer = Muon(grouped(parameters), **SETTINGS)
        train(optimizer, parameters)
        states = {p: optimizer.state[p]["momentum_buffer"] for n, p in parameters.items() if n != "bias"}
        rest = {name: p for name, p in parameters.items() if name != "bias"}
        return pieces(parameters), pieces(rest, states)
    optimizer = NeuronZero1Optimizer(
        grouped(parameters), Muon, grad_clipping=False, bucket_cap_mb_reduce_scatter=0.002, **SETTINGS
    )
    train(optimizer, parameters)
    return pieces(parameters), None


LAYOUTS = {
    "TP 2": (2, 2, 1, -1, False),
    "EP 2": (2, 1, 2, 1, False),
    "EP 2 over TP 2": (2, 2, 2, 1, False),
    "ZeRO-1": (2, 1, 1, -1, True),
    "ZeRO-1 of 3": (3, 1, 1, -1, True),
    "TP 2 x ZeRO-1": (4, 2, 1, -1, True),
    "EP 2 x ZeRO-1": (4, 1, 2, 1, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_torch_with_whole_matrices(run_ranks, layout):
    ranks, *arguments = LAYOUTS[layout]

    results = run_ranks(train_layout, ranks, *arguments)

    weights, momenta = trained_by_torch()
    assert_equal(assemble_logical([found for found, _ in results]), weights)
    if results[0][1] is not None:
        assert_equal(assemble_logical([found for _, found in results]), momenta)


def state_of_zero1():
    initialize_model_parallel()
    parameters = make_parameters(torch.bfloat16)
    optimizer = NeuronZero1Optimizer(
        grouped(parameters), Muon, grad_clipping=False, save_master_weights=True, **SETTINGS
    )
    train(optimizer, parameters)
    names = {id(p): name for name, p in parameters.items()}
    return {(names[id(it.parameter)], it.key) for it in optimizer.sharded_state()}, optimizer.memory_report()


def test_states_are_a_momentum_of_matrices_and_two_moments_of_the_rest(run_ranks):
    found = run_ranks(state_of_zero1, 2)

    keys = set().union(*(keys for keys, _ in found))
    matrices = {"column", "row", "square", "vocabulary", "qkv", "experts"}
    adamw = {("bias", key) for key in ("step", "exp_avg", "exp_avg_sq", MASTER_KEY)}
    assert keys == adamw | {(name, key) for name in matrices for key in ("momentum_buffer", MASTER_KEY)}
    report = found[0][1]
    assert report.measured.state == pytest.approx(report.predicted.state, rel=0.1)


def resume(states=None):
    initialize_model_parallel()
    parameters = make_parameters()
    optimizer = NeuronZero1Optimizer(grouped(parameters), Muon, grad_clipping=False, **SETTINGS)
    if states is None:
        train(optimizer, parameters, range(1, 3))
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in parameters.values()]
        train(optimizer, parameters, range(3, 5))
        return saved, weights, pieces(parameters)
    saved, weights, _ = states[get_group("dp").rank]
    with torch.no_grad():
        for parameter, weight in zip(parameters.values(), weights, strict=True):
            parameter.copy_(weight)
    optimizer.load_state_dict(saved)
    train(optimizer, parameters, range(3, 5))
    return pieces(parameters)


def test_resumed_training_is_that_which_never_stopped(run_ranks):
    whole = run_ranks(resume, 2)

    resumed = run_ranks(resume, 2, whole)

    expected = assemble_logical([it[2] for it in whole])
    assert all(torch.equal(it, expected[name]) for name, it in assemble_logical(resumed).items())


def test_copy_and_pickle_keep_training_alike():
    first = nn.Parameter(torch.ones(4, 3))
    optimizer = Muon([first], lr=0.1)
    first.grad = torch.eye(4, 3)
    optimizer.step()

    second_optimizer = copy.deepcopy(optimizer)

    second = second_optimizer.param_groups[0]["params"][0]
    second.grad = first.grad.clone()
    optimizer.step()
    second_optimizer.step()
    assert torch.equal(first, second)


def test_states_of_another_optimizer_are_refused():
    parameter = nn.Parameter(torch.ones(4, 3))
    other = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(4, 3)
    other.step()

    with pytest.raises(KeyError, match="momentum_buffer"):
        Muon([parameter]).load_state_dict(other.state_dict())


def test_parameter_that_is_no_matrix_is_refused():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)

    with pytest.raises(ValueError, match=r"shape \(4,\) is not a matrix; give it to AdamW by use_muon=False"):
        Muon([parameter]).step()


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"momentum": -1.0}, "momentum"), ({"adjust_lr_fn": "none"}, "none"), ({"betas": (2.0, 0.9)}, "beta")],
)
def test_wrong_arguments_raise_errors_of_torch(argument, message):
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(2, 2))], **argument)


def step_with_half_a_matrix():
    initialize_model_parallel(2)
    parameter = nn.Parameter(torch.ones(4, 3))
    set_shard_spec(parameter, shard_along((8, 3), 0, rank=0, size=2))  # on both ranks
    parameter.grad = torch.ones(4, 3)
    Muon([parameter]).step()


def test_matrix_of_which_no_rank_holds_a_part_is_refused(run_ranks):
    with pytest.raises(RuntimeError, match="holds 12 of the 24 elements of matrix"):
        run_ranks(step_with_half_a_matrix, 2)


def test_stochastic_rounding_of_sharded_states_is_refused():
    optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(2, 2).bfloat16())], Muon, torch.bfloat16)

    with pytest.raises(ValueError, match="Muon updates its states before the steps of ZeRO's buckets"):
        StochasticRounding(optimizer)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(4, 6, 5))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(4, 6))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.LayerNorm(5)
        self.experts = Experts()
        self.conv = nn.Conv1d(5, 5, 3)
        self.A_log = nn.Parameter(torch.ones(5, 2))
        self.gate = nn.Linear(5, 4, bias=False)
        self.lm_head = nn.Linear(5, 7, bias=False)


def test_groups_are_chosen_by_shape_and_role(caplog):
    model = Model()
    model.layers[1].weight.requires_grad_(False)

    with caplog.at_level("INFO", logger="nxd_optim"):
        muon, decayed, plain = muon_parameter_groups(model, 0.3, adamw=("gate",))

    names = {p: name for name, p in model.named_parameters()}
    assert [names[p] for p in muon["params"]] == ["layers.0.weight", "experts.gate_up_proj"]
    assert {names[p] for p in decayed["params"]} == {
        "embed_tokens.weight",
        "experts.gate_up_proj_bias",
        "conv.weight",
        "A_log",
        "gate.weight",
        "lm_head.weight",
    }
    assert all(p.dim() == 1 for p in plain["params"])
    assert [(it["use_muon"], it["weight_decay"]) for it in (muon, decayed, plain)] == [
        (True, 0.3),
        (False, 0.3),
        (False, 0.0),
    ]
    assert "Muon updates 2 parameters of this rank, AdamW 11:" in caplog.text
    assert "layers.*.bias" in caplog.text


def test_head_tied_to_embeddings_is_listed_once_and_not_for_muon():
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight

    muon, decayed, _ = muon_parameter_groups(model)

    assert model.embed_tokens.weight not in set(muon["params"])
    assert sum(p is model.embed_tokens.weight for p in decayed["params"]) == 1


def test_unknown_name_for_adamw_is_refused():
    with pytest.raises(ValueError, match=r"adamw=\['gat'\] occur in no parameter's name"):
        muon_parameter_groups(Model(), adamw=("gat",))

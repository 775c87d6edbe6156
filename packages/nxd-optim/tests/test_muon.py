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
from nxd_state.parameter_marks import MatrixLayout, get_matrix_layout, mark_expert, mark_matrix_layout
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
    "fused": (32, 10),
    "by_head": (24, 10),
    "alternating": (4, 6, 20),
    "bias": (9,),
}
LAYOUTS_OF_FUSED = {
    "fused": MatrixLayout(sections=(16, 8, 8)),
    "by_head": MatrixLayout(sections=(2, 2, 2)),
    "alternating": MatrixLayout(-1, (1, 1)),
}
STACKS = ("experts", "alternating")


def values(kind, step):
    generator = torch.Generator().manual_seed(100 * step + kind)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in LOGICAL.items()}


def specs():
    tp = active_group("tp")
    here = {"rank": tp.rank, "size": tp.size}
    fused = [shard_along(LOGICAL[f"qkv:{name}"], 0, name=name, **here) for name in ("q.weight", "k.weight")]
    return {
        "column": shard_along(LOGICAL["column"], 0, **here),
        "row": shard_along(LOGICAL["row"], 1, **here),
        "square": None,
        "vocabulary": shard_along(LOGICAL["vocabulary"], 0, padded_length=24, **here),
        "qkv": fuse_along(fused, 0),
        "experts": spec_of_experts("experts"),
        "fused": shard_along(LOGICAL["fused"], 0, **here),
        "by_head": shard_along(LOGICAL["by_head"], 0, **here),
        "alternating": spec_of_experts("alternating"),
        "bias": None,
    }


def spec_of_experts(name):
    ep, etp = active_group("ep"), active_group("etp")
    if ep.size == 1:
        return None
    experts, rows, columns = LOGICAL[name]
    local = Box((0, 0, 0), (experts // ep.size, rows, columns // etp.size))
    here = Box((ep.rank * local.shape[0], 0, etp.rank * local.shape[2]), local.shape)
    return ShardSpec(local.shape, (ShardPiece(local, here, LOGICAL[name]),), axis="ep")


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
    for name in STACKS if active_group("ep").size > 1 else ():
        mark_expert(parameters[name])
    for name, layout in LAYOUTS_OF_FUSED.items():
        mark_matrix_layout(parameters[name], layout)
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


def unfused(name, whole):
    """The matrices in a logical tensor, one after the other."""
    matrices = list(whole) if name in STACKS else [whole]
    if name == "fused":
        matrices = list(whole.split([16, 8, 8]))
    if name == "by_head":
        matrices = list(whole.view(4, 3, 2, 10).transpose(0, 1).reshape(3, 8, 10))
    if name == "alternating":
        matrices = [it[:, first::2] for it in whole for first in (0, 1)]
    return [it.clone(memory_format=torch.contiguous_format) for it in matrices]


def fused(name, matrices):
    """The inverse of `unfused`."""
    if name == "experts":
        return torch.stack(matrices)
    if name == "by_head":
        return torch.stack(matrices).view(3, 4, 2, 10).transpose(0, 1).reshape(24, 10)
    if name == "alternating":
        pairs = zip(matrices[::2], matrices[1::2], strict=True)
        return torch.stack([torch.stack(pair, dim=-1).flatten(1) for pair in pairs])
    return torch.cat(matrices)


def trained_by_torch():
    """The logical matrices of the same model, with torch's Muon and AdamW."""
    weights = {name: [nn.Parameter(it) for it in unfused(name, whole)] for name, whole in values(0, 0).items()}
    rest = ("vocabulary", "bias")
    optimizers = [
        torch.optim.Muon([p for name, parts in weights.items() if name not in rest for p in parts], **SETTINGS),
        torch.optim.Muon(weights["vocabulary"], **(SETTINGS | {"lr": 0.05, "ns_steps": 3})),
        torch.optim.AdamW(weights["bias"], lr=SETTINGS["lr"], weight_decay=0.0),
    ]
    for step in range(1, STEPS + 1):
        for name, whole in values(1, step).items():
            for parameter, grad in zip(weights[name], unfused(name, whole), strict=True):
                parameter.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    wholes = {name: fused(name, [p.detach() for p in parts]) for name, parts in weights.items()}
    momenta = {
        name: fused(name, [optimizers[name == "vocabulary"].state[p]["momentum_buffer"] for p in parts])
        for name, parts in weights.items()
        if name != "bias"
    }
    return wholes, momenta


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


@pytest.mark.parametrize("adjusted", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_weight_of_inputs_and_outputs_moves_as_its_transpose_does_with_torch(shape, adjusted):
    start, grad = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.T.contiguous()), nn.Parameter(start.clone())
    mark_matrix_layout(ours, MatrixLayout(outputs_dim=-1))
    ours.grad, theirs.grad = grad.T.contiguous(), grad.clone()

    Muon([ours], lr=0.1, adjust_lr_fn=adjusted).step()

    torch.optim.Muon([theirs], lr=0.1, adjust_lr_fn=adjusted).step()
    torch.testing.assert_close(ours.T, theirs, rtol=1e-12, atol=0)


def test_layout_that_does_not_fit_a_parameter_is_refused():
    parameter = nn.Parameter(torch.ones(8, 3))
    mark_matrix_layout(parameter, MatrixLayout(sections=(3, 2)))
    parameter.grad = torch.ones(8, 3)

    with pytest.raises(ValueError, match=r"dim 0 .* \(8, 3\) cannot hold matrices of \[3, 2\] outputs"):
        Muon([parameter]).step()


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
    matrices = {"column", "row", "square", "vocabulary", "qkv", "experts", "fused", "by_head", "alternating"}
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


class FusedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(5, 12)
        self.attention = nn.MultiheadAttention(6, 2)
        self.w13 = nn.Linear(5, 8)
        self.experts = Experts()
        self.experts.is_transposed, self.experts.is_concatenated = False, True
        self.alternating = nn.Module()
        self.alternating.experts = Experts()
        self.alternating.experts.gate_up_proj = nn.Parameter(torch.ones(4, 5, 6))
        self.alternating.experts.is_transposed, self.alternating.experts.is_concatenated = True, False
        self.plain = nn.Linear(5, 5)


def test_fused_parameters_are_marked_with_their_matrices(caplog):
    model = FusedLayers()

    with caplog.at_level("INFO", logger="nxd_optim"):
        muon, *_ = muon_parameter_groups(model)

    names = {p: name for name, p in model.named_parameters()}
    assert {names[p]: get_matrix_layout(p) for p in muon["params"]} == {
        "gate_up_proj.weight": MatrixLayout(sections=(6, 6)),
        "attention.in_proj_weight": MatrixLayout(sections=(6, 6, 6)),
        "attention.out_proj.weight": MatrixLayout(),
        "w13.weight": None,
        "experts.gate_up_proj": MatrixLayout(sections=(3, 3)),
        "alternating.experts.gate_up_proj": MatrixLayout(-1, (1, 1)),
        "plain.weight": MatrixLayout(),
    }
    assert "attention.in_proj_weight: matrices of 6, 6, 6 outputs" in caplog.text
    assert "w13.weight: one matrix, although it seems to hold several" in caplog.text
    assert "alternating.experts.gate_up_proj: matrices of 3, 3 outputs, stored as [inputs, outputs]" in caplog.text


def test_layout_that_is_marked_already_is_kept():
    model = FusedLayers()
    mark_matrix_layout(model.w13.weight, MatrixLayout(sections=(4, 4)))

    muon_parameter_groups(model)

    assert get_matrix_layout(model.w13.weight) == MatrixLayout(sections=(4, 4))


def test_stack_with_a_layout_is_one_of_experts_whatever_its_name():
    model = nn.Module()
    model.mlps = nn.Module()
    model.mlps.register_parameter("weight", nn.Parameter(torch.ones(4, 3, 2)))
    mark_matrix_layout(model.mlps.weight, MatrixLayout(outputs_dim=-1))

    muon, *_ = muon_parameter_groups(model)

    assert [p is model.mlps.weight for p in muon["params"]] == [True]


def test_head_tied_to_embeddings_is_listed_once_and_not_for_muon():
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight

    muon, decayed, _ = muon_parameter_groups(model)

    assert model.embed_tokens.weight not in set(muon["params"])
    assert sum(p is model.embed_tokens.weight for p in decayed["params"]) == 1


def test_unknown_name_for_adamw_is_refused():
    with pytest.raises(ValueError, match=r"adamw=\['gat'\] occur in no parameter's name"):
        muon_parameter_groups(Model(), adamw=("gat",))

"""Plans for models that nobody has written for these packages: patterns, styles, and what is wrong with them."""

import nxd_state
import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_layers.hf import Target, parallelize, register_style
from torch import nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    def __init__(self, *, bias=True):
        super().__init__()
        self.gate_up = nn.Linear(12, 24, bias=bias)
        self.down = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.rand(12))

    def forward(self, hidden):
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up) * self.scale


class Experts(nn.Module):
    """Two experts whose fused weights are parameters, `[experts, out, in]`."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 12, 12))
        self.down_proj = nn.Parameter(torch.randn(2, 12, 6))

    def forward(self, hidden, weights):
        gate, up = torch.einsum("bsi,eoi->ebso", hidden, self.gate_up_proj).chunk(2, dim=-1)
        outputs = torch.einsum("ebso,eio->ebsi", F.silu(gate) * up, self.down_proj)
        return torch.einsum("ebsi,bse->bsi", outputs, weights)


class Model(nn.Module):
    """Embedding, two feed-forward layers, experts behind a router, and a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 12, padding_idx=0)
        self.layers = nn.ModuleList([FeedForward(), FeedForward(bias=False)])
        self.router = nn.Linear(12, 2)
        self.experts = Experts()
        self.head = nn.Linear(12, 11, bias=False)

    def forward(self, ids):
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden + self.experts(hidden, self.router(hidden).softmax(dim=-1)))


PLAN = {
    "table": "embedding_rowwise",
    "layers.*.gate_up": "packed_colwise",
    "layers.*.down": "rowwise",
    "experts": "moe_tp_experts",
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
    "head": "colwise_gather_output",
}
OTHER_WAYS = {
    "table": "embedding_colwise",
    "layers.*.gate_up": "colwise_rep",
    "layers.*.down": "rowwise_split_input",
    "router": "replicate",
    "head": "colwise_gather_output",
}
IDS = torch.arange(12).view(2, 6) * 5 % 11


def make_model():
    torch.manual_seed(0)
    return Model().double()


@pytest.mark.parametrize("plan", [PLAN, OTHER_WAYS])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_model_split_by_a_dict_equals_the_whole_one(on_tp, logical, assert_same, tp, plan):
    def job():
        whole, split = make_model(), parallelize(make_model(), plan=plan)
        expected, found = whole(IDS), split(IDS)
        assert_same(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        wholes = dict(whole.named_parameters())
        assert dict(split.named_parameters()).keys() == wholes.keys()
        for name, parameter in split.named_parameters():
            assert_same(logical(parameter), wholes[name], rtol=0, atol=0)
            assert_same(logical(parameter, parameter.grad), wholes[name].grad)

    on_tp(tp, job)


def test_layers_are_those_of_this_package_and_the_rest_is_left_alone(on_tp):
    def job():
        model = parallelize(make_model(), plan=PLAN)
        assert isinstance(model.table, ParallelEmbedding)
        assert isinstance(model.layers[1].gate_up, ColumnParallelLinear)
        assert isinstance(model.layers[1].down, RowParallelLinear)
        assert type(model.router) is nn.Linear
        assert model.experts.gate_up_proj.shape == (2, 6, 12)
        assert (model.head.in_features, model.head.out_features) == (12, 11)

    on_tp(2, job)


def test_last_of_several_patterns_counts(on_tp):
    def job():
        model = parallelize(make_model(), plan=PLAN | {"layers.1.*": "replicate"})
        assert type(model.layers[1].down) is nn.Linear
        assert isinstance(model.layers[0].down, RowParallelLinear)

    on_tp(2, job)


def test_registered_style_is_applied_to_what_the_plan_names(on_tp):
    def job():
        applied = []
        register_style("twice", lambda target: applied.append((target.path, target.name, target.is_parameter)))
        parallelize(make_model(), plan={"layers.*.scale": "twice", "router": "twice"})
        return applied

    expected = [("layers.0.scale", "scale", True), ("layers.1.scale", "scale", True), ("router", "router", False)]
    assert on_tp(2, job) == [expected] * 2


def test_registered_style_can_put_another_module_in_place(on_tp):
    def job():
        def without_bias(target: Target):
            linear = target.of_class(nn.Linear)
            made = nn.Linear(linear.in_features, linear.out_features, bias=False)
            target.replace(made)

        register_style("without_bias", without_bias)
        return parallelize(make_model(), plan={"router": "without_bias"}).router.bias

    assert on_tp(2, job) == [None, None]


class Attention(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(8, 8)
        self.q_norm = nn.RMSNorm(2)

    def forward(self, hidden):
        return self.q_norm(self.q_proj(hidden).unflatten(-1, (self.num_heads, -1)))


class Doubled(nn.Linear):
    """Something else than a linear layer."""

    def forward(self, input_):
        return 2 * super().forward(input_)


@pytest.mark.parametrize(
    ("make", "plan", "message"),
    [
        (make_model, {"head": "columnwise"}, "unknown style 'columnwise'; did you mean 'colwise'"),
        (make_model, {"haed": "colwise"}, "'haed' in the plan matches no module or parameter of Model"),
        (make_model, None, "Model has no tensor-parallel plan; give one"),
        (make_model, {"layers.*": "colwise"}, "layers.0 is a FeedForward, where this style expects a torch.nn.Linear"),
        (make_model, {"head": "colwise"}, "=2 does not divide the 11 outputs of head; use 1 or 11"),
        (make_model, {"experts.gate_up_proj": "colwise"}, "holds two matrices, but 'colwise' shards it as one"),
        (make_model, {"router": "sequence_parallel"}, "pass sequence_parallel=True"),
        (make_model, {"router": "mla_kv_a_proj"}, "needs config.qk_rope_head_dim, which is None"),
        (make_model, {"table": "colwise"}, "table is a Embedding"),
        (lambda: nn.ModuleDict({"a": Doubled(4, 4)}), {"a": "colwise"}, "a is a Doubled, where"),
        (
            lambda: nn.ModuleDict({"a": Attention(4)}),
            {"a.q_proj": "colwise"},
            "a.q_norm.weight is among the sharded",
        ),
        (
            lambda: nn.Embedding(4, 4),
            {"weight": "moe_tp_experts"},
            "weight is a parameter, where this style expects a module",
        ),
        (lambda: "a model", None, "expected a model or a config of transformers, not str"),
    ],
)
def test_wrong_plan_is_refused_with_what_to_do(on_tp, make, plan, message):
    def job():
        with pytest.raises(ValueError, match=message):
            parallelize(make(), plan=plan)

    on_tp(2, job)


def test_module_in_two_places_is_refused(on_tp):
    def job():
        model = make_model()
        model.layers[1] = model.layers[0]
        with pytest.raises(ValueError, match=r"layers.1.gate_up is the same module as layers.0.gate_up"):
            parallelize(model, plan=PLAN)

    on_tp(2, job)


def test_split_model_is_not_split_again(on_tp):
    def job():
        split = parallelize(make_model(), plan=PLAN)
        with pytest.raises(ValueError, match=r"table is sharded already; call parallelize\(\) once, with an unsharded"):
            parallelize(split, plan=PLAN)

    on_tp(2, job)


@pytest.mark.parametrize("last", ["colwise", "mla_kv_a_proj"])
def test_refused_plan_leaves_the_model_as_it_was(on_tp, last):
    def job():
        model = make_model()
        with pytest.raises(ValueError, match=r"head|2 shards do not divide"):
            parallelize(model, plan=PLAN | {"head": last})
        assert [type(it) for it in model.modules()] == [type(it) for it in make_model().modules()]
        assert not any(it._forward_hooks or it._forward_pre_hooks for it in model.modules())
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), make_model().parameters(), strict=True))

    on_tp(2, job)


def test_tie_that_the_plan_would_split_apart_is_refused(on_tp):
    def job():
        model = make_model()
        model.layers[1].down.weight = model.layers[0].down.weight
        with pytest.raises(ValueError, match=r"layers.0.down.weight and layers.1.down.weight are one parameter"):
            parallelize(model, plan=PLAN)

    on_tp(2, job)


def test_sequence_parallel_is_refused_where_layers_are_more_than_norms_and_blocks(on_tp):
    def job():
        with pytest.raises(ValueError, match=r"for layers.0: the layer has parameters of its own"):
            parallelize(make_model(), plan=PLAN, sequence_parallel=True)

    on_tp(2, job)


def test_heads_that_a_rank_has_are_told_to_the_attention(on_tp):
    def job():
        plan = {"q_proj": "colwise", "q_norm": "replicated_with_grad_allreduce"}
        attention = parallelize(Attention(4), plan=plan)
        partial = attention.q_norm.weight.sequence_parallel_enabled
        return attention.num_heads, list(attention(torch.ones(3, 8)).shape), partial, nxd_state.get_group("tp").size

    assert on_tp(2, job) == [(2, [3, 2, 2], True, 2)] * 2


def test_registered_style_that_shards_outputs_gives_the_attention_its_head_counts(on_tp):
    def job():
        def own_columns(target: Target):
            target.replace(ColumnParallelLinear(8, 8, gather_output=False))

        register_style("own_columns", own_columns, shards_output=True)
        plan = {"q_proj": "own_columns", "q_norm": "replicated_with_grad_allreduce"}
        attention = parallelize(Attention(4), plan=plan)
        return attention.num_heads, list(attention(torch.ones(3, 8)).shape)

    assert on_tp(2, job) == [(2, [3, 2, 2])] * 2


def test_registered_style_that_keeps_parameters_may_name_tied_ones(on_tp):
    def job():
        model = make_model()
        model.layers[1].down.weight = model.layers[0].down.weight
        register_style("look", lambda target: None, keeps_parameters=True)
        plan = {"layers.*.down": "look"}
        split = parallelize(model, plan=plan)
        return split.layers[1].down.weight is split.layers[0].down.weight

    assert on_tp(2, job) == [True] * 2

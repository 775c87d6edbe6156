"""`GQAQKVColumnParallelLinear` with adapters against three linears with adapters in one process, in float64."""

import itertools

import pytest
import torch
from nxd_layers import ColumnParallelLinear, scatter_to_sequence_parallel_region
from nxd_layers.head_padding import pad_model
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_lora import LoraConfig, LoraModel, adapter_config, gather_adapter, load_adapter
from nxd_state import active_group, all_gather, all_gather_object, all_reduce, check_shard_specs, get_shard_spec
from nxd_testing import assemble_logical, logical_pieces
from torch import nn

INPUT, HEAD, RANK = 6, 2, 3
# tensor-parallel degree: query heads, key/value heads, multiplier
HEADS = {
    1: [(4, 2, 1)],
    2: [(4, 2, 1), (4, 1, 2), (6, 3, 2)],
    4: [(4, 2, 2), (8, 1, 4), (12, 6, 2)],
}
TARGETS = [["q_proj", "v_proj"], ["qkv_proj"], ["k_proj"]]


class Attention(nn.Module):
    """Three projections, in one layer or, with `heads[2] == 0`, in three of one process."""

    def __init__(self, heads, **arguments):
        super().__init__()
        torch.manual_seed(0)
        query, key_value, multiplier = heads
        if multiplier == 0:
            for name, count in [("q", query), ("k", key_value), ("v", key_value)]:
                linear = nn.Linear(INPUT, count * HEAD, arguments.get("bias", True), dtype=torch.float64)
                setattr(self, f"{name}_proj", linear)
            return
        self.qkv_proj = GQAQKVColumnParallelLinear(
            INPUT,
            [query * HEAD, key_value * HEAD],
            kv_size_multiplier=multiplier,
            **{"num_key_value_heads": key_value, "dtype": torch.float64, **arguments},
        )

    def forward(self, hidden):
        if hasattr(self, "qkv_proj"):
            return self.qkv_proj(hidden)
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)


def adapted(heads, settings, *, pad=False, **arguments):
    settings = {"lora_rank": RANK, "target_modules": ["qkv_proj"], **settings}
    module = nn.ModuleDict({"attn": Attention(heads, **arguments)})
    if pad:
        pad_model(module, active_group("tp").size, heads[0])
    torch.manual_seed(4)
    return LoraModel(module, LoraConfig(**settings))


def alone(model, heads, settings, **arguments):
    """The same in one process, with three linears."""
    targets = settings.get("target_modules", ["qkv_proj"])
    targets = ["q_proj", "k_proj", "v_proj"] if targets == ["qkv_proj"] else targets
    reference = adapted((*heads[:2], 0), {**settings, "target_modules": targets}, **arguments)
    whole = wholes(model.module)
    with torch.no_grad():
        for name, parameter in reference.module.named_parameters():
            parameter.copy_(whole[name])
    return reference


def wholes(module, *, grads=False):
    """Parameters, or gradients where there are any, whole, by the unsharded model's names; copies that differ raise."""
    group = active_group("tp")
    named = []
    for name, parameter in module.named_parameters():
        check_shard_specs(all_gather_object(get_shard_spec(parameter), group))
        if grads and parameter.grad is None:
            continue
        partial = getattr(parameter, "sequence_parallel_enabled", False) and group.size > 1
        grad = all_reduce(parameter.grad, group) if grads and partial else parameter.grad
        named.append((name, parameter, grad if grads else parameter))
    pieces = all_gather_object(logical_pieces(named), group)
    # "attn.qkv_proj.weight_qkv:q_proj.weight" is attn.q_proj.weight
    found = assemble_logical(pieces).items()
    return {f"{name.partition('.')[0]}.{name.partition(':')[2]}": tensor for name, tensor in found}


def own_heads(whole, multiplier):
    """This rank's part of q, k or v `[..., heads * HEAD]`: each head `multiplier` times, then equal parts."""
    group = active_group("tp")
    repeated = whole.unflatten(-1, (-1, HEAD)).repeat_interleave(multiplier, dim=-2).flatten(-2)
    return repeated.chunk(group.size, dim=-1)[group.rank]


def summed(tensor):
    group = active_group("tp")
    return all_gather(tensor.unsqueeze(0), group).sum(dim=0) if group.size > 1 else tensor


@pytest.fixture
def check(fill_adapter, assert_same):
    """Compares outputs and every gradient of the layer with those of three linears with the same adapter."""

    def compare(heads, *, sequence_dim=None, settings, **arguments):
        parallel = {"sequence_parallel_enabled": sequence_dim is not None, "sequence_dimension": sequence_dim or 0}
        model = adapted(heads, settings, **parallel, **arguments)
        fill_adapter(model)
        bias = arguments.get("bias", True)
        reference = alone(model, heads, settings, bias=bias)
        torch.manual_seed(1)
        whole_input = torch.randn(4, 8, INPUT, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(9)
        expected = reference.module["attn"](whole_input)
        gather = arguments["gather_output"]
        if not gather:
            expected = [own_heads(o, times) for o, times in zip(expected, [1, heads[2], heads[2]], strict=True)]
        # Every rank, and every copy of a head, gets a gradient of its own; together they are those of one process.
        torch.manual_seed(2 if gather else 3 + active_group("tp").rank)
        output_grads = [torch.randn_like(output) for output in expected]
        torch.autograd.backward(expected, output_grads)

        own_input = whole_input.detach().clone()
        input_grad = whole_input.grad if gather else summed(whole_input.grad)
        if sequence_dim is not None:
            own_input = scatter_to_sequence_parallel_region(own_input, sequence_dim)
            input_grad = scatter_to_sequence_parallel_region(input_grad, sequence_dim)
        own_input.requires_grad_()
        torch.manual_seed(9)
        outputs = model.module["attn"](own_input)
        torch.autograd.backward(outputs, output_grads)

        for output, tensor in zip(outputs, expected, strict=True):
            assert_same(output, tensor)
        assert_same(own_input.grad, input_grad)
        found = wholes(model.module, grads=True)
        trained = {name: p.grad for name, p in reference.module.named_parameters() if p.requires_grad}
        assert found.keys() == trained.keys()
        for name, grad in trained.items():
            assert_same(found[name], grad if gather else summed(grad))

    return compare


@pytest.mark.sample(2)
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("tp", HEADS)
def test_qkv_linear_with_adapters_equals_three_linears_with_adapters(on_tp, check, tp, sequence_dim):
    def job():
        forms = [(True, False), (False, True)]
        for heads, targets, (fuse, gather) in itertools.product(HEADS[tp], TARGETS[:2], forms):
            settings = {"target_modules": targets, "lora_dropout": 0.25 if fuse else 0.0, "use_rslora": fuse}
            try:
                check(heads, settings=settings, sequence_dim=sequence_dim, fuse_qkv=fuse, gather_output=gather)
            except AssertionError as error:
                raise AssertionError(f"{heads}, {targets}, fuse={fuse}, gather={gather}: {error}") from error

    on_tp(tp, job)


@pytest.mark.sample(3)
@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize(("tp", "heads"), [(2, (3, 3, 1)), (4, (2, 1, 2)), (4, (6, 6, 1))])
def test_padded_layer_with_adapters_equals_three_linears_with_adapters(on_tp, check, tp, heads, sequence_dim):
    def job():
        for fuse in (False, True):
            arguments = {"num_key_value_heads": None, "gather_output": True, "fuse_qkv": fuse, "pad": True}
            check(heads, settings={"bias": "lora_only"}, sequence_dim=sequence_dim, **arguments)

    on_tp(tp, job)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_train_as_the_mode_says(on_tp, check, tp, sequence_dim):
    def job():
        for bias, (targets, fuse) in itertools.product(
            ("none", "all", "lora_only"), [(["qkv_proj"], True), (["q_proj", "v_proj"], False)]
        ):
            settings = {"target_modules": targets, "bias": bias}
            check(HEADS[tp][-1], settings=settings, sequence_dim=sequence_dim, fuse_qkv=fuse, gather_output=False)

    on_tp(tp, job)


def test_bias_of_some_projections_in_a_fused_layer_is_refused_and_leaves_the_model_alone():
    module = Attention((4, 2, 1))

    with pytest.raises(ValueError, match=r"biases of q_proj, v_proj alone, but .* fuse_qkv=False"):
        LoraModel(module, LoraConfig(target_modules=["q_proj", "v_proj"], bias="lora_only"))

    assert all(parameter.requires_grad for parameter in module.parameters())
    assert len(list(module.parameters())) == 2
    LoraModel(Attention((4, 2, 1), bias=False), LoraConfig(target_modules=["q_proj"], bias="lora_only"))


@pytest.mark.parametrize(
    ("targets", "adapted_layers"),
    [
        (["q_proj", "v_proj"], {"q", "v"}),
        (["qkv_proj"], {"q", "k", "v"}),
        (["attn"], {"q", "k", "v"}),
        (["attn.k_proj"], {"k"}),
        (r".*\.(q|k)_proj", {"q", "k"}),
        (r".*qkv_proj", {"q", "k", "v"}),
        (r".*v_proj", {"v"}),  # though it matches "attn.qkv_proj", too
        (["qkv_proj", "q_proj"], {"q", "k", "v"}),
    ],
)
def test_targets_name_the_layer_or_the_projections_in_it(targets, adapted_layers):
    model = adapted((4, 2, 1), {"target_modules": targets})

    assert set(gather_adapter(model)) == {f"attn.{name}_proj.lora_{f}" for name in adapted_layers for f in "AB"}
    assert set(adapter_config(model)["target_modules"]) == {f"{name}_proj" for name in adapted_layers}
    assert list(model.factors()) == [f"attn.qkv_proj.lora_{f}_{n}" for n in "qkv" if n in adapted_layers for f in "AB"]


def test_config_of_an_adapter_on_one_of_two_layers_names_that_one_alone():
    model = nn.ModuleList([Attention((4, 2, 1)) for _ in range(2)])

    config = adapter_config(LoraModel(model, LoraConfig(target_modules=r"1\.(q|v)_proj")))

    assert config["target_modules"] == ["1.q_proj", "1.v_proj"]


def test_adapter_starts_as_that_of_three_linears(on_tp):
    def job(heads):
        targets = ["qkv_proj"] if heads[2] else ["q_proj", "k_proj", "v_proj"]
        return gather_adapter(adapted(heads, {"target_modules": targets, "init_lora_weights": "gaussian"}))

    [expected] = on_tp(1, job, (4, 2, 0))
    for found in on_tp(4, job, (4, 2, 2)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_adapter_goes_between_three_layers_and_one_at_other_degrees(on_tp):
    def columns():
        torch.manual_seed(0)
        sizes = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
        layers = {name: ColumnParallelLinear(INPUT, count * HEAD, dtype=torch.float64) for name, count in sizes.items()}
        return LoraModel(
            nn.ModuleDict({"attn": nn.ModuleDict(layers)}), LoraConfig(lora_rank=RANK, target_modules=["attn"])
        )

    def make(heads):
        return columns() if heads is None else adapted(heads, {})

    def load(heads, adapter):
        model = make(heads)
        load_adapter(model, adapter)
        return gather_adapter(model)

    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in on_tp(2, lambda: gather_adapter(columns()))[0].items()}
    adapter = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    for tp, heads in [(2, None), (4, (4, 2, 2)), (2, (4, 2, 2)), (1, (4, 2, 1))]:
        for found in on_tp(tp, load, heads, adapter):
            assert found.keys() == adapter.keys()
            assert all(torch.equal(found[name], adapter[name]) for name in adapter)


@pytest.mark.pairs
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("tp", [1, 4])
def test_merge_keeps_the_numbers_and_unmerge_restores_every_bit(on_tp, fill_adapter, assert_same, tp, targets, fuse):
    def job():
        model = adapted(HEADS[tp][-1], {"target_modules": targets}, fuse_qkv=fuse, gather_output=False)
        fill_adapter(model)
        input_ = torch.arange(12.0, dtype=torch.float64).view(2, INPUT)
        weights = [parameter.clone() for parameter in model.parameters()]
        before = model.module["attn"](input_)

        model.merge()
        for output, expected in zip(model.module["attn"](input_), before, strict=True):
            assert_same(output, expected, rtol=1e-12)
        assert model.is_merged
        wholes(model.module)  # copies are equal
        model.unmerge()

        assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), weights, strict=True))
        for output, expected in zip(model.module["attn"](input_), before, strict=True):
            assert torch.equal(output, expected)
        names = set(dict(model.unload().named_parameters()))
        assert not [name for name in names if "lora" in name]

    on_tp(tp, job)


def backward_of(outputs):
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


@pytest.mark.parametrize("targets", [["qkv_proj"], ["q_proj"]])
@pytest.mark.parametrize(
    ("sequence_parallel", "gather", "forward", "backward"),
    [
        (False, False, [], ["allreduce_"]),
        (True, False, ["_allgather_base_"], ["alltoall_base_"]),
        (False, True, ["_allgather_base_"], []),
    ],
)
def test_branches_communicate_once_per_direction_and_once_for_copies(
    on_tp, collectives, sequence_parallel, gather, forward, backward, targets
):
    def job():
        arguments = {"gather_output": gather, "sequence_parallel_enabled": sequence_parallel}
        model = adapted((4, 2, 2), {"target_modules": targets}, **arguments)
        found = []
        for merged in (True, False):  # merged, the layer's own remain
            model.merge() if merged else model.unmerge()
            input_ = torch.ones(3, 2, INPUT, requires_grad=True, dtype=torch.float64)
            outputs = []
            found.append(collectives(lambda outputs=outputs, x=input_: outputs.extend(model.module["attn"](x))))
            found.append(collectives(lambda outputs=outputs: backward_of(outputs)))
        plain_forward, plain_backward, both_forward, both_backward = (
            sorted(name.removeprefix("c10d::") for name in names) for names in found
        )
        copies = ["allreduce_"] if targets == ["qkv_proj"] else []
        assert both_forward == sorted(plain_forward + forward)
        assert both_backward == sorted(plain_backward + backward + copies)

    on_tp(4, job)


def test_copies_of_a_factor_get_bitwise_equal_gradients(on_tp):
    def job():
        for heads in [(4, 2, 2), (12, 6, 2), (8, 2, 4)]:
            model = adapted(heads, {}, gather_output=False, dtype=torch.float32)
            torch.manual_seed(5 + active_group("tp").rank)
            outputs = model.module["attn"](torch.ones(7, INPUT))
            torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
            rows = all_gather(model.module["attn"].qkv_proj.lora_B_k.grad, active_group("tp"))
            by_head = rows.view(heads[1], heads[2], HEAD, RANK)
            assert torch.equal(by_head, by_head[:, :1].expand_as(by_head))
            assert by_head.count_nonzero() == by_head.numel()

    on_tp(4, job)


def test_compiled_layer_with_adapters_equals_the_eager_one(on_tp, fill_adapter, assert_same):
    def job():
        model, results = adapted((4, 2, 2), {}, gather_output=False), []
        fill_adapter(model)
        torch.compiler.reset()
        layer = model.module["attn"]
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            input_ = torch.arange(3.0 * INPUT, dtype=torch.float64).view(3, INPUT).requires_grad_()
            outputs = function(input_)
            backward_of(outputs)
            results.append([*outputs, input_.grad, *(p.grad for p in model.adapter_parameters().values())])
        for found, expected in zip(*results, strict=True):
            assert_same(found, expected)

    on_tp(4, job)

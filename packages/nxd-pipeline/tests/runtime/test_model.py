"""What `NxDPPModel` returns, keeps and refuses, beside the numbers of a training step."""

import pytest
import torch
from nxd_pipeline import Microbatches
from nxd_pipeline.model import NxDPPModel
from nxd_pipeline.partition import Stage
from nxd_pipeline.runtime import p2p
from nxd_pipeline.schedules import make_schedule
from nxd_state import Send, batch_isend_irecv, get_group, initialize_model_parallel, send
from torch import nn

pytestmark = pytest.mark.smoke

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def test_train_without_model_parallelism_equals_the_model_itself(make_model, make_batch):
    model, reference = make_model(returns="tuple"), make_model(returns="tuple")
    pipeline = NxDPPModel(model, num_microbatches=4, output_loss_value_spec=(True, False))

    loss = pipeline.run_train(**make_batch())

    expected, _ = reference(**make_batch())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    for (name, parameter), other in zip(pipeline.local_named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name, **EXACT)
    torch.testing.assert_close(pipeline.run_eval(**make_batch()), expected.detach(), **EXACT)


def test_steps_of_several_lengths_accumulate_gradients_of_one_process(run_ranks, make_model, make_batch, layer_class):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(tied=True), layer_class, 2, auto_partition=True)
        losses = [pipeline.run_train(**make_batch(step, seq=seq)) for step, seq in enumerate([5, 7, 5])]
        return losses, {name: it.grad for name, it in pipeline.local_named_parameters()}

    (_, first), (losses, last) = run_ranks(train, 2)

    reference = make_model(tied=True)
    for step, seq in enumerate([5, 7, 5]):
        loss = reference(**make_batch(step, seq=seq))
        loss.backward()
        torch.testing.assert_close(losses[step], loss.detach(), **EXACT)
    expected = {name: it.grad for name, it in reference.named_parameters(remove_duplicate=False)}
    for name, gradient in (first | last).items():
        torch.testing.assert_close(gradient, expected[name], msg=name, **EXACT)
    assert torch.equal(first["embedding.weight"], last["head.weight"])


def test_layouts_travel_once_per_shape_of_inputs(run_ranks, make_model, make_batch, layer_class):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(), layer_class, 2, auto_partition=True)
        counts = []

        def counted_send(*args, **kwargs):
            counts[-1] += 1
            return send(*args, **kwargs)

        def counted_batch(messages, group):
            counts[-1] += sum(isinstance(message, Send) for message in messages)
            return batch_isend_irecv(messages, group)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(p2p, "send", counted_send)
            patch.setattr(p2p, "batch_isend_irecv", counted_batch)
            for step, seq in enumerate([5, 5, 7, 7, 5]):
                counts.append(0)
                pipeline.run_train(**make_batch(step, seq=seq))
        return counts

    first, last = run_ranks(train, 2)

    assert first == [4, 2, 4, 2, 2]  # one activation per microbatch; once, the length and content of its layout
    assert last == [2, 2, 2, 2, 2]  # the mask is computed on both ranks, so one gradient per microbatch


@pytest.mark.parametrize("virtual_pipeline_size", [1, 2])
def test_evaluation_of_several_microbatches_equals_one_process(
    run_ranks, make_model, make_batch, layer_class, virtual_pipeline_size
):
    def evaluate():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        with_loss = NxDPPModel(
            make_model(),
            layer_class,
            4,
            auto_partition=True,
            virtual_pipeline_size=virtual_pipeline_size,
            broadcast_and_average_loss=True,
        )
        without = NxDPPModel(
            make_model(returns="dict"),
            layer_class,
            4,
            auto_partition=True,
            virtual_pipeline_size=virtual_pipeline_size,
        )
        return with_loss.run_eval(**make_batch()), without.run_eval(**make_batch())

    (first_loss, first_outputs), (last_loss, last_outputs) = run_ranks(evaluate, 2)

    expected = make_model(returns="dict")(**make_batch())
    torch.testing.assert_close(first_loss.double(), expected["loss"].detach(), **EXACT)
    assert torch.equal(first_loss, last_loss)
    assert first_outputs is None
    logits = torch.cat([output["logits"] for output in last_outputs])
    torch.testing.assert_close(logits, expected["logits"].detach(), **EXACT)


def test_broadcast_loss_is_the_mean_over_replicas_on_every_rank(run_ranks, make_model, make_batch, layer_class):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(), layer_class, 2, auto_partition=True, broadcast_and_average_loss=True)
        return pipeline.run_train(**make_batch(seed=get_group("dp").rank))

    losses = run_ranks(train, 4)

    model = make_model()
    expected = (model(**make_batch(seed=0)) + model(**make_batch(seed=1))).detach() / 2
    for loss in losses:
        torch.testing.assert_close(loss, expected, **EXACT)


def test_train_with_return_mb_loss_gives_each_microbatch_loss(run_ranks, make_model, make_batch, layer_class):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(), layer_class, 4, return_mb_loss=True, auto_partition=True)
        return pipeline.run_train(**make_batch())

    first, last = run_ranks(train, 2)

    assert first is None
    model, batch = make_model(), make_batch()
    for index, loss in enumerate(last):
        rows = slice(2 * index, 2 * index + 2)
        expected = model(batch["input_ids"][rows], batch["labels"][rows]).detach()
        torch.testing.assert_close(loss, expected, **EXACT)


def test_local_state_of_all_ranks_is_that_of_the_model(run_ranks, make_model, layer_class):
    def names():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(tied=True), layer_class, auto_partition=True, virtual_pipeline_size=2)
        shared = [name for name, it in pipeline.local_named_parameters() if getattr(it, "shared", False)]
        modules = {name for name, _ in pipeline.local_named_modules()}
        return set(pipeline.local_state_dict()), shared, modules

    (first, first_shared, first_modules), (last, last_shared, _) = run_ranks(names, 2)

    whole = make_model(tied=True)
    assert first | last == set(whole.state_dict())
    assert first & last == {"scale"}  # a buffer that both ranks use
    assert (first_shared, last_shared) == ([], ["head.weight"])
    assert {"embedding", "layers.0.linear", "layers.2"} <= first_modules
    assert "layers.1" not in first_modules


class Head(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.last, self.output = model[2], model[3]

    def forward(self, hidden, target):
        return nn.functional.mse_loss(self.output(self.last(hidden["left"]) + hidden["right"]), target)


class Pair(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.first, self.second = model[0], model[1]

    def forward(self, x):
        return {"left": self.first(x), "right": self.second(x)}


class Target(nn.Sequential):
    def forward(self, x, target):
        return Head(self)(Pair(self)(x), target)


class Sum(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.output = model[3]

    def forward(self, left, right, target):
        return nn.functional.mse_loss(self.output(left + right), target)


def by_modules(model):
    return [Pair(model), Head(model)]


def by_wiring(model):
    """The second value skips the second stage and a rank, which is its own where two stages share one."""
    return [
        Stage(model[1], ("x",), ("right",)),
        Stage(model[0], ("x",), ("first",)),
        Stage(model[2], ("first",), ("left",)),
        Stage(Sum(model), ("left", "right", "target")),
    ]


@pytest.mark.parametrize("is_model_given", [True, False])
@pytest.mark.parametrize(("by_hand", "virtual_pipeline_size"), [(by_modules, 1), (by_wiring, 2)])
def test_stages_by_hand_equal_one_process(run_ranks, by_hand, virtual_pipeline_size, is_model_given):
    def make():
        torch.manual_seed(1)
        model = Target(*(nn.Linear(6, 6) for _ in range(4))).double()
        return model, {"x": torch.randn(4, 6).double(), "target": torch.randn(4, 6).double()}

    def pipeline_of(model, **options):
        whole = (model,) if is_model_given else ()
        return NxDPPModel(*whole, num_microbatches=2, stages=by_hand(model), **options)

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        model, batch = make()
        pipeline = pipeline_of(model, virtual_pipeline_size=virtual_pipeline_size)
        return pipeline.run_train(**batch), {name: it.grad for name, it in pipeline.local_named_parameters()}

    (_, first), (loss, last) = run_ranks(train, 2)

    model, batch = make()
    uncut = pipeline_of(model)
    torch.testing.assert_close(uncut.run_train(**batch), loss, **EXACT)
    model.zero_grad()
    expected = model(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    named = dict(model.named_parameters() if is_model_given else uncut.named_parameters())
    named = {name.removeprefix("_whole_model."): parameter for name, parameter in named.items()}
    assert (first | last).keys() == named.keys()
    assert {*named.values()} == {*model.parameters()}
    for name, parameter in named.items():
        torch.testing.assert_close((first | last)[name], parameter.grad, msg=name, **EXACT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"module is None; pass the model, or stages=\[\.\.\.\]"),
        (
            {"stages": [nn.Linear(2, 2), "last"]},
            r"stages\[1\] is a str; pass modules, or Stage\(module, inputs, outputs\)",
        ),
        (
            {"stages": [nn.Linear(2, 2)], "manual_pp_partition": True},
            "already defines the stages; remove manual_pp",
        ),
    ],
)
def test_pipeline_without_a_model_needs_stages(arguments, message):
    with pytest.raises(ValueError, match=message):
        NxDPPModel(**arguments)


def test_uncut_stages_by_hand_name_wrong_inputs():
    pipeline = NxDPPModel(stages=[nn.Linear(2, 2), nn.Linear(2, 2)])

    with pytest.raises(TypeError, match=r"take the inputs \['input'\], got \['x'\]"):
        pipeline.run_eval(x=torch.ones(1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no cuts are given"),
        ({"auto_partition": True}, "needs transformer_layer_cls"),
        ({"auto_partition": True, "pipeline_cuts": ["layers.0"]}, "cannot be combined"),
        ({"pipeline_cuts": ["layers.0", "layers.1"]}, "names 2 layers"),
        ({"pipeline_cuts": [1]}, r"pipeline_cuts=\[1\] must be names"),
        ({"pipeline_cuts": "layers.0"}, r"is a single name; pass a list of names, \['layers\.0'\]"),
        (
            {"auto_partition": True, "transformer_layer_cls": "Layer"},
            "'Layer' is neither a module class",
        ),
        ({"pipeline_cuts": ["model.layers.0"]}, r"did you mean 'layers\.0'"),
        ({"pipeline_cuts": ["layers.0"], "input_names": ["tokens"]}, "does not take"),
        ({"pipeline_cuts": ["layers.0"], "tracer_cls": "other"}, "unknown tracer_cls='other'"),
        ({"return_mb_loss": True, "broadcast_and_average_loss": True}, "set only one"),
        ({"schedule": make_schedule("1f1b", 2, 1), "virtual_pipeline_size": 2}, "remove it, the schedule defines it"),
        ({"schedule": make_schedule("1f1b", 2, 3)}, "num_microbatches=1"),
    ],
)
def test_pipeline_with_wrong_arguments_raises_on_every_rank(run_ranks, make_model, arguments, message):
    def make():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        with pytest.raises(ValueError, match=message):
            NxDPPModel(make_model(), **arguments)

    run_ranks(make, 2)


def test_train_with_wrong_inputs_raises_on_every_rank(run_ranks, make_model, make_batch):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(), num_microbatches=3, pipeline_cuts=["layers.0"])
        batch = make_batch()
        with pytest.raises(ValueError, match=r"\['labels'\] are missing"):
            pipeline.run_train(input_ids=batch["input_ids"])
        with pytest.raises(ValueError, match=r"no stage uses the inputs \['mask'\]"):
            pipeline.run_train(**batch, mask=None)
        with pytest.raises(ValueError, match="num_microbatches=3 does not divide the batch of 8"):
            pipeline.run_train(**batch)

    run_ranks(train, 2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]).double()

    def forward(self, hidden, scale):
        for layer in self.layers:
            hidden = layer(hidden)
        return (hidden * scale).square().mean()


def test_beside_inputs_that_are_already_microbatches_a_number_is_given_to_each(run_ranks):
    hidden = torch.arange(24.0, dtype=torch.float64).view(6, 4)

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(Scaled(), nn.Linear, 2, auto_partition=True, broadcast_and_average_loss=True)
        return pipeline.run_train(hidden=Microbatches(hidden.split([2, 4])), scale=3.0).item()

    expected = sum(Scaled()(part, 3.0).item() for part in hidden.split([2, 4])) / 2
    assert run_ranks(train, 2) == [pytest.approx(expected, rel=1e-12)] * 2


class Masked(nn.Module):
    """A model with a method of its own that changes weights, as examples of mixtures of experts have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = {"hidden": 4}
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        for layer in self.layers:
            layer.mask = torch.tensor([1.0, 1.0, 1.0, 0.0])

    @torch.no_grad()
    def zero_padding_weights(self):
        for layer in self.layers:
            layer.weight.mul_(layer.mask)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


def weights_after_the_models_own_method(virtual):
    initialize_model_parallel(pipeline_model_parallel_size=2)
    model = Masked()
    pipeline = NxDPPModel(
        model, nn.Linear, 2, auto_partition=True, input_names=["hidden"], virtual_pipeline_size=virtual
    )
    pipeline.zero_padding_weights()
    whole = pipeline.original_torch_module
    return {
        "weights": {name: it.detach() for name, it in pipeline.local_named_parameters()},
        "sizes": pipeline.sizes,
        "absent": [name for name, it in whole.named_parameters() if it.is_meta],
        "unchanged": not any(it.is_meta for it in model.parameters()),
        "saved": sorted(pipeline.state_dict()),
    }


@pytest.mark.parametrize("virtual", [1, 2])
def test_methods_of_the_model_change_the_weights_of_each_rank(run_ranks, virtual):
    ranks = run_ranks(weights_after_the_models_own_method, 2, virtual)

    reference = Masked()
    reference.zero_padding_weights()
    weights = {name: it for rank in ranks for name, it in rank["weights"].items()}
    assert weights.keys() == dict(reference.named_parameters()).keys()
    for name, expected in reference.named_parameters():
        torch.testing.assert_close(weights[name], expected.detach(), msg=name, rtol=0, atol=0)
    for rank in ranks:
        assert rank["sizes"] == {"hidden": 4}
        assert sorted([*rank["absent"], *rank["weights"]]) == sorted(weights)
        assert rank["unchanged"]
        assert not any("original" in name for name in rank["saved"])


def test_names_that_the_model_lacks_are_missing(make_model):
    with pytest.raises(AttributeError, match="no attribute 'padding_of_weights'"):
        NxDPPModel(make_model()).padding_of_weights  # noqa: B018

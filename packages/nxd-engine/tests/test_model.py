"""`NxDModel` in one process: the calls of an ordinary module, under the names of the model that the user wrote."""

import pytest
import torch
from nxd_engine import NxDModel, initialize_parallel_model, neuronx_distributed_config
from nxd_engine.models import LlamaDecoderLayer, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("one_process")


def make(llama_config, **arguments) -> tuple[NxDModel, LlamaForCausalLM]:
    """The wrapped model and an equal plain one."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(llama_config)
    torch.manual_seed(0)
    wrapped = initialize_parallel_model(neuronx_distributed_config(**arguments), LlamaForCausalLM, llama_config)
    return wrapped, plain


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 48, (4, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def test_run_train_is_forward_and_backward_of_the_whole_batch(llama_config):
    wrapped, plain = make(llama_config)

    loss = wrapped.run_train(*batch())

    expected = plain(*batch())
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for (name, parameter), (expected_name, wanted) in zip(
        wrapped.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == expected_name
        assert torch.equal(parameter.grad, wanted.grad)


def test_loss_of_a_plain_call_goes_backward_as_well(llama_config):
    wrapped, plain = make(llama_config)

    wrapped(*batch()).backward()
    plain(*batch()).backward()

    for parameter, wanted in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad)


def test_run_eval_returns_the_loss_and_leaves_no_gradients(llama_config):
    wrapped, plain = make(llama_config)

    loss = wrapped.run_eval(*batch())

    assert torch.equal(loss, plain(*batch()).detach())
    assert all(parameter.grad is None for parameter in wrapped.parameters())


def test_microbatches_without_a_pipeline_accumulate_the_gradients_of_the_batch(llama_config):
    wrapped, plain = make(llama_config, pipeline_config={"num_microbatches": 4, "return_mb_loss": True})

    losses = wrapped.run_train(*batch())

    expected = plain(*batch())
    expected.backward()
    assert torch.allclose(torch.stack(losses).mean(), expected)
    for parameter, wanted in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)


def test_names_are_those_of_the_model_itself(llama_config):
    wrapped, plain = make(llama_config)

    def names(named):
        return [name for name, _ in named]

    assert names(wrapped.named_parameters(prefix="x")) == names(plain.named_parameters(prefix="x"))
    assert names(wrapped.named_buffers()) == names(plain.named_buffers())
    assert names(wrapped.named_modules()) == names(plain.named_modules())
    assert names(wrapped.named_children()) == ["model", "lm_head"]
    assert [type(module) for module in wrapped.children()] == [type(module) for module in plain.children()]
    assert len(list(wrapped.modules())) == len(list(plain.modules()))
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    assert type(wrapped.local_module()) is LlamaForCausalLM


def test_shortcuts_lead_to_the_model_and_say_what_it_lacks(llama_config):
    wrapped, _ = make(llama_config)

    assert wrapped.config is llama_config
    assert wrapped.dtype == torch.float32
    with pytest.raises(AttributeError, match="no attribute 'name_or_path'"):
        _ = wrapped.name_or_path


def test_methods_of_the_model_itself_can_be_called(llama_config):
    wrapped, _ = make(llama_config)
    wrapped.module.zero_padding_weights = lambda: "zeros"  # a script's own

    assert wrapped.zero_padding_weights() == "zeros"
    assert wrapped.lm_head is wrapped.module.lm_head


def test_modes_moves_and_functions_reach_the_model(llama_config):
    wrapped, _ = make(llama_config)
    seen = []

    wrapped.eval().double().apply(seen.append)

    assert not any(module.training for module in wrapped.modules())
    assert wrapped.train().local_module().training
    assert wrapped.dtype == torch.float64
    assert seen == [*dict.fromkeys(seen)]
    assert seen[-1] is wrapped.local_module()


def test_mode_is_that_of_the_modules_that_are_listed(llama_config):
    wrapped, _ = make(llama_config)
    assert wrapped.training

    wrapped.eval()
    assert not wrapped.training
    for _, module in wrapped.named_modules():  # as Lightning restores the modes after a validation
        module.training = True

    assert wrapped.training
    wrapped.training = False
    assert not wrapped.local_module().training


def test_parts_are_found_by_the_names_that_are_listed(llama_config):
    wrapped, _ = make(llama_config)

    for name, module in wrapped.named_modules():
        assert wrapped.get_submodule(name) is module
    for name, parameter in wrapped.named_parameters():
        assert wrapped.get_parameter(name) is parameter
    with pytest.raises(AttributeError, match=r"this rank has no module 'model\.head'"):
        wrapped.get_submodule("model.head")


def test_extra_state_of_a_module_is_in_the_state_dict_as_it_is():
    class Counter(torch.nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

    wrapped = initialize_parallel_model(neuronx_distributed_config(), Counter, 2, 2)

    state = wrapped.state_dict()

    assert state["_extra_state"] == {"calls": 3}
    assert not state["weight"].requires_grad


def test_state_dict_goes_back_into_another_model(llama_config):
    wrapped, _ = make(llama_config)
    torch.manual_seed(5)
    other = initialize_parallel_model(wrapped.nxd_config, LlamaForCausalLM, llama_config)

    result = other.load_state_dict(wrapped.state_dict())

    assert result.missing_keys == result.unexpected_keys == []
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), wrapped.parameters(), strict=True))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1, 2, 3), {}, "got 3 positional inputs, but the model has 2 named ones: input_ids, labels"),
        ((1,), {"input_ids": 2}, r"the inputs \['input_ids'\] are given both by position and by name"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(llama_config, args, kwargs, message):
    wrapped, _ = make(llama_config, pipeline_config={"input_names": ["input_ids", "labels"]})

    with pytest.raises(ValueError, match=message):
        wrapped.run_train(*args, **kwargs)


def test_stage_gives_its_own_part_and_refuses_to_run_alone(run_ranks, llama_config):
    def run():
        config = neuronx_distributed_config(
            pipeline_parallel_size=2,
            pipeline_config={
                "num_microbatches": 2,
                "transformer_layer_cls": LlamaDecoderLayer,
                "input_names": ["input_ids", "labels"],
                "auto_partition": True,
            },
        )
        torch.manual_seed(0)
        model = initialize_parallel_model(config, LlamaForCausalLM, llama_config)
        with pytest.raises(RuntimeError, match="call run_train or run_eval"):
            model(*batch())
        before = model.state_dict()
        loaded = model.load_state_dict(before)
        model.eval()
        assert all(model.get_parameter(name) is parameter for name, parameter in model.named_parameters())
        return {
            "parameters": [name for name, _ in model.named_parameters()],
            "state": list(before),
            "children": sorted(name for name, _ in model.named_children()),
            "layers": [name for name, module in model.named_modules() if isinstance(module, LlamaDecoderLayer)],
            "missing": loaded.missing_keys,
            "training": any(module.training for module in model.modules()),
            "loss": model.run_eval(*batch()),
            "config": model.config,
        }

    first, last = run_ranks(run, 2)

    torch.manual_seed(0)
    plain = LlamaForCausalLM(llama_config)
    assert sorted(first["parameters"] + last["parameters"]) == sorted(name for name, _ in plain.named_parameters())
    assert first["parameters"] == first["state"]
    assert (first["layers"], last["layers"]) == (["model.layers.0"], ["model.layers.1"])
    assert "model" in first["children"]
    assert "lm_head" in last["children"]
    assert first["missing"] == last["missing"] == []
    assert not first["training"]
    assert first["loss"] is None
    torch.testing.assert_close(last["loss"], plain(*batch()).detach())
    assert first["config"] == last["config"] == llama_config

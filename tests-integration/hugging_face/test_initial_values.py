"""A model that is made from its config without memory begins with the values that transformers gives it in memory."""

import pytest
import torch
from hf_survey.architectures import surveyed, tiny_config
from hf_survey.vision import VISION_FAMILIES, vision_config
from nxd_engine import initialize_parallel_model, neuronx_distributed_config
from nxd_layers.hf import parallelize, param_init_fn_of
from nxd_pipeline import NxDPPModel
from nxd_state import initialize_model_parallel
from nxd_testing import assemble_logical, logical_pieces
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Values that constructors set, values that an inner model sets, and routers of zeros.
FEW = ["apertus", "gemma3n_text", "qwen3_next"]
OTHERS = [name for name in surveyed() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in FEW]
FEW_THAT_SEE = ["gemma3", "mllama"]  # attention of torch with a query of its own; class tokens and gates


def built(model_type):
    if model_type in VISION_FAMILIES:
        return AutoModelForImageTextToText.from_config(vision_config(model_type))
    return AutoModelForCausalLM.from_config(tiny_config(model_type))


def in_memory(model_type, seed):
    torch.manual_seed(seed)
    model = built(model_type)
    return {**dict(model.named_buffers()), **dict(model.state_dict())}


def without_memory(model_type, tp=1, pp=1):
    """The model of one rank, and the stages of several as one."""
    initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    with torch.device("meta"):
        model = built(model_type)
    model = parallelize(model)
    stages = NxDPPModel(model, num_microbatches=1, auto_partition=True, param_init_fn=param_init_fn_of(model))
    return model, stages


def values(model_type):
    model = without_memory(model_type)[0]
    return {**dict(model.named_buffers()), **dict(model.state_dict())}


def pieces(model_type, tp, pp):
    return logical_pieces((name, it, it) for name, it in without_memory(model_type, tp, pp)[1].local_named_parameters())


MORE = [*OTHERS, *(name for name in VISION_FAMILIES if name not in FEW_THAT_SEE)]


@pytest.mark.parametrize(
    "model_type", [*FEW, *FEW_THAT_SEE, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_initial_values_are_those_of_transformers(run_ranks, model_type):
    expected, other_seed = in_memory(model_type, 1), in_memory(model_type, 2)

    (found,) = run_ranks(values, 1, model_type)

    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if torch.equal(value, other_seed[name]):
            torch.testing.assert_close(found[name], value, msg=name)
        elif value.numel() >= 64:
            assert 0.5 < found[name].float().std() / value.float().std() < 2, name


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_next"])  # residual outputs that blocks scale; routers, a head
def test_initial_values_do_not_depend_on_the_layout(run_ranks, model_type):
    expected = assemble_logical(run_ranks(pieces, 1, model_type, 1, 1))

    found = assemble_logical(run_ranks(pieces, 4, model_type, 2, 2))

    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Scale(nn.Module):
    """A module that `_init_weights` does not know, and that cannot be made anew from the config."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width))
        self.register_buffer("not_stored", torch.empty(width), persistent=False)


class WithScale(LlamaForCausalLM):
    def __init__(self, config, *, buffer=False):
        super().__init__(config)
        self.further = Scale(config.hidden_size)
        if not buffer:
            del self.further.not_stored


def built_before_loading(*, buffer):
    initialize_model_parallel()
    with torch.device("meta"):
        model = WithScale(tiny_config("llama"), buffer=buffer)
    options = {"param_init_fn": model._init_weights, "weights_are_loaded": True}
    return initialize_parallel_model(neuronx_distributed_config(model_init_config=options), lambda: model)


def test_unknown_weights_are_zero_if_all_weights_are_loaded_afterwards(run_ranks):
    def further():
        built = built_before_loading(buffer=False)
        return {name: it for name, it in built.state_dict().items() if "further" in name}

    (found,) = run_ranks(further, 1)

    assert found.keys() == {"further.scale", "further.shift"}
    assert not any(it.any() for it in found.values())


def test_an_unknown_buffer_that_no_file_holds_is_an_error_even_so(run_ranks):
    def message():
        with pytest.raises(ValueError, match="left 'not_stored' of 'further'") as error:
            built_before_loading(buffer=True)
        return str(error.value)

    run_ranks(message, 1)

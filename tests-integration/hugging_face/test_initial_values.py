"""A model that is made from its config without memory begins with the values that transformers gives it in memory."""

import pytest
import torch
from hf_survey.architectures import surveyed, tiny_config
from nxd_layers.hf import parallelize, param_init_fn_of
from nxd_pipeline import NxDPPModel
from nxd_state import initialize_model_parallel
from nxd_testing import assemble_logical, logical_pieces
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Values that constructors set, values that an inner model sets, and routers of zeros.
FEW = ["apertus", "gemma3n_text", "qwen3_next"]
OTHERS = [name for name in surveyed() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in FEW]


def in_memory(model_type, seed):
    torch.manual_seed(seed)
    return dict(AutoModelForCausalLM.from_config(tiny_config(model_type)).state_dict())


def without_memory(model_type, tp=1, pp=1):
    """The model of one rank, and the stages of several as one."""
    initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    model = parallelize(model)
    stages = NxDPPModel(model, num_microbatches=1, auto_partition=True, param_init_fn=param_init_fn_of(model))
    return model, stages


def values(model_type):
    return dict(without_memory(model_type)[0].state_dict())


def pieces(model_type, tp, pp):
    return logical_pieces((name, it, it) for name, it in without_memory(model_type, tp, pp)[1].local_named_parameters())


@pytest.mark.parametrize("model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
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

"""A model that is made from its config without memory begins with the values that transformers gives it in memory."""

import pytest
import torch
from hf_survey.architectures import surveyed, tiny_config
from nxd_layers.hf import param_init_fn_of
from nxd_pipeline import NxDPPModel
from nxd_state import initialize_model_parallel
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Values that constructors set, values that an inner model sets, and routers of zeros.
FEW = ["apertus", "gemma3n_text", "qwen3_next"]
OTHERS = [name for name in surveyed() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in FEW]


def in_memory(model_type, seed):
    torch.manual_seed(seed)
    return dict(AutoModelForCausalLM.from_config(tiny_config(model_type)).state_dict())


def without_memory(model_type):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    initialize_model_parallel()
    NxDPPModel(model, num_microbatches=1, auto_partition=True, param_init_fn=param_init_fn_of(model))
    return dict(model.state_dict())


@pytest.mark.parametrize("model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_initial_values_are_those_of_transformers(run_ranks, model_type):
    expected, other_seed = in_memory(model_type, 1), in_memory(model_type, 2)

    (found,) = run_ranks(without_memory, 1, model_type)

    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if torch.equal(value, other_seed[name]):
            torch.testing.assert_close(found[name], value, msg=name)
        elif value.numel() >= 64:
            assert 0.5 < found[name].float().std() / value.float().std() < 2, name

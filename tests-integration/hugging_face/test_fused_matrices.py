"""Muon's matrices of transformers' models: what a model fuses is split as its own code splits it.

Whether the rules are right is seen by zeroing the outputs of one matrix: where a gate, what it is multiplied with, or
the values are zero, so is what the layer passes on, and zero queries attend as zero keys do.
"""

import sys
from pathlib import Path

import pytest
import torch
from nxd_optim import Muon, muon_parameter_groups
from nxd_parity import InFloat64
from nxd_state.parameter_marks import get_matrix_layout

pytest.importorskip("transformers", reason="the models are of transformers: pip install transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from hf_survey.architectures import tiny_model

TOKENS = torch.arange(3, 35).view(2, 16)
LAST_PROJECTIONS = ("o_proj", "dense", "out_proj", "c_proj", "Wo", "down_proj", "output_linear")
ATTENTION = (
    "qkv_proj",
    "query_key_value",
    "c_attn",
    "Wqkv",
    "kv_b_proj",
)  # that of minimax is linear: a product of all
MODELS = {
    "phi3": {"qkv_proj": 3, "gate_up_proj": 2},
    "gpt_neox": {"query_key_value": 3},
    "gpt_neox_japanese": {"query_key_value": 3},
    "falcon": {"query_key_value": 3},
    "falcon, multi query": {"query_key_value": 3},
    "falcon, one key for each": {"query_key_value": 3},
    "bloom": {"query_key_value": 3},
    "persimmon": {"query_key_value": 3},
    "gpt2": {"c_attn": 3},
    "gpt_bigcode": {"c_attn": 3},
    "gpt_bigcode, one key for each": {"c_attn": 3},
    "mpt": {"Wqkv": 3},
    "modernbert-decoder": {"Wi": 2},
    "minimax": {"qkv_proj": 3, "experts.gate_up_proj": 2},
    "deepseek_v3": {"kv_b_proj": 2, "experts.gate_up_proj": 2},
    "qwen3_5_text": {"in_proj_qkv": 3},
    "glm": {"gate_up_proj": 2},
    "granitemoeshared": {"input_linear": 2, "experts.gate_up_proj": 2},
    "mixtral": {"experts.gate_up_proj": 2},
    "gpt_oss": {"experts.gate_up_proj": 2},
    "llama4_text": {"experts.gate_up_proj": 2},
}
CHANGES = {
    "multi query": {"new_decoder_architecture": False, "multi_query": True},
    "one key for each": {"new_decoder_architecture": False, "multi_query": False},
}


def model_of(case):
    name, _, change = case.partition(", ")
    torch.manual_seed(0)
    model = tiny_model(name, **CHANGES.get(change, {})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
        for key, parameter in model.named_parameters():
            if "bias" in key:
                parameter.zero_()
    return model


def fused_parameters(model):
    """By the end of their names, all parameters that hold several matrices."""
    muon_parameter_groups(model)
    return {name: p for name, p in model.named_parameters() if (get_matrix_layout(p) or ((), ()))[1]}


def outputs_of(parameter, index):
    """The values of one matrix in a parameter, to be changed."""
    layout = get_matrix_layout(parameter)
    turns = parameter.data.movedim(layout.outputs_dim, 0).unflatten(0, (-1, sum(layout.sections)))
    return turns.split(layout.sections, dim=1)[index]


def passed_on(model, name):
    """What the layers of this parameter's module pass on to the last one of them, or experts to the outside."""
    parent = model.get_submodule(name.removesuffix(".weight").rpartition(".")[0])
    last = next((it for it in (getattr(parent, key, None) for key in LAST_PROJECTIONS) if it is not None), None)
    found = []
    if isinstance(last, torch.nn.Module):
        hook = last.register_forward_pre_hook(lambda module, args: found.append(args[0].clone()))
    else:
        hook = parent.register_forward_hook(lambda module, args, output: found.append(output.clone()))
    with torch.no_grad():
        model(input_ids=TOKENS)
    hook.remove()
    return found[0]


def without(model, name, parameter, index):
    kept = parameter.detach().clone()
    outputs_of(parameter, index).zero_()
    found = passed_on(model, name)
    parameter.data.copy_(kept)
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", MODELS)
def test_matrices_are_those_that_the_model_computes_with(case):
    with InFloat64():
        model = model_of(case)
        fused = fused_parameters(model)

        for ending, number in MODELS[case].items():
            name, parameter = next((it, p) for it, p in fused.items() if it.removesuffix(".weight").endswith(ending))
            assert len(get_matrix_layout(parameter).sections) == number
            assert passed_on(model, name).abs().max() > 1e-3
            each = [without(model, name, parameter, index) for index in range(number)]
            is_attention = ending in ATTENTION and case != "minimax"
            is_zero = [not it.any() for it in each]
            if case == "gpt_oss":  # gate * (up + 1)
                assert is_zero == [True, False]
            elif is_attention:
                assert is_zero == [False] * (number - 1) + [True]
            else:
                assert all(is_zero)
            if number == 3 and is_attention:
                torch.testing.assert_close(each[0], each[1])
    assert {it.removesuffix(".weight").split(".")[-1] for it in fused} == {it.split(".")[-1] for it in MODELS[case]}


def test_phi3_trains_as_a_llama_of_the_same_weights_with_muon_of_torch():
    with InFloat64():
        torch.manual_seed(0)
        phi3, llama = tiny_model("phi3", sliding_window=None), tiny_model("llama", rms_norm_eps=1e-5)
        llama.load_state_dict(split_as_llama(phi3.state_dict()))
        groups = muon_parameter_groups(phi3)
        ours = [Muon(groups, lr=0.02)]
        is_matrix = {name: "_proj" in name for name, _ in llama.named_parameters()}
        theirs = [
            torch.optim.Muon([p for name, p in llama.named_parameters() if is_matrix[name]], lr=0.02),
            torch.optim.AdamW(
                [p for name, p in llama.named_parameters() if p.dim() > 1 and not is_matrix[name]],
                0.02,
                weight_decay=0.1,
            ),
            torch.optim.AdamW([p for p in llama.parameters() if p.dim() == 1], 0.02, weight_decay=0.0),
        ]

        for model, optimizers in ((phi3, ours), (llama, theirs)):
            for _ in range(10):
                model(input_ids=TOKENS, labels=TOKENS).loss.backward()
                for it in optimizers:
                    it.step()
                    it.zero_grad()

    found = split_as_llama(phi3.state_dict())
    for name, tensor in llama.state_dict().items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def split_as_llama(state):
    split = {}
    for name, tensor in state.items():
        if "qkv_proj" in name:
            parts = zip(("q_proj", "k_proj", "v_proj"), tensor.split([32, 16, 16]), strict=True)
            split |= {name.replace("qkv_proj", part): it for part, it in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
            split |= {name.replace("gate_up_proj", part): it for part, it in parts}
        else:
            split[name] = tensor
    return split

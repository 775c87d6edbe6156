"""Traced language models give the logits of one plain process, at any degree, before and after saving."""

import neuronx_distributed as nxd
import nxd_ckpt
import pytest
import torch
import traced_llama

IDS = torch.arange(2 * 8).view(2, 8) * 7 % 32
EXACT, BFLOAT16 = {"rtol": 1e-10, "atol": 1e-12}, {"rtol": 5e-2, "atol": 5e-2}
SETTINGS = {"compiler": "export", "progress": False}


def check(found, expected) -> None:
    for logits, whole, tolerance in zip(found, expected, (EXACT, BFLOAT16), strict=True):
        torch.testing.assert_close(logits, whole, **tolerance)


@pytest.mark.parametrize("degree", [1, 2, 4])
@torch.no_grad()
def test_traced_llama_equals_the_plain_one_in_float64_and_bfloat16_also_when_loaded(tmp_path, degree):
    expected = traced_llama.llama()(IDS)

    with nxd.trace.parallel_model_trace(traced_llama.llama, IDS, tp_degree=degree, **SETTINGS) as model:
        check(model(IDS), expected)
        nxd.trace.parallel_model_save(model, tmp_path / "model")
    with nxd.trace.parallel_model_load(tmp_path / "model") as model:
        check(model(IDS), expected)


@torch.no_grad()
def test_weights_of_a_checkpoint_go_into_a_model_traced_on_meta(tmp_path):
    plain = traced_llama.llama()
    nxd_ckpt.save(tmp_path, "one", dict(plain.state_dict()))
    checkpoint = nxd_ckpt.open_checkpoint(tmp_path)
    settings = SETTINGS | {"weights": checkpoint, "inline_weights_to_neff": False}
    with nxd.trace.parallel_model_trace(traced_llama.llama_on_meta, IDS, tp_degree=2, **settings) as model:
        check(model(IDS), plain(IDS))
        for parameter in plain.parameters():
            parameter.mul_(1.5)
        model.replace_weights(dict(plain.state_dict()))
        check(model(IDS), plain(IDS))


@torch.no_grad()
def test_traced_models_of_transformers_equal_the_plain_ones():
    pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
    expected = traced_llama.hugging_face()(IDS)

    with nxd.trace.parallel_model_trace(traced_llama.hugging_face, IDS, tp_degree=2, **SETTINGS) as model:
        found = model(IDS)

    for name, logits in expected.items():
        torch.testing.assert_close(found[name], logits, rtol=1e-5, atol=1e-6)  # rotary positions are in float32

"""Traced language models give the logits of one plain process, at any degree, before and after saving."""

import os
import subprocess
import sys
from pathlib import Path

import neuronx_distributed as nxd
import nxd_ckpt
import pytest
import torch
import traced_llama
from nxd_testing import deadline

pytestmark = pytest.mark.sample(1)  # each takes its time

IDS = torch.arange(2 * 8).view(2, 8) * 7 % 32
EXACT, BFLOAT16 = {"rtol": 1e-10, "atol": 1e-12}, {"rtol": 5e-2, "atol": 5e-2}
WITH_FLOAT32_POSITIONS = {"rtol": 1e-5, "atol": 1e-6}  # the rotary ones of transformers, whatever the model's dtype
SETTINGS = {"compiler": "export"}
SLOW = pytest.mark.slow


def check(found, expected, exact=EXACT) -> None:
    assert len(found) == len(expected)
    for logits, whole in zip(found, expected, strict=True):
        assert logits.dtype == whole.dtype
        torch.testing.assert_close(logits, whole, **(BFLOAT16 if whole.dtype == torch.bfloat16 else exact))


def load_and_call(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a saved model gives in a fresh process."""
    input_file, output_file = folder.parent / "ids.pt", folder.parent / "logits.pt"
    torch.save(ids, input_file)
    script = Path(__file__).with_name("load_and_call.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, script, folder, input_file, output_file], check=True, env=environment, timeout=deadline(300)
    )
    return tuple(torch.load(output_file))


@pytest.mark.sample(1)
@pytest.mark.parametrize("degree", [1, 2, 4])
@torch.no_grad()
def test_traced_llama_equals_the_plain_one_in_float64_and_bfloat16_also_when_loaded_elsewhere(tmp_path, degree):
    expected = traced_llama.llama()(IDS)

    with nxd.trace.parallel_model_trace(traced_llama.llama, IDS, tp_degree=degree, **SETTINGS) as model:
        check(model(IDS), expected)
        nxd.trace.parallel_model_save(model, tmp_path / "model")

    check(load_and_call(tmp_path / "model", IDS), expected)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=SLOW), 2, pytest.param(4, marks=SLOW)])
@torch.no_grad()
def test_traced_models_of_transformers_equal_the_plain_ones_also_when_loaded_elsewhere(tmp_path, degree):
    pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
    expected = traced_llama.hugging_face()(IDS)

    with nxd.trace.parallel_model_trace(traced_llama.hugging_face, IDS, tp_degree=degree, **SETTINGS) as model:
        check(model(IDS), expected, WITH_FLOAT32_POSITIONS)
        nxd.trace.parallel_model_save(model, tmp_path / "model")

    check(load_and_call(tmp_path / "model", IDS), expected, WITH_FLOAT32_POSITIONS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("degree", [2, 4])
def test_llama_is_compiled_once_for_all_ranks(degree, tmp_path, capfd):
    settings = SETTINGS | {"cache_dir": tmp_path}

    nxd.trace.parallel_model_trace(traced_llama.llama, IDS, tp_degree=degree, **settings).close()

    assert "compiling 1 of 1 distinct programs" in capfd.readouterr().err


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

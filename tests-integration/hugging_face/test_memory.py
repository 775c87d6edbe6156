"""The memory that a rank takes to load its half of a folder of one gigabyte."""

from pathlib import Path

import pytest
import torch
import transformers
from nxd_ckpt.interop import open_hugging_face
from nxd_engine.hugging_face import load_pretrained
from nxd_layers.hf import parallelize
from nxd_state import initialize_model_parallel
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is Linux's to tell")


def status_bytes(field):
    line = next(it for it in Path("/proc/self/status").read_text().splitlines() if it.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_rank_of_two_takes_less_than_60_percent_of_the_folder(run_ranks, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.full(it.shape, 0.01, dtype=torch.bfloat16) for name, it in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 10**9
    del tensors

    def load():
        initialize_model_parallel(tensor_model_parallel_size=2)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path)).bfloat16()
        model = parallelize(model)
        open_hugging_face(tmp_path)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status_bytes("VmRSS")
        load_pretrained(model, tmp_path)
        assert all(bool((p == p.flatten()[0]).all()) for p in model.parameters())
        return status_bytes("VmHWM") - before, sum(p.nbytes for p in model.parameters())

    for peak, held in run_ranks(load, 2):
        print(f"peak {peak / size:.1%} of the folder, of which {held / size:.1%} are the rank's part")
        assert peak < 0.6 * size

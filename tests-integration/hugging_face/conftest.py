"""Small models of transformers in folders, and the survey of `tools/`, which is no package."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
pytest.importorskip("tokenizers", reason="a folder's tokenizer needs it: pip install tokenizers")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))


@pytest.fixture
def make_folder(tmp_path):
    """A function that saves a tiny model of a type, with a tokenizer, and gives its folder."""
    import torch
    import transformers
    from hf_survey.architectures import tiny_config

    def make(model_type, *, dtype=torch.float32, max_shard_size="40KB", **sizes):
        config = tiny_config(model_type)
        config.update(sizes)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        folder = tmp_path / model_type
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        words = {f"word{number}": number for number in range(64)}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": words, "unk_token": ""},
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return folder

    return make

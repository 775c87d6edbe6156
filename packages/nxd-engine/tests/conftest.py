"""A Llama of two layers in one process, without and with the training API."""

import pytest
from nxd_engine.models import LlamaConfig
from nxd_state import destroy_model_parallel


@pytest.fixture
def llama_config():
    return LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture
def one_process():
    """The mesh that the test makes ends with it."""
    yield
    destroy_model_parallel()

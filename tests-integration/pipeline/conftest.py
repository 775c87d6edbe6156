"""A Llama small enough to be trained in one process and in every layout of a test, in float64."""

import pytest
from nxd_engine.models import LlamaConfig


@pytest.fixture
def make_config():
    """`make_config(tied=True)`: eight layers, so that four ranks can have two stages each."""

    def make(*, tied: bool = False, num_layers: int = 8) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )

    return make

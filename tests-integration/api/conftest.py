"""A Llama small enough to be trained in one process and in every layout of a test."""

import pytest
from nxd_trainer.models import LlamaConfig


@pytest.fixture
def make_config():
    """`make_config(tied=True)`: four layers, whose sizes two and four tensor-parallel ranks divide."""

    def make(*, tied: bool = False) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )

    return make

"""The Llama as an ordinary model: shapes, names, its cache, its errors. Layouts are compared in tests-integration."""

import pytest
import torch
from nxd_trainer.models import KeyValueCache, LlamaConfig, LlamaForCausalLM
from torch.nn import functional as F

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(**sizes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes), dtype=torch.float64)


def test_parameter_names_are_those_of_the_hugging_face_model():
    layer = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]

    names = {name for name, _ in make_model().named_parameters()}

    assert names == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"model.layers.{number}.{name}.weight" for number in range(2) for name in layer),
    }


def test_loss_is_the_mean_cross_entropy_of_the_logits():
    model, tokens = make_model(), torch.randint(0, 32, (3, 9))

    loss = model(tokens[:, :-1], tokens[:, 1:])

    logits = model(tokens[:, :-1])
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def test_ignored_labels_do_not_count():
    model, tokens = make_model(), torch.randint(0, 32, (2, 6))
    labels = tokens.clone()
    labels[:, 3:] = -100

    loss = model(tokens, labels)

    torch.testing.assert_close(loss, model(tokens[:, :3], tokens[:, :3]))


def test_all_labels_ignored_gives_zero_loss():
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    assert make_model()(tokens, torch.full_like(tokens, -100)) == 0


def test_attention_is_causal():
    model, tokens = make_model(), torch.randint(0, 32, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 32

    torch.testing.assert_close(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_cache_token_by_token_equals_the_whole_sequence():
    model, tokens, cache = make_model(), torch.randint(0, 32, (2, 8)), KeyValueCache()

    parts = [model(tokens[:, :3], cache=cache), *(model(tokens[:, i : i + 1], cache=cache) for i in range(3, 8))]

    assert cache.length == 8
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_cache_in_pieces_equals_the_whole_sequence():
    model, tokens, cache = make_model(), torch.randint(0, 32, (2, 9)), KeyValueCache()

    parts = [model(tokens[:, start : start + 3], cache=cache) for start in (0, 3, 6)]

    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_cache_with_sequence_parallel_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SIZES), sequence_parallel=True)

    with pytest.raises(ValueError, match="sequence_parallel=False"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache=KeyValueCache())


def test_tied_head_is_the_embedding_table():
    model = make_model(tie_word_embeddings=True)

    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 18}, "hidden_size=18 must be num_attention_heads=4 times an even head size"),
        ({"num_attention_heads": 16}, "must be num_attention_heads=16 times an even head size"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be positive"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_model(**sizes)


def test_degree_that_does_not_divide_names_every_size_and_the_degrees_that_do(run_ranks):
    def build() -> str:
        from nxd_state import initialize_model_parallel

        initialize_model_parallel(tensor_model_parallel_size=4)
        with pytest.raises(ValueError, match="tensor_parallel_size=4 does not divide") as raised:
            make_model(vocab_size=34)
        return str(raised.value)

    for message in run_ranks(build, 4):
        assert "num_key_value_heads=2; tensor_parallel_size=4 does not divide vocab_size=34" in message
        assert message.endswith("Degrees that divide all sizes: [1, 2]")

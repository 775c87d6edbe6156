"""The Llama as an ordinary model: shapes, names, its cache, its errors. Layouts are compared in tests-integration."""

from functools import partial

import nxd_engine as nxd
import pytest
import torch
from nxd_engine.models import LlamaCache, LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_layers.context import SequenceCut, balanced_cut
from nxd_state import all_reduce, destroy_model_parallel, get_group, initialize_model_parallel
from nxd_testing import assemble_logical, logical_pieces
from torch import nn
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


@pytest.mark.parametrize("tp", [1, 2])
def test_every_module_of_a_layer_is_called_with_its_forward_hooks(run_ranks, tp):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=tp)
        model, tokens = make_model(), torch.arange(8).view(2, 4)
        plain, called = model(tokens), set()
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name: called.add(name))
        model(tokens)
        assert called == {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}
        attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            hook = layer.register_forward_hook(lambda layer, args, output: -output)
            assert not torch.allclose(model(tokens), plain)
            hook.remove()
            assert torch.equal(model(tokens), plain)

    run_ranks(job, tp)


def logits_by_hand(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """`[seq]` to `[seq, vocab]` by the papers' formulas, head by head, from the weights alone."""
    weights, config = dict(model.named_parameters()), model.config
    size, queries_per_key = config.head_size, config.num_attention_heads // config.num_key_value_heads
    speeds = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(len(tokens)), speeds)
    later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def turn(x):  # pairs (i, i + size/2) are complex numbers, turned by the angle of their position
        turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in (f"model.layers.{number}" for number in range(config.num_hidden_layers)):
        normed = norm(hidden, f"{layer}.input_layernorm")
        queries, keys, values = (linear(normed, f"{layer}.self_attn.{x}_proj").split(size, dim=-1) for x in "qkv")
        heads = []
        for number, query in enumerate(queries):
            scores = turn(query) @ turn(keys[number // queries_per_key]).T / size**0.5
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ values[number // queries_per_key])
        hidden = hidden + linear(torch.cat(heads, dim=-1), f"{layer}.self_attn.o_proj")
        normed = norm(hidden, f"{layer}.post_attention_layernorm")
        gate, up = linear(normed, f"{layer}.mlp.gate_proj"), linear(normed, f"{layer}.mlp.up_proj")
        hidden = hidden + linear(gate * gate.sigmoid() * up, f"{layer}.mlp.down_proj")
    return linear(norm(hidden, "model.norm"), "lm_head")


@pytest.mark.parametrize(("length", "tolerance"), [(7, 1e-5), (300, 1e-3)])
def test_logits_are_those_of_the_formulas(length, tolerance):
    model = make_model(initializer_range=0.4, rope_theta=50.0, rms_norm_eps=0.1)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms begin as ones, which would hide them
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    tokens = torch.randint(0, 32, (length,))

    # The rotary tables are float32: their angles are less exact at later positions.
    torch.testing.assert_close(model(tokens[None])[0], logits_by_hand(model, tokens), rtol=tolerance, atol=tolerance)


def test_initial_weights_have_the_spread_of_the_recipe():
    for parameter in make_model(initializer_range=0.5).parameters():
        spread = parameter.std().item()
        assert spread == pytest.approx(0.5 if parameter.dim() > 1 else 0.0, rel=0.2)


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
    model, tokens, cache = make_model(), torch.randint(0, 32, (2, 8)), LlamaCache()

    parts = [model(tokens[:, :3], cache=cache), *(model(tokens[:, i : i + 1], cache=cache) for i in range(3, 8))]

    assert cache.length == 8
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_cache_in_pieces_equals_the_whole_sequence():
    model, tokens, cache = make_model(), torch.randint(0, 32, (2, 9)), LlamaCache()

    parts = [model(tokens[:, start : start + 3], cache=cache) for start in (0, 3, 6)]

    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


@pytest.mark.parametrize("sizes", [{"num_key_value_heads": 1}, {"num_attention_heads": 12, "num_key_value_heads": 3}])
def test_cache_of_copied_heads_equals_the_whole_sequence(run_ranks, sizes):
    def check():
        initialize_model_parallel(tensor_model_parallel_size=4)
        model, cache = make_model(**{"hidden_size": 48, **sizes}), LlamaCache()
        tokens = torch.arange(16).view(2, 8)

        parts = [model(tokens[:, :3], cache=cache), *(model(tokens[:, i : i + 1], cache=cache) for i in range(3, 8))]

        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))
        return cache.keys[0].shape[1]

    assert run_ranks(check, 4) == [sizes.get("num_attention_heads", 4) // 4] * 4


def test_copied_heads_have_the_weights_of_one_process(run_ranks):
    def weights(tp):
        initialize_model_parallel(tensor_model_parallel_size=tp)
        return logical_pieces((name, p, p) for name, p in make_model().named_parameters())

    [alone], together = run_ranks(weights, 1, 1), run_ranks(weights, 4, 4)

    expected, found = assemble_logical([alone]), assemble_logical(together)
    for name in "qkv":
        attention = "model.layers.1.self_attn"
        fused = found[f"{attention}.qkv_proj.weight_qkv:{name}_proj.weight"]
        assert torch.equal(fused, expected[f"{attention}.{name}_proj.weight"])


def test_packed_documents_give_the_logits_of_each_alone():
    model, tokens = make_model(initializer_range=0.4), torch.randint(0, 32, (2, 9))

    logits = model(tokens, document_ids=torch.tensor([[0] * 4 + [1] * 5] * 2))

    # The rotary tables are float32.
    alone = torch.cat([model(tokens[:, :4]), model(tokens[:, 4:])], dim=1)
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits, model(tokens), rtol=1e-2)


def test_packed_documents_with_a_cache_give_the_logits_without():
    model, tokens, cache = make_model(), torch.randint(0, 32, (1, 9)), LlamaCache()
    documents = torch.tensor([[0] * 4 + [1] * 5])

    parts = [model(tokens[:, i : i + 3], cache=cache, document_ids=documents[:, : i + 3]) for i in (0, 3, 6)]

    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens, document_ids=documents))


def compare_packed_documents():
    lengths = torch.tensor([700, 200, 60, 40])  # which two ranks share unevenly in zigzag
    documents, generator = torch.arange(4).repeat_interleave(lengths)[None], torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 32, (2, 1, 1000), generator=generator)
    labels[0, 100:300] = -100
    initialize_model_parallel()
    alone = make_model()
    expected = alone(tokens, labels, document_ids=documents)
    expected.backward()
    destroy_model_parallel()
    initialize_model_parallel(context_parallel_size=2)
    model = make_model()
    assert balanced_cut(documents, 2) != SequenceCut(1000, 2)
    loss = model(tokens, labels, document_ids=documents)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        whole = all_reduce(parameter.grad, get_group("cp"), op="avg")
        torch.testing.assert_close(whole, other.grad, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_packed_documents_over_context_parallel_ranks_equal_one_process(run_ranks):
    run_ranks(compare_packed_documents, 2)


def read_a_prompt():
    tokens = torch.randint(0, 32, (2, 523), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(523) >= 200).long().expand(2, -1)
    holes = torch.ones_like(tokens[:, :520]).index_fill(1, torch.arange(200, 210), 0)
    for given in (None, documents):
        initialize_model_parallel()
        expected, _ = write_after_a_prompt(tokens, given)
        whole = learn_with_a_cache(tokens)
        with torch.no_grad():
            padded = make_model()(tokens[:, :520], cache=LlamaCache(), attention_mask=holes)
        destroy_model_parallel()
        initialize_model_parallel(context_parallel_size=2)
        found, lengths = write_after_a_prompt(tokens, given)
        torch.testing.assert_close(found, expected)
        assert lengths == [260, 1, 1, 1]
        found = learn_with_a_cache(tokens)
        torch.testing.assert_close(found, whole)
        with torch.no_grad():
            logits = make_model()(tokens[:, :520], cache=LlamaCache(), attention_mask=holes)
        torch.testing.assert_close(logits, padded)
        destroy_model_parallel()


def learn_with_a_cache(tokens):
    """Losses and a gradient of a sequence that is whole on every rank, as it has a cache."""
    model, count = make_model(max_position_embeddings=1024), torch.tensor(100.0)
    losses = [
        model(tokens[:, :520], tokens[:, 1:521], cache=LlamaCache(), num_items_in_batch=it) for it in (None, count)
    ]
    losses[0].backward()
    return [*map(torch.detach, losses), model.model.layers[0].self_attn.q_proj.weight.grad]


def write_after_a_prompt(tokens, documents):
    """Logits of a prompt of 520 tokens, and of three more after it, one at a time; how many this rank computed."""
    model, cache, lengths = make_model(max_position_embeddings=1024), LlamaCache(), []
    model.model.embed_tokens.register_forward_hook(lambda *given: lengths.append(len(given[2])))
    of_tokens = [(0, 520), (520, 521), (521, 522), (522, 523)]
    documents_up_to = (None if documents is None else documents[:, :stop] for _, stop in of_tokens)
    with torch.no_grad():
        parts = [
            model(tokens[:, first:stop], cache=cache, document_ids=ids)
            for (first, stop), ids in zip(of_tokens, documents_up_to, strict=True)
        ]
    return torch.cat(parts, dim=1), lengths


def test_prompt_that_context_parallel_ranks_read_together_is_decoded_alike(run_ranks):
    run_ranks(read_a_prompt, 2)


def test_cache_with_sequence_parallel_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SIZES), sequence_parallel=True)

    with pytest.raises(ValueError, match="sequence_parallel=False"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache=LlamaCache())


def test_tied_head_is_the_embedding_table():
    model = make_model(tie_word_embeddings=True)

    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 18}, "hidden_size=18 must be num_attention_heads=4 times an even head size"),
        ({"num_attention_heads": 16}, "must be num_attention_heads=16 times an even head size"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be positive"),
        ({"num_hidden_layers": 2**63}, "num_hidden_layers=9223372036854775808 must be at most 10000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_model(**sizes)


def test_degree_that_does_not_divide_names_every_size_and_the_degrees_that_do(run_ranks):
    def build() -> str:
        initialize_model_parallel(tensor_model_parallel_size=4)
        with pytest.raises(ValueError, match="tensor_parallel_size=4 does not divide") as raised:
            make_model(vocab_size=34, intermediate_size=26)
        return str(raised.value)

    for message in run_ranks(build, 4):
        assert message == (
            "tensor_parallel_size=4 does not divide intermediate_size=26; "
            "tensor_parallel_size=4 does not divide vocab_size=34. Degrees that divide all sizes: [1, 2]"
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_mask_keeps_padding_out_of_the_tokens(side):
    model, tokens = make_model(), torch.arange(8).view(2, 4)
    padding, ones = torch.full((2, 3), 9), torch.ones(2, 4, dtype=torch.long)
    pieces = [(tokens, ones), (padding, torch.zeros_like(padding))]
    ids, mask = (torch.cat(it, dim=1) for it in zip(*(pieces if side == "right" else pieces[::-1]), strict=True))

    logits = model(ids, attention_mask=mask)

    kept = logits[:, :4] if side == "right" else logits[:, 3:]
    torch.testing.assert_close(kept, model(tokens), rtol=1e-5, atol=1e-6)  # angles are in float32


def test_output_has_loss_and_logits_by_name_and_by_index_where_asked_for():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES), dtype=torch.float64, return_dict=True)
    tokens = torch.arange(8).view(2, 4)

    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)

    assert torch.equal(output.loss, make_model()(tokens, tokens, attention_mask=torch.ones_like(tokens)))
    assert output[0] is output.loss
    assert torch.equal(output.logits, make_model()(tokens, attention_mask=torch.ones_like(tokens)))
    assert model(tokens).loss is None


def test_pipeline_trains_on_the_inputs_and_outputs_of_the_documents(run_ranks):
    def train(pp):
        config = nxd.neuronx_distributed_config(
            pipeline_parallel_size=pp,
            pipeline_config={
                "transformer_layer_cls": LlamaDecoderLayer,
                "num_microbatches": 2,
                "auto_partition": True,
                "output_loss_value_spec": (True, False),
                "input_names": ["input_ids", "attention_mask", "labels"],
            },
        )
        torch.manual_seed(0)
        make = partial(LlamaForCausalLM, LlamaConfig(**SIZES), dtype=torch.float64, return_dict=True)
        model = nxd.initialize_parallel_model(config, make)
        tokens = torch.arange(16).view(4, 4)
        return model.run_train(tokens, torch.ones_like(tokens).tril(2), tokens)

    ((expected,), (_, loss)) = run_ranks(train, 1, 1), run_ranks(train, 2, 2)

    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)

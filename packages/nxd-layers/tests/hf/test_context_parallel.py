"""What `parallelize` does with sequences where the mesh has context-parallel ranks."""

import copy

import pytest
import torch
from nxd_layers.context import SequenceCut, balanced_cut
from nxd_layers.hf import cuts_sequences, parallelize
from nxd_state import all_gather, all_reduce, get_group, initialize_model_parallel, seed_model_parallel

transformers = pytest.importorskip("transformers", reason="models are those of transformers: pip install transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LENGTH = 13
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 2 + [1] * 11])
CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # transformers computes norms and losses in float32


def model_of(config_class=transformers.LlamaConfig, **more):
    torch.manual_seed(0)
    # With a cache, transformers does not look for documents.
    config = config_class(**SIZES | {"use_cache": False} | more)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def batch_of(case):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 2:6] = -100
    batch = {"input_ids": ids, "labels": labels}
    if case == "packed":
        batch["position_ids"] = torch.tensor([[*range(5), *range(8)], [*range(2), *range(11)]])
    if case in ("padded left", "padded right"):
        mask = torch.ones(2, LENGTH, dtype=torch.int64)
        mask[0, :4] = 0
        mask = mask if case == "padded left" else mask.flip(1)
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    if case == "told the next tokens":
        batch |= {"shift_labels": labels.roll(-1, 1), "num_items_in_batch": torch.tensor(11)}
    if case == "another label is ignored":
        batch |= {"labels": labels.clamp(min=0), "ignore_index": 0}
    if case == "labels on one rank only":  # CP 2: the first rank has positions 0..3 and 12
        batch["labels"] = torch.full_like(labels, -100).index_fill(1, torch.tensor([1, 2]), 5)
    return batch


def loss_and_gradients(model, batch):
    output = model(**batch)
    output.loss.backward()
    return output.loss.detach(), output.logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def compare(case, **model):
    group = get_group("cp")
    expected = loss_and_gradients(model_of(**model), batch_of(case))
    found = loss_and_gradients(parallelize(model_of(**model)), batch_of(case))
    torch.testing.assert_close(found[0], expected[0], **CLOSE)
    is_balanced = case == "packed" and not model.get("use_cache")
    cut = balanced_cut(DOCUMENTS, 2) if is_balanced else SequenceCut(LENGTH, 2)
    whole = cut.whole_of(all_gather(found[1], group, dim=1))
    learned = batch_of(case).get("attention_mask", torch.ones(2, LENGTH)).bool()
    torch.testing.assert_close(whole[learned], expected[1][learned], **CLOSE)
    for name, gradient in expected[2].items():
        averaged = all_reduce(found[2][name], group, op="avg")
        torch.testing.assert_close(averaged, gradient, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


CASES = ["plain", "packed", "padded left", "padded right", "told the next tokens", "labels on one rank only"]
CASES += ["another label is ignored"]


def compare_all():
    initialize_model_parallel(context_parallel_size=2)
    for case in CASES:
        compare(case)
    # Packed documents under a window; frequencies that depend on the longest position of the whole sequence.
    compare("packed", config_class=transformers.MistralConfig, sliding_window=3)
    # Models that do not keep documents apart: one with a cache, and one that gives its masks no positions.
    compare("packed", use_cache=True)
    compare("packed", config_class=transformers.OPTConfig, ffn_dim=48, word_embed_proj_dim=32)
    for kind in ({"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope", "factor": 4.0, **LONG}):
        compare("plain", max_position_embeddings=8, rope_parameters={"rope_theta": 10000.0, **kind})


LONG = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 8}


def test_loss_logits_and_gradients_of_cut_sequences_equal_one_process(run_ranks):
    run_ranks(compare_all, 2)


def generate():
    initialize_model_parallel(context_parallel_size=2)
    ids = batch_of("plain")["input_ids"]
    expected = model_of().generate(ids, max_new_tokens=5, do_sample=False)
    model = parallelize(model_of())
    assert cuts_sequences(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert cuts_sequences(model)  # again
    seed_model_parallel(get_group("cp").rank)
    torch.manual_seed(get_group("cp").rank)
    drawn = model.generate(ids, max_new_tokens=5, do_sample=True)
    assert torch.equal(all_gather(drawn, get_group("cp"))[:2], all_gather(drawn, get_group("cp"))[2:])


def test_generate_writes_the_same_on_all_context_parallel_ranks(run_ranks):
    run_ranks(generate, 2)


def read_prompts():
    initialize_model_parallel(context_parallel_size=2)
    ids = torch.randint(3, 64, (2, 521), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    holes = torch.ones_like(ids).index_fill(1, torch.arange(200, 210), 0)  # which are not cut
    window = {"config_class": transformers.MistralConfig, "sliding_window": 50}
    for padding, sizes in [(None, {}), (mask, {}), (None, window), (mask, window), (holes, {})]:
        whole, cut = (make_long(**sizes) for make_long in (long_model, lambda **it: parallelize(long_model(**it))))
        lengths = []
        cut.model.embed_tokens.register_forward_hook(lambda *given: lengths.append(given[1][0].shape[1]))  # noqa: B023
        asked = {
            "use_cache": True,
            "max_new_tokens": 8,
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        expected, found = (model.generate(ids, attention_mask=padding, **asked) for model in (whole, cut))
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **CLOSE)
        assert lengths == [521 if padding is holes else 262, *[1] * 7]  # 521 positions filled up to 524
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    loss_and_gradients(cut, batch_of("plain"))  # sequences are cut again


def long_model(**more):
    torch.manual_seed(0)
    return model_of(max_position_embeddings=1024, **more)


def test_prompt_is_read_over_the_ranks_and_decoding_has_all_of_its_cache(run_ranks):
    run_ranks(read_prompts, 2)


def learn_at_padding():
    """What eager attention makes of queries without keys, and where it does not matter."""
    initialize_model_parallel(context_parallel_size=2)
    model = model_of(attn_implementation="eager").float()
    assert model.config._attn_implementation == "eager"
    expected, cut, batch = copy.deepcopy(model), parallelize(model), batch_of("padded left")
    batch["labels"][0, 4] = 5  # of the first token
    torch.testing.assert_close(parallelize(model_of())(**batch).loss, model_of()(**batch).loss)  # with sdpa
    with pytest.raises(ValueError, match=r"the label of row 0, position 4, is predicted at padding that attends to no"):
        cut(**batch)
    batch["labels"][0, 4] = -100
    torch.testing.assert_close(cut(**batch).loss, expected(**batch).loss)
    torch.testing.assert_close(cut(**batch_of("padded right")).loss, expected(**batch_of("padded right")).loss)


def test_label_that_eager_attention_predicts_at_padding_is_refused(run_ranks):
    run_ranks(learn_at_padding, 2)


def refuse():
    initialize_model_parallel(context_parallel_size=2)
    model, batch = parallelize(model_of()), batch_of("plain")
    ids = batch["input_ids"]
    for wrong, message in [
        ({"logits_to_keep": 1}, "logits_to_keep is not supported"),
        ({"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}, r"attention_mask has shape \(2, 1, 13, 13\)"),
        ({"attention_mask": torch.tensor([[1, 0] * 6 + [1]] * 2)}, "padding between tokens, at position 1"),
        ({"attention_mask": torch.ones(2, 10)}, r"attention_mask has shape \(2, 10\); .* pass \[batch, 13\]"),
        ({"labels": torch.zeros(2)}, r"labels has shape \(2,\)"),
        ({"past_key_values": transformers.DynamicCache()}, "(cache|past_key_values) is not supported"),
        ({"use_cache": True}, "use_cache is not supported"),
        ({"pixel_values": torch.ones(2)}, "pixel_values cannot be split"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(ids, **wrong)
    with pytest.raises(ValueError, match="needs input_ids or inputs_embeds"):
        model(labels=batch["labels"])
    with pytest.raises(RuntimeError, match="call the model itself"):
        model.model(ids)
    with pytest.raises(ValueError, match="models of type 'bloom' are not split"):
        parallelize(transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4)))
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match="is not a causal language model"):
        parallelize(transformers.LlamaForSequenceClassification(config))
    first, second = (transformers.LlamaForCausalLM(config) for _ in range(2))
    parallelize(first)
    assert cuts_sequences(first)
    assert not cuts_sequences(second)  # though made from the same config
    with pytest.raises(ValueError, match=r"splits its sequences already; call parallelize\(\) once"):
        parallelize(first)
    second(ids)
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=32, layerdrop=0.5))
    parallelize(opt).train()
    with pytest.raises(ValueError, match=r"layerdrop=0\.5"):
        opt(ids)
    with pytest.raises(ValueError, match="padding before tokens, which OPTForCausalLM would count"):
        opt.eval()(ids, attention_mask=torch.tensor([[0] + [1] * 12] * 2))
    sizes = {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "state_size": 8, "n_groups": 2, "num_hidden_layers": 1}
    mamba = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, vocab_size=64))
    with pytest.raises(ValueError, match="is not supported for Mamba2Mixer with context-parallel ranks"):
        parallelize(mamba, sequence_parallel=True)
    model(**batch)  # a refusal leaves nothing behind


def test_what_cannot_be_cut_is_refused_by_name(run_ranks):
    run_ranks(refuse, 2)

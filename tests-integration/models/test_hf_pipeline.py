"""Unmodified Hugging Face models on two pipeline stages: the loss, gradients and logits of one process."""

import pytest
import torch
from nxd_pipeline import NxDPPModel
from nxd_pipeline.partition import PartitionOptions, partition_model
from nxd_state import initialize_model_parallel

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

pytestmark = pytest.mark.sample(4)  # each takes its time

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
GPT2_SIZES = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | {"hidden_dropout": 0.0}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        GROUPED | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 3}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 8, "sliding_window": 3}),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 3}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2_SIZES | NO_DROPOUT),  # no pipeline plan, tied
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        GROUPED | {"num_local_experts": 4, "output_router_logits": True},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | NO_BERT_DROPOUT),  # an encoder, no pipeline plan, tied
    "llama classifier": ("LlamaForSequenceClassification", "LlamaConfig", GROUPED | {"num_labels": 3}),
}


def make_model(name):
    model_class, config_class, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**sizes)
    config._experts_implementation = "eager"  # the other ones have no float64
    return getattr(transformers, model_class)(config).double()


def make_batch(name, *, labels=True):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (4, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::2, -2:] = 0  # in each microbatch of two
    batch = {"input_ids": ids, "attention_mask": mask}
    if labels:
        batch["labels"] = torch.tensor([0, 2, 1, 1]) if "classifier" in name else ids
    return batch


def halves(batch):
    return [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]


def test_every_architecture_on_two_stages_equals_one_process(run_ranks):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        results = {}
        for name in MODELS:
            pipeline = NxDPPModel(make_model(name), num_microbatches=2, auto_partition=True)
            loss = pipeline.run_train(**make_batch(name))
            gradients = {path: it.grad for path, it in pipeline.local_named_parameters()}
            results[name] = loss, gradients, pipeline.run_eval(**make_batch(name, labels=False))
        return results

    first_rank, last_rank = run_ranks(train, 2)

    for name in MODELS:
        model = make_model(name)
        losses = [model(**part).loss for part in halves(make_batch(name))]
        (sum(losses) / 2).backward()
        loss, gradients, outputs = last_rank[name]
        torch.testing.assert_close(loss, sum(losses).detach() / 2, msg=name, **EXACT)
        gradients = first_rank[name][1] | gradients
        expected = dict(model.named_parameters(remove_duplicate=False))
        assert dict(model.named_parameters()).keys() <= gradients.keys()
        for path, gradient in gradients.items():
            if expected[path].grad is not None:  # an unused pooler has none
                torch.testing.assert_close(gradient, expected[path].grad, msg=f"{name}: {path}", **EXACT)
        with torch.no_grad():
            logits = [model(**part).logits for part in halves(make_batch(name, labels=False))]
        for output, expected_logits in zip(outputs, logits, strict=True):
            torch.testing.assert_close(output.logits, expected_logits, msg=name, **EXACT)


class RoutedBlock(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = torch.nn.Linear(config.hidden_size, config.num_local_experts)
        self.out = torch.nn.Linear(config.num_local_experts, config.hidden_size)

    def forward(self, hidden, earlier_logits):
        logits = self.router(hidden)
        hidden = hidden + self.out(logits.softmax(-1))
        return hidden, logits if earlier_logits is None else torch.cat([earlier_logits, logits])


class HandsOnRouterLogits(transformers.PreTrainedModel):
    """A mixture with code of its own, as that of an old transformers: each layer takes the logits of those before."""

    config_class = transformers.MixtralConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList([RoutedBlock(config) for _ in range(config.num_hidden_layers)])
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids, labels=None):
        hidden, router_logits = self.embed(input_ids), None
        for layer in self.layers:
            hidden, router_logits = layer(hidden, router_logits)
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = loss + 0.1 * router_logits.square().mean()
        return transformers.modeling_outputs.MoeCausalLMOutputWithPast(
            loss=loss, logits=logits, router_logits=router_logits
        )


def make_hands_on():
    torch.manual_seed(0)
    return HandsOnRouterLogits(transformers.MixtralConfig(**MODELS["mixtral"][2])).double()


def test_model_whose_layers_hand_router_logits_on_equals_one_process(run_ranks):
    batch = {name: make_batch("mixtral")[name] for name in ("input_ids", "labels")}

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(
            make_hands_on(),
            transformer_layer_cls=RoutedBlock,
            num_microbatches=2,
            output_loss_value_spec=(True, False, False),
            input_names=["input_ids", "labels"],
            auto_partition=True,
        )
        loss = pipeline.run_train(**batch)
        return loss, {path: it.grad for path, it in pipeline.local_named_parameters()}

    (_, first), (loss, last) = run_ranks(train, 2)

    model = make_hands_on()
    losses = [model(**part).loss for part in halves(batch)]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(loss, sum(losses).detach() / 2, **EXACT)
    assert len(first) < len(first | last) == len(dict(model.named_parameters()))
    for path, gradient in (first | last).items():
        torch.testing.assert_close(gradient, model.get_parameter(path).grad, msg=path, **EXACT)


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_loss_spec_of_a_tuple_checkpointing_and_virtual_stages_equal_one_process(run_ranks, name):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        model = make_model(name)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        pipeline = NxDPPModel(
            model,
            num_microbatches=2,
            output_loss_value_spec=(True, False),
            input_names=["input_ids", "attention_mask", "labels"],
            auto_partition=True,
            virtual_pipeline_size=2,
        )
        pipeline.train()
        loss = pipeline.run_train(**make_batch(name))
        return loss, {path: it.grad for path, it in pipeline.local_named_parameters()}

    (_, first), (loss, last) = run_ranks(train, 2)

    model = make_model(name)
    losses = [model(**part).loss for part in halves(make_batch(name))]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(loss, sum(losses).detach() / 2, **EXACT)
    for path, parameter in model.named_parameters():
        torch.testing.assert_close((first | last)[path], parameter.grad, msg=path, **EXACT)


def test_model_on_the_meta_device_gets_the_weights_of_one_process(run_ranks):
    def state():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        with torch.device("meta"):
            model = make_model("llama tied")
        torch.manual_seed(3)
        return NxDPPModel(model, auto_partition=True, param_init_fn=model._init_weights).local_state_dict()

    first, last = run_ranks(state, 2)

    with torch.device("meta"):
        model = make_model("llama tied")
    torch.manual_seed(3)
    expected = NxDPPModel(model, param_init_fn=model._init_weights).local_state_dict()
    assert (first | last).keys() == expected.keys()
    for name, value in [*first.items(), *last.items()]:
        assert torch.equal(value, expected[name]), name
    assert expected["model.layers.0.mlp.up_proj.weight"].std() > 0


def refused(name, **config):
    model_class, config_class, sizes = MODELS["llama"] if name == "llama" else name
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**(sizes | config)))


T5 = (
    "T5ForConditionalGeneration",
    "T5Config",
    {"vocab_size": 64, "d_model": 16, "d_ff": 16, "num_layers": 2, "d_kv": 4},
)


@pytest.mark.parametrize(
    ("model", "config", "arguments", "message"),
    [
        ("llama", {"output_hidden_states": True}, {}, "config.output_hidden_states is set"),
        ("llama", {"num_hidden_layers": 1}, {}, "1 layers cannot fill 2 stages"),
        (
            "llama",
            {},
            {"pipeline_cuts": ["model.norm"], "auto_partition": False},
            "cuts must be after",
        ),
        (T5, {}, {}, "T5ForConditionalGeneration has an encoder and a decoder, whose layers are not one sequence"),
    ],
)
def test_model_that_cannot_be_cut_is_refused_with_the_reason(model, config, arguments, message):
    options = PartitionOptions(**{"auto_partition": True, **arguments})
    with pytest.raises(ValueError, match=message):
        partition_model(refused(model, **config), 2, options)

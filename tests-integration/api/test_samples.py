"""The documents' sample programs run as they stand there; filled in are models, data and sizes."""

import contextlib
import io
from types import SimpleNamespace

import neuronx_distributed
import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.parallel_layers import mappings
from nxd_layers import CoreAttention, RMSNorm
from nxd_trainer.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from torch.optim import AdamW

CONFIG = """
nxd_config = nxd.neuronx_distributed_config(
    tensor_parallel_size=8,
    optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
)
"""
MODEL_AND_OPTIMIZER = """
# wrap model
model = nxd.initialize_parallel_model(nxd_config, get_model)

# wrap optimizer
optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=1e-3)
"""
STEP = """
loss = model.run_train(inputs)
optimizer.step()
"""
CONFIG_OF_EVERYTHING = """
nxd_config = nxd.neuronx_distributed_config(
    tensor_parallel_size=args.tensor_parallel_size,
    pipeline_parallel_size=args.pipeline_parallel_size,
    pipeline_config={
        "transformer_layer_cls": LlamaDecoderLayer,
        "num_microbatches": args.num_microbatches,
        "output_loss_value_spec": (True, False),
        "input_names": ["input_ids", "attention_mask", "labels"],
        "pipeline_cuts": pipeline_cuts,
        "trace_file_path": args.trace_file_path,
        "param_init_fn": None,
        "leaf_module_cls": [LlamaRMSNorm.__name__],
        "autowrap_modules": [mappings],
        "use_zero1_optimizer": args.use_zero1_optimizer > 0,
        "use_optimizer_wrapper": True,
    },
    optimizer_config={
        "zero_one_enabled": args.use_zero1_optimizer > 0,
        "grad_clipping": True,
        "max_grad_norm": 1.0,
    },
    sequence_parallel=args.use_sequence_parallel,
    activation_checkpoint_config=CoreAttention if args.use_selective_checkpoint > 0 else "full",
    model_init_config=model_init_config,
)
"""
MODEL_WITH_CONFIG = """
model = nxd.initialize_parallel_model(nxd_config, get_model, config)
"""
OPTIMIZER_WITH_GROUPS = """
optimizer = nxd.initialize_parallel_optimizer(
    nxd_config, torch.optim.AdamW, param_groups, lr=args.lr, betas=(args.beta1, args.beta2), weight_decay=args.weight_decay
)
"""  # noqa: E501
STEP_OF_PIPELINE = """
loss = model.run_train(*inputs)
"""
STEP_WITHOUT_PIPELINE = """
loss = model(*inputs)
loss.backward()
"""
SHORTCUTS = """
model.local_module()
model.dtype  # get model's dtype
model.config  # get model's config
"""
GRAD_NORM = """
# It's a XLA tensor
optimizer.grad_norm
"""
LORA_CONFIG = """
lora_config = neuronx_distributed.modules.lora.LoraConfig(
   enable_lora=True,
   lora_rank=16,
   lora_alpha=32,
   lora_dropout=0.05,
   bias="none",
   target_modules=["q_proj", "v_proj", "k_proj"],
)
"""
LORA_MODEL = """
nxd_config = neuronx_distributed.neuronx_distributed_config(
  lora_config=lora_config,
)
model = neuronx_distributed.initialize_parallel_model(nxd_config, get_model)
"""
SIZES = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)


class LanguageModel(LlamaForCausalLM):
    """Takes token ids, `[batch, seq + 1]`, and returns the loss of predicting each from those before."""

    def forward(self, inputs):
        return super().forward(inputs[:, :-1], inputs[:, 1:])


class ModelOfSample(LlamaForCausalLM):
    """Takes the three inputs of the sample and returns the loss first, as its `output_loss_value_spec` says."""

    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids, labels), attention_mask


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(1))


def run_first_sample(tensor_parallel_size: int) -> list[float]:
    names = {"nxd": nxd, "AdamW": AdamW, "get_model": lambda: LanguageModel(SIZES), "inputs": tokens(9)}
    torch.manual_seed(0)
    exec(CONFIG.replace("tensor_parallel_size=8", f"tensor_parallel_size={tensor_parallel_size}"), names)
    exec(MODEL_AND_OPTIMIZER, names)
    losses = []
    for _ in range(3):
        exec(STEP, names)
        losses.append(float(names["loss"]))
    return losses


@pytest.mark.parametrize("world", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_first_sample_trains(run_ranks, world):
    by_rank = run_ranks(lambda: run_first_sample(world), world)

    assert by_rank.count(by_rank[0]) == world
    assert by_rank[0] == sorted(by_rank[0], reverse=True)
    assert by_rank[0][0] - by_rank[0][-1] > 0.01


def names_of_developer_guide(args: SimpleNamespace, cuts: list[str] | None, model_class: type) -> dict[str, object]:
    return {
        "nxd": nxd,
        "torch": torch,
        "args": args,
        "mappings": mappings,
        "LlamaDecoderLayer": LlamaDecoderLayer,
        "LlamaRMSNorm": RMSNorm,
        "CoreAttention": CoreAttention,
        "pipeline_cuts": cuts,
        "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
        "config": SIZES,
        "get_model": lambda config: model_class(config, sequence_parallel=args.use_sequence_parallel),
    }


def arguments(**changed) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "num_microbatches": 2,
            "trace_file_path": None,
            "use_zero1_optimizer": 1,
            "use_sequence_parallel": True,
            "use_selective_checkpoint": 0,
            "lr": 1e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
        }
        | changed
    )


def run_developer_guide(selective: int) -> tuple[list[float | None], float]:
    torch.manual_seed(0)
    args = arguments(use_selective_checkpoint=selective)
    names = names_of_developer_guide(args, ["model.layers.1"], ModelOfSample)
    exec(CONFIG_OF_EVERYTHING, names)
    exec(MODEL_WITH_CONFIG, names)
    model = names["model"]
    names["param_groups"] = [
        {"params": [p for _, p in model.named_parameters() if p.ndim > 1]},
        {"params": [p for _, p in model.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    exec(OPTIMIZER_WITH_GROUPS, names)
    ids = tokens(8)
    names["inputs"] = (ids, torch.ones_like(ids), ids.roll(-1, dims=1))
    losses = []
    for _ in range(3):
        exec(STEP_OF_PIPELINE, names)
        names["optimizer"].step()
        losses.append(None if names["loss"] is None else float(names["loss"]))
    exec(SHORTCUTS, names)
    exec(GRAD_NORM, names)
    nxd.parallel_state.destroy_model_parallel()
    return losses, float(names["optimizer"].grad_norm)


def test_developer_guide_trains_with_every_technique_at_once(run_ranks):
    by_rank = run_ranks(lambda: [run_developer_guide(selective) for selective in (0, 1)], 4)

    for full, selective in by_rank:
        assert full == selective
    assert [losses[0] is None for (losses, _), _ in by_rank] == [True, True, False, False]
    (losses, norm), _ = by_rank[-1]
    assert losses[0] - losses[-1] > 0.01
    assert norm > 0


def test_plain_forward_and_backward_of_the_developer_guide_is_run_train(run_ranks):
    def run():
        ids = tokens(8)
        torch.manual_seed(0)
        names = {"nxd": nxd, "config": SIZES, "get_model": LlamaForCausalLM, "inputs": (ids, ids.roll(-1, dims=1))}
        names["nxd_config"] = nxd.neuronx_distributed_config(tensor_parallel_size=2)
        exec(MODEL_WITH_CONFIG, names)
        exec(STEP_WITHOUT_PIPELINE, names)
        called = [parameter.grad.clone() for parameter in names["model"].parameters()]
        names["model"].zero_grad()
        exec(STEP_OF_PIPELINE, names)
        return all(torch.equal(a, p.grad) for a, p in zip(called, names["model"].parameters(), strict=True))

    assert run_ranks(run, 2) == [True, True]


def test_lora_sample_trains_only_the_adapters(run_ranks):
    def run():
        names = {"neuronx_distributed": neuronx_distributed, "get_model": lambda: LanguageModel(SIZES)}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(LORA_CONFIG, names)
            exec(LORA_MODEL, names)
        model = names["model"]
        model.run_train(tokens(9))
        return {name.rpartition(".")[2] for name, p in model.named_parameters() if p.grad is not None}

    assert run_ranks(run, 1) == [{"lora_A", "lora_B"}]


def test_shortcuts_of_a_model_of_transformers_are_its_own(run_ranks):
    transformers = pytest.importorskip("transformers", reason="needs a model of it: pip install transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, name_or_path="a/folder")

    def run():
        pipeline = {"auto_partition": True, "num_microbatches": 2}
        names = {"nxd": nxd, "config": config, "get_model": transformers.LlamaForCausalLM}
        names["nxd_config"] = nxd.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config=pipeline)
        exec(MODEL_WITH_CONFIG, names)
        exec(SHORTCUTS, names)
        model = names["model"]
        return model.name_or_path, model.dtype, model.config.hidden_size, model.run_eval(input_ids=tokens(8)) is None

    first, last = run_ranks(run, 2)

    assert first == ("a/folder", torch.float32, 32, True)
    assert last == ("a/folder", torch.float32, 32, False)

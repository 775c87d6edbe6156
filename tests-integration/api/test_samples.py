"""The API guides' sample programs run as they stand there; filled in are models, data and sizes."""

import contextlib
import io
from types import SimpleNamespace

import neuronx_distributed
import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed import parallel_state
from neuronx_distributed.modules.lora import LoraConfig
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.pipeline import NxDPPModel
from nxd_engine.models import LlamaDecoderLayer, LlamaForCausalLM
from sample_sizes import SIZES, tokens
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
ZERO1_OPTIMIZER = """
optimizer_grouped_parameters = [
     {
         "params": [
             p for n, p in param_optimizer if not any(nd in n for nd in no_decay)
         ],
         "weight_decay": 0.01,
     },
     {
         "params": [
             p for n, p in param_optimizer if any(nd in n for nd in no_decay)
         ],
         "weight_decay": 0.0,
     },
]

optimizer = NeuronZero1Optimizer(
     optimizer_grouped_parameters,
     AdamW,
     lr=flags.lr,
     pin_layout=False,
     sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
     grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
 )
"""
SAVED_ADAPTER = """
lora_config = LoraConfig(
   **filled_in,
   save_lora_base=False,
   merge_lora=False,
   save_lora_config_adapter=True,
)
"""
LOADED_ADAPTER = """
lora_config = LoraConfig(
   enable_lora=True,
   load_lora_from_ckpt=True,
   lora_save_dir=checkpoint_dir,  # checkpoint path
   lora_load_tag=tag,  # sub-directory under checkpoint path
)
nxd_config = nxd.neuronx_distributed_config(
   **filled_in,
   lora_config=lora_config,
)
model = nxd.initialize_parallel_model(nxd_config, get_model)
"""


class LanguageModel(LlamaForCausalLM):
    """Takes token ids, `[batch, seq + 1]`, and returns the loss of predicting each from those before."""

    def forward(self, inputs):
        return super().forward(inputs[:, :-1], inputs[:, 1:])


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


def run_zero1_sample(tensor_parallel_size: int, pipeline_parallel_size: int) -> tuple[list[float | None], int]:
    """Losses and number of parameters without decay."""
    parallel_state.initialize_model_parallel(tensor_parallel_size, pipeline_parallel_size)
    torch.manual_seed(0)
    model = LlamaForCausalLM(SIZES, sequence_parallel=True)
    names = {
        "AdamW": AdamW,
        "NeuronZero1Optimizer": NeuronZero1Optimizer,
        "parallel_state": parallel_state,
        "flags": SimpleNamespace(lr=1e-2),
        "no_decay": ["norm"],
    }
    pipeline = NxDPPModel(
        model,
        LlamaDecoderLayer,
        num_microbatches=2,
        auto_partition=True,
        input_names=["input_ids", "labels"],
        use_zero1_optimizer=True,
    )
    names["param_optimizer"] = list(pipeline.local_named_parameters())
    exec(ZERO1_OPTIMIZER, names)
    ids, losses = tokens(8), []
    for _ in range(3):
        losses.append(pipeline.run_train(input_ids=ids, labels=ids.roll(-1, dims=1)))
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    parallel_state.destroy_model_parallel()
    return [loss if loss is None else float(loss) for loss in losses], len(names["optimizer"].param_groups[1]["params"])


def test_zero1_sample_trains_in_a_pipeline_as_in_one_process(run_ranks):
    ((expected, _),) = run_ranks(run_zero1_sample, 1, 1, 1)
    by_rank = run_ranks(run_zero1_sample, 4, 2, 2)

    assert [losses[0] for losses, _ in by_rank[:2]] == [None, None]
    for losses, num_without_decay in by_rank[2:]:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert num_without_decay > 0
    assert expected[0] - expected[-1] > 0.01


def test_adapter_of_the_lora_samples_is_saved_and_loaded(run_ranks, tmp_path):
    layout = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "pipeline_config": {
            "transformer_layer_cls": LlamaDecoderLayer,
            "auto_partition": True,
            "num_microbatches": 2,
            "input_names": ["input_ids", "labels"],
        },
        "optimizer_config": {"zero_one_enabled": True},
        "activation_checkpoint_config": "full",
        "sequence_parallel": True,
    }

    def adapter(model):
        return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}

    def run():
        names = {"nxd": nxd, "LoraConfig": LoraConfig, "checkpoint_dir": str(tmp_path), "tag": "step_1"}
        names["get_model"] = lambda: LlamaForCausalLM(SIZES, sequence_parallel=True)
        names["filled_in"] = {"enable_lora": True, "lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}
        exec(SAVED_ADAPTER, names)
        nxd_config = nxd.neuronx_distributed_config(**layout, lora_config=names["lora_config"])
        model = nxd.initialize_parallel_model(nxd_config, names["get_model"])
        optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=1e-2)
        ids = tokens(8)
        model.run_train(input_ids=ids, labels=ids.roll(-1, dims=1))
        optimizer.step()
        nxd.save_checkpoint(str(tmp_path), "step_1", model=model)
        saved, names["filled_in"] = adapter(model), layout
        exec(LOADED_ADAPTER, names)
        loaded = adapter(names["model"])
        nonzero = any(bool(it.any()) for name, it in saved.items() if "lora_B" in name)
        return nonzero and saved.keys() == loaded.keys() and all(torch.equal(saved[n], loaded[n]) for n in saved)

    with contextlib.redirect_stdout(io.StringIO()):
        assert run_ranks(run, 4) == [True] * 4

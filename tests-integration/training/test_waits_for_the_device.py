"""A training step queues its work without waiting for a value of the device, so that the device never waits either."""

import neuronx_distributed as nxd
import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_testing import reads_of

SIZES = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
)
PIPELINE = {
    "num_microbatches": 2,
    "auto_partition": True,
    "input_names": ["input_ids", "labels"],
    "transformer_layer_cls": LlamaDecoderLayer,
    "return_loss_on_cpu": False,
}
LAYOUTS = {
    "1 rank": (1, {}),
    "TP 2 + SP": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "DP 2 + ZeRO-1": (2, {"optimizer_config": {"zero_one_enabled": True}}),
    "CP 2": (2, {"context_parallel_size": 2}),
    "PP 2": (2, {"pipeline_parallel_size": 2, "pipeline_config": PIPELINE}),
}
# Ids and labels are checked on the CPU only, in each microbatch by the stage that has them; so is whether to clip.
CHECKS = {"PP 2": 2, "DP 2 + ZeRO-1": 3}
PLANS = {"CP 2": ["tolist"]}  # who needs which keys, once for all layers


def reads_of_third_step(config):
    nxd_config = nxd.neuronx_distributed_config(**config)
    sequence_parallel = nxd_config["sequence_parallel"]
    model = nxd.initialize_parallel_model(
        nxd_config, lambda: LlamaForCausalLM(SIZES, sequence_parallel=sequence_parallel)
    )
    parameters = model.parameters()
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, parameters, lr=1e-3, fused=True)
    ids = torch.randint(64, (4, 16))

    def step():
        model.run_train(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()

    step()  # stages tell each other shapes
    step()
    return reads_of(step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_reads_no_value(run_ranks, layout):
    ranks, config = LAYOUTS[layout]

    for names in run_ranks(reads_of_third_step, ranks, config):
        assert [name for name in names if name != "__bool__"] == PLANS.get(layout, [])
        assert names.count("__bool__") == CHECKS.get(layout, 2)

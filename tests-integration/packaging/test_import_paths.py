"""The documented import paths lead to our objects."""

import importlib

import neuronx_distributed as nxd
import nxd_state
import pytest


@pytest.mark.parametrize(
    "path",
    [
        "parallel_state.initialize_model_parallel",
        "parallel_state.get_data_parallel_size",
        "parallel_state.get_tensor_model_parallel_group",
        "parallel_layers.ParallelEmbedding",
        "parallel_layers.ColumnParallelLinear",
        "parallel_layers.RowParallelLinear",
        "parallel_layers.clip_grad_norm",
        "parallel_layers.layers.RowParallelLinear",
        "parallel_layers.parallel_state.get_pipeline_model_parallel_rank",
        "parallel_layers.loss_functions.parallel_cross_entropy",
        "parallel_layers.mappings.gather_from_sequence_parallel_region",
        "parallel_layers.grads.clip_grad_norm",
        "parallel_layers.pad.pad_model",
        "parallel_layers.utils.divide",
        "parallel_layers.utils.set_tensor_model_parallel_attributes",
        "parallel_layers.utils.move_model_to_device",
        "parallel_layers.grads.bucket_allreduce_gradients",
        "parallel_layers.random.get_xla_rng_tracker",
        "parallel_layers.random.model_parallel_xla_manual_seed",
        "parallel_layers.layer_norm.LayerNorm",
        "parallel_layers.checkpointing.save",
        "parallel_layers.checkpointing.load",
        "parallel_layers.save",
        "parallel_layers.load",
        "modules.rms_norm.RMSNorm",
        "utils.adamw_fp32_optim_params.AdamW_FP32OptimParams",
        "utils.model_utils.move_model_to_device",
        "utils.model_utils.init_on_device",
        "utils.logger.get_logger",
        "utils.cpu_mode",
        "modules.qkv_linear.GQAQKVColumnParallelLinear",
        "modules.lora.LoraConfig",
        "modules.lora.LoRAModel",
        "optimizer.NeuronZero1Optimizer",
        "pipeline.NxDPPModel",
        "pipeline.model.NxDPPModel",
        "trace.parallel_model_trace",
        "trace.parallel_model_save",
        "trace.parallel_model_load",
        "trace.ModelBuilder",
        "trace.trace.parallel_model_trace",
    ],
)
def test_documented_path_is_served_by_an_nxd_package(path):
    found = nxd
    for name in path.split("."):
        found = getattr(found, name)

    assert found.__module__.startswith("nxd_")


@pytest.mark.parametrize(
    "module",
    [
        "parallel_layers.checkpointing",
        "parallel_layers.grads",
        "parallel_layers.layer_norm",
        "parallel_layers.layers",
        "parallel_layers.loss_functions",
        "parallel_layers.mappings",
        "parallel_layers.pad",
        "parallel_layers.parallel_state",
        "parallel_layers.random",
        "parallel_layers.utils",
        "modules.qkv_linear",
        "modules.lora",
        "optimizer",
        "pipeline",
        "lightning",
        "trainer",
        "utils.adamw_fp32_optim_params",
    ],
)
def test_module_can_be_imported_by_its_full_name(module):
    imported = importlib.import_module(f"neuronx_distributed.{module}")

    assert all(hasattr(imported, name) for name in getattr(imported, "__all__", []) if module != "lightning")


def test_every_getter_and_alias_of_the_mesh_is_served_under_its_own_name():
    getters = {name for name in nxd_state.__all__ if name.startswith("get_") and "parallel" in name}

    assert getters <= set(nxd.parallel_state.__all__)
    for name in getters:
        assert getattr(nxd.parallel_state, name) is getattr(nxd_state, name)


def test_unknown_attribute_names_what_there_is():
    with pytest.raises(AttributeError, match="no attribute 'trainr'; there are parallel_state, parallel_layers"):
        _ = nxd.trainr

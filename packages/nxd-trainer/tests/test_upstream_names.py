"""Names that scripts for NeuronX Distributed import from `parallel_layers` and `modules` resolve, and stay cheap."""

import importlib
import subprocess
import sys

import pytest

NAMES = {
    "parallel_layers": "set_defaults_if_not_set_tensor_model_parallel_attributes PARALLEL_MODULES PARALLEL_FUNCTIONS",
    "parallel_layers.checkpointing": (
        "NXD_SKIP_RENDEZVOUS ensure_directory_exists PreShardHookFn get_sharded_model_dict save load"
    ),
    "parallel_layers.comm": "all_gather all_reduce cpu_reduce_scatter gloo_reduce_scatter reduce_scatter",
    "parallel_layers.grads": (
        "param_is_not_shared get_grad_norm clip_grads_with_norm allreduce_context_parallel_gradients clip_grad_norm"
    ),
    "parallel_layers.layers": (
        "create_local_weight BaseParallelLayer LinearWithAsyncCommunication linear_with_async_allreduce "
        "BaseParallelLinear Conv2dWithInputGradAllReduce conv2d_with_weight_grad_allreduce "
        "CONV_KERNEL_OUTPUT_CHANNEL_DIMENSION CONV_KERNEL_INPUT_CHANNEL_DIMENSION BaseParallelConv "
        "OutputChannelParallelConv2d InputChannelParallelConv2d SPMDRank"
    ),
    "parallel_layers.loss_functions": "DistributedLogprob from_parallel_logits_to_logprobs",
    "parallel_layers.mappings": (
        "nonzero_partition_dim_swap reduce_from_context_model_parallel_region "
        "scatter_input_channels_to_tensor_model_parallel_region "
        "reduce_scatter_to_tensor_model_parallel_region_with_dim gather_from_tensor_model_parallel_region_with_dim "
        "scatter_to_process_group_spmd round_robin_scatter_to_process_group_spmd"
    ),
    "parallel_layers.pad": "generate_padding_mask",
    "parallel_layers.parallel_state": (
        "ParallelGroups PG_Group_Logic get_logic_chosen get_world_group get_tensor_model_parallel_replica_groups "
        "get_expert_model_parallel_group get_expert_model_parallel_replica_groups get_data_parallel_replica_groups "
        "get_expert_data_parallel_group get_expert_data_parallel_replica_groups set_tensor_model_parallel_size "
        "set_tensor_model_parallel_rank get_tensor_model_parallel_src_rank set_expert_model_parallel_size "
        "set_expert_model_parallel_rank get_expert_parallel_rank_from_global_rank "
        "get_experts_for_expert_parallel_rank get_data_parallel_src_rank get_expert_data_parallel_size "
        "get_expert_data_parallel_rank get_pipeline_model_parallel_replica_groups "
        "get_pipeline_model_parallel_sr_group get_context_model_parallel_group "
        "get_context_model_parallel_replica_groups get_context_model_parallel_rank get_context_model_parallel_size "
        "set_context_model_parallel_size get_context_model_parallel_src_tgt_pairs get_next_rank_group "
        "get_next_rank_replica_groups get_prev_rank_group get_prev_rank_replica_groups "
        "get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank initialize_token_shuffle_group "
        "get_token_shuffle_group get_token_shuffle_replica_groups get_token_shuffle_group_size "
        "destroy_token_shuffle_group is_tcp_store_available get_tcp_store initialize_pp_gloo_groups "
        "get_pp_gloo_group is_global_rank_zero create_pg_with_ranks initialize_kv_group get_kv_shared_group "
        "get_kv_shared_replica_groups get_kv_shared_group_size destroy_kv_group initialize_speculative_draft_group "
        "get_speculative_draft_group get_speculative_draft_replica_groups gather_python_object set_aot_mode "
        "get_aot_mode arrange_kv_groups rmsg rmsg_ep get_rank_info_str get_zero1_sharding_groups"
    ),
    "parallel_layers.random": "XLARNGStatesTracker",
    "parallel_layers.utils": (
        "EmbeddingUtility set_defaults_if_not_set_tensor_model_parallel_attributes ensure_divisibility "
        "get_padding_length split_tensor_along_second_dim is_torch_version_greater_than_2 requires_init_pg_override "
        "cast_tensor cast_all cast_if_autocast_enabled verify_casted_dtype indices_split_along_dim "
        "initialize_fallback_parallel_state"
    ),
    "modules.attention.utils": "ROPE_DEFAULTS apply_rotary_polar_compatible apply_scaling precompute_freqs_cis",
    "modules.qkv_linear": "GQAQKVLinearWithAsyncCommunication gqa_qkv_linear_with_async_allreduce",
    "modules.qkv_linear_utils": "check_requires_grad check_use_bias",
    "modules.rms_norm": "manual_rms_norm",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_of_a_module_resolve_and_are_public(module):
    found = importlib.import_module(f"neuronx_distributed.{module}")

    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]

    assert missing == []
    assert set(NAMES[module].split()) <= set(found.__all__)


@pytest.mark.usefixtures("fresh_interpreter")
def test_importing_the_modules_brings_in_no_optional_library():
    heavy = ("transformers", "lightning", "pytorch_lightning", "torch_xla")
    program = "import sys\n" + "".join(f"import neuronx_distributed.{module}\n" for module in NAMES)
    program += f"print([name for name in {heavy} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"

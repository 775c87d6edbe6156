"""Names of NeuronX Distributed whose work is done elsewhere, or nowhere: importing them works, calling them explains.

Scripts import many names and call few of them. So a name that only makes sense inside the old runtime is here an
object that can be imported and passed on, and that says at the call what it was and what to use. The table below is
the only place that lists these names; a module serves its own by `__getattr__ = explains(__name__)`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

_PACKAGE = "neuronx_distributed"


class _Area(NamedTuple):
    """Names that are not here for one reason.

    Attributes:
        reason: why, as what follows the name.
        instead: the replacement to use.
        names: by module, below `neuronx_distributed` or of the libraries that it needs, separated by spaces.
    """

    reason: str
    instead: str
    names: Mapping[str, str]


_AREAS = (
    _Area(
        "works on HLO programs of the old XLA runtime, which do not exist here",
        "neuronx_distributed.trace.parallel_model_trace or ModelBuilder, which compile, save and load models",
        {
            "trace.functions": "append_default_compiler_flags compile compile_layout_transformer compile_wlo trace",
            "trace.hlo_utils": (
                "AWS_NEURON_CUSTOM_NATIVE_KERNEL FRONTEND_ATTRIBUTES_DELIMITER NXD_LAYOUT_ON_CPU_AND_SERIALIZE "
                "NXD_LAYOUT_ON_DEVICE_AND_SERIALIZE NXD_LAYOUT_TRANSFORMATION_OPTIONS REQUIRE_TRANSPOSE_CUSTOM_CALL "
                "REQUIRE_TRANSPOSE_WEIGHT_IDX TRANSPOSABLE_WEIGHT_IDX add_weight_idx_attr_to_hlo "
                "append_layout_computation_to_hlo apply_layout_transformation cleanup_after_layout_transformation "
                "convert_inputs_to_optimal_shape extract_weight_layout_transform_hlo get_compiler_package_dir "
                "get_executable_full_qualified_path get_input_order get_layout_transform_map "
                "get_nki_kernel_weight_names get_wlt get_wlt_map is_nki_kernel_called mark_weights_for_wlo "
                "prepare_metaneff_for_wlt_hlo prepare_parameter_usage_map read_hlo read_metaneff "
                "traceback_instruction_to_parameter transform_weight_layout_on_cpu "
                "transform_weight_layout_on_device_and_save_to_disk update_computation_id_and_name update_weight "
                "write_hlo"
            ),
            "trace.mock_torchdist": "MockDistributed",
            "trace.model_builder": (
                "GRAPH_HLO_FILE JITWrapper LOG_FILE_DEFAULT_NAME MONITOR_MODULES_LIST ModelContainer NEFF_FILE "
                "WRAPPED_NEFF_FILE XLA_HLO_DEBUG XLA_IR_DEBUG append_default_compiler_flags compile "
                "compile_layout_transformer compile_wlo get_hash_module init_process_wrapper trace"
            ),
            "trace.model_builder_utils": (
                "CompilationArtifacts LayoutTransformerArtifacts ModelBuilderConstants ModelParamInfo ProvidedArgInfo "
                "TraceArtifacts WLOArtifacts generate_key"
            ),
            "trace.nxd_model.base_nxd_model": "StateInitializer",
            "trace.nxd_model.nxd_model": "JITWrapper TorchScriptNxDModel convert_nxd_model_to_torchscript_model",
            "trace.nxd_model.utils": (
                "TORCH_DTYPES generate_route_key_from_provided_args get_dtype_enum get_dtype_from_enum "
                "retrieve_artifact_from_model ts_convert_dict_to_ordered_list_type_list_tensor "
                "ts_convert_dict_to_ordered_list_type_tensor"
            ),
            "trace.spmd": "SPMDBucketModelScript StateInitializer default_bucket_kernel",
            "trace.trace": (
                "collect_tp_bucket_neuron_models collect_tp_neuron_models create_local_weight create_local_weight_qkv "
                "create_local_weight_with_expert_parallel find_unique_dtypes generate_ranked_folder "
                "get_sharded_checkpoint preprocess_checkpoint shard_children"
            ),
        },
    ),
    _Area(
        "launches an NKI kernel, which only the Neuron compiler can build",
        "the torch functions of neuronx_distributed.kernels and nxd_layers, which compilers fuse",
        {
            "kernels.flash_attn": "NKIAttnFunc get_flash_attn_kernels",
            "kernels.kernel_utils": "get_seed move_seed torch_to_nki_dtype",
            "operators.topk": "get_topk_implementation",
            "neuronxcc.nki.kernels.attention": "attention_isa_kernel",
        },
    ),
    _Area(
        "compares logits with the tolerances of the old runtime",
        "torch.testing.assert_close, or nxd parity --hf for a transformers model",
        {"torch_neuronx.testing.validation": "logit_validation"},
    ),
    _Area(
        "arranges weights in microscaling formats that only NKI kernels read",
        "quantization.convert with int8 or fp8 weights",
        {"quantization.microscaling.transform_weights": "reshape_pad_proj"},
    ),
    _Area(
        "handles ZeRO-1 states in a folder separate from the model",
        "save_checkpoint and load_checkpoint with optimizer=, which work at any layout, or nxd ckpt convert",
        {"optimizer.zero_dcp_utils": "get_dcp_aux_infos load_optim_state_dict save_optim_state_dict"},
    ),
    _Area(
        "prepares or checks inputs of the mixture-of-experts kernels",
        "nxd_layers.experts, or MoE and ExpertMLPs of neuronx_distributed.modules.moe, which do not need it",
        {
            "modules.moe.blockwise": (
                "torch_to_nki_dtype initialize_nki_components initialize_training_kernels dynamic_slice_3D "
                "dynamic_slice_2D dynamic_slice_1D BlockwiseMatmulArgs get_data TorchBlockwiseTraining KernelConfig "
                "KernelAvailabilityError check_kernel_availability check_blockwise_mm_kernel_compatibility "
                "can_use_blockwise_matmul_nki augment_inputs_for_padded_blockwise_matmul BlockwiseMatmulNKIFunc "
                "BlockwiseMatmulMXNKIFunc"
            ),
            "modules.moe.expert_mlps_v2": "create_spmd_ranks duplicate_and_replace_prefixes can_use_find_index_kernel",
            "modules.moe.model_utils": "create_spmd_ranks get_kernel_activation_func_id",
            "modules.moe.moe_config_validator": "MoeConfigValidator",
            "modules.moe.moe_fused_tkg": "ROUTER_ACT_FN_MAPPING MoEFusedTKG",
            "modules.moe.moe_fused_tkg_mx": "ROUTER_ACT_FN_MAPPING mxfp4_moe_block_tkg_wrapper MoEFusedTKGMX",
            "modules.moe.moe_parallel_layers": "ExpertFusedLinearWithAsyncCommunication",
            "modules.moe.nki_import": "NKIImport import_nki import_nki_beta2",
            "modules.moe.shared_experts": "ColumnParallelLinearTransposed RowParallelLinearTransposed",
        },
    ),
    _Area(
        "uses different layouts of experts for prompts and for single tokens",
        "expert_model_parallel_size= of initialize_model_parallel, which uses one layout for both",
        {
            "modules.moe.moe_process_group": (
                "init_tensor_expert_parallel_moe_process_groups get_moe_tp_ep_group get_moe_ep_group "
                "destroy_moe_model_parallel"
            ),
        },
    ),
    _Area(
        "holds the experts of a layer in int8 or fp8, which is not supported here",
        "quantization.convert, which quantizes linear layers but not experts",
        {"quantization.quantization_layers": "QuantizedExpertFusedColumnParallel QuantizedExpertFusedRowParallel"},
    ),
    _Area(
        "is the autograd function of the kernel",
        "nki_ring_attn_func, which calls nxd_layers.context.context_parallel_attention",
        {"kernels.ring_attention_kernel": "NkiRingAttnFunc"},
    ),
    _Area(
        "is a step of the old pipeline's partitioning, which is a single call here",
        "NxDPPModel, or nxd_pipeline.manual_partition",
        {
            "pipeline.partition": (
                "adding_live_obj_for_previous_stages analyze_pipeline_module analyze_shared_weights_across_stages "
                "partition_traced_model"
            ),
        },
    ),
)


class NotHere:
    """Stands for a name that is not implemented here.

    Attributes:
        name: with its module.
        reason: why it is not, in words.
        instead: the replacement to use.
    """

    def __init__(self, name: str, reason: str, instead: str) -> None:
        self.name = name
        self.reason = reason
        self.instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Explain.

        Raises:
            NotImplementedError: always, in one line: what the name was, why it is not here, what to use.
        """
        raise NotImplementedError(f"{self.name} {self.reason}; use {self.instead}")

    def __getattr__(self, name: str) -> "NotHere":
        """A member, such as `apply` of an autograd function: not here either."""
        if name.startswith("__"):
            raise AttributeError(name)
        return NotHere(f"{self.name}.{name}", self.reason, self.instead)

    def __repr__(self) -> str:
        return f"<{self.name}: not here>"


def explains(module: str) -> Callable[[str], NotHere]:
    """The `__getattr__` of a module, which finds the module's names of the table.

    Args:
        module: its `__name__`.
    """
    short = module.removeprefix(f"{_PACKAGE}.")
    found = {
        name: NotHere(f"{module}.{name}", area.reason, area.instead)
        for area in _AREAS
        for name in area.names.get(short, "").split()
    }

    def getattr_of_module(name: str) -> NotHere:
        if name in found:
            return found[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module

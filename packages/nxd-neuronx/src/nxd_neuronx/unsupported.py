"""Names of NeuronX Distributed that can be imported here but not called: the call explains what to use instead.

Scripts import many names and call few. A name that only makes sense inside the old runtime is therefore an object that
can be imported and passed around; calling it raises an error that says what the name was and what replaces it. The
table below is the only list of these names; a module serves its own by `__getattr__ = explains(__name__)`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

_PACKAGE = "neuronx_distributed"


class _Area(NamedTuple):
    """Names that are unsupported for one reason.

    Attributes:
        reason: why the name is unsupported, worded to follow the name.
        instead: the replacement.
        names: names separated by spaces, by module: below `neuronx_distributed`, or of the libraries it needs.
    """

    reason: str
    instead: str
    names: Mapping[str, str]


_AREAS = (
    _Area(
        "works on HLO programs of the old XLA runtime, which do not exist here",
        "neuronx_distributed.trace.parallel_model_trace or ModelBuilder, which compile, save and load models",
        {
            "trace.functions": "compile compile_layout_transformer compile_wlo trace",
            "trace.hlo_utils": (
                "NXD_LAYOUT_ON_CPU_AND_SERIALIZE NXD_LAYOUT_ON_DEVICE_AND_SERIALIZE "
                "NXD_LAYOUT_TRANSFORMATION_OPTIONS add_weight_idx_attr_to_hlo "
                "append_layout_computation_to_hlo apply_layout_transformation "
                "cleanup_after_layout_transformation convert_inputs_to_optimal_shape "
                "extract_weight_layout_transform_hlo get_layout_transform_map get_nki_kernel_weight_names "
                "mark_weights_for_wlo prepare_metaneff_for_wlt_hlo read_hlo read_metaneff "
                "transform_weight_layout_on_cpu transform_weight_layout_on_device_and_save_to_disk write_hlo"
            ),
            "trace.model_builder": (
                "GRAPH_HLO_FILE LOG_FILE_DEFAULT_NAME NEFF_FILE WRAPPED_NEFF_FILE compile "
                "compile_layout_transformer compile_wlo trace"
            ),
            "trace.model_builder_utils": (
                "CompilationArtifacts LayoutTransformerArtifacts ModelBuilderConstants ModelParamInfo "
                "ProvidedArgInfo TraceArtifacts WLOArtifacts generate_key"
            ),
            "trace.nxd_model.base_nxd_model": "StateInitializer",
            "trace.spmd": "SPMDBucketModelScript StateInitializer default_bucket_kernel",
            "trace.trace": "create_local_weight get_sharded_checkpoint preprocess_checkpoint shard_children",
        },
    ),
    _Area(
        "launches an NKI kernel, which only the Neuron compiler can build",
        "the torch functions of neuronx_distributed.kernels and nxd_layers, which compilers fuse",
        {
            "kernels.kernel_utils": "get_seed move_seed",
            "operators.topk": "get_topk_implementation",
            "neuronxcc.nki.kernels.attention": "attention_isa_kernel",
        },
    ),
    _Area(
        "compares logits with the tolerances of the old runtime",
        "torch.testing.assert_close, or nxd parity --hf for a transformers model",
        {
            "torch_neuronx.testing.validation": "logit_validation",
        },
    ),
    _Area(
        "handles ZeRO-1 states in a folder separate from the model",
        "save_checkpoint and load_checkpoint with optimizer=, which work at any layout, or nxd ckpt convert",
        {
            "optimizer.zero_dcp_utils": "get_dcp_aux_infos load_optim_state_dict save_optim_state_dict",
        },
    ),
    _Area(
        "prepares or checks inputs of the mixture-of-experts kernels",
        "nxd_layers.experts, or MoE and ExpertMLPs of neuronx_distributed.modules.moe, which do not need it",
        {
            "modules.moe.blockwise": (
                "BlockwiseMatmulArgs can_use_blockwise_matmul_nki augment_inputs_for_padded_blockwise_matmul "
                "BlockwiseMatmulNKIFunc"
            ),
            "modules.moe.expert_mlps_v2": "create_spmd_ranks can_use_find_index_kernel",
            "modules.moe.model_utils": "create_spmd_ranks get_kernel_activation_func_id",
            "modules.moe.moe_config_validator": "MoeConfigValidator",
            "modules.moe.moe_fused_tkg": "ROUTER_ACT_FN_MAPPING MoEFusedTKG",
            "modules.moe.moe_fused_tkg_mx": "ROUTER_ACT_FN_MAPPING MoEFusedTKGMX",
            "modules.moe.moe_parallel_layers": "ExpertFusedLinearWithAsyncCommunication",
            "modules.moe.nki_import": "NKIImport import_nki import_nki_beta2",
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
        {
            "quantization.quantization_layers": "QuantizedExpertFusedColumnParallel QuantizedExpertFusedRowParallel",
        },
    ),
    _Area(
        "is a step of the old pipeline's partitioning, which is a single call here",
        "NxDPPModel, or nxd_pipeline.manual_partition",
        {
            "pipeline.partition": "analyze_pipeline_module analyze_shared_weights_across_stages partition_traced_model",
        },
    ),
    _Area(
        "is a part of the old library's own machinery, which no script was found to import",
        "NxDPPModel, whose schedules are lists of actions in nxd_pipeline.schedules",
        {
            "pipeline.scheduler": (
                "BackwardPostprocessTask BackwardPreprocessTask BackwardStepTask ForwardPostprocessTask "
                "ForwardPreprocessTask ForwardStepTask InferenceSchedule ReduceGradsTask Train1F1BSchedule "
                "TrainSchedule"
            ),
            "utils.serialization": "SerializationManager TensorMeta",
            "pipeline.partition": "PipelineIO",
            "trainer": "PostPartitionHooks hooks",
            "trainer.post_partition_hooks": "PostPartitionHooks",
        },
    ),
    _Area(
        "wraps one layer in an adapter",
        "get_lora_model, which adapts the layers that a LoraConfig selects",
        {
            "modules.lora.layer": "LoraConv2d LoraEmbedding LoraLinear",
            "modules.lora.tp_layer": "LoraGQAQKVParallelLinear LoraParallelLinear",
        },
    ),
    _Area(
        "is a helper of the old library, which no script was found to import",
        "the functions of torch",
        {
            "utils.safetensors_utils": "check_for_duplicate_tensors",
            "utils.tensor_utils": "cumsum",
            "quantization.observer": "PerChannelAbsMaxObserver",
        },
    ),
)


class Unsupported:
    """Placeholder for a name that is not implemented here.

    Attributes:
        name: full name, with the module.
        reason: why it is not implemented.
        instead: the replacement.
    """

    def __init__(self, name: str, reason: str, instead: str) -> None:
        self.name = name
        self.reason = reason
        self.instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a NotImplementedError that says why the name is not supported and what to use."""
        raise NotImplementedError(f"{self.name} {self.reason}; use {self.instead}")

    def __getattr__(self, name: str) -> "Unsupported":
        """Return a placeholder for a member, such as `apply` of an autograd function."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Unsupported(f"{self.name}.{name}", self.reason, self.instead)

    def __repr__(self) -> str:
        return f"<{self.name}: unsupported>"


def explains(module: str) -> Callable[[str], Unsupported]:
    """Return the `__getattr__` of the module with this `__name__`, which finds its names in the table."""
    short = module.removeprefix(f"{_PACKAGE}.")
    found = {
        name: Unsupported(f"{module}.{name}", area.reason, area.instead)
        for area in _AREAS
        for name in area.names.get(short, "").split()
    }

    def getattr_of_module(name: str) -> Unsupported:
        if name in found:
            return found[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module

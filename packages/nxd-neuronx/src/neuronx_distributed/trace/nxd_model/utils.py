"""`neuronx_distributed.trace.nxd_model.utils`: what the old model kept of its programs."""

from nxd_neuronx.not_here import not_here

(
    TORCH_DTYPES,
    generate_route_key_from_provided_args,
    get_dtype_enum,
    get_dtype_from_enum,
    retrieve_artifact_from_model,
    ts_convert_dict_to_ordered_list_type_list_tensor,
    ts_convert_dict_to_ordered_list_type_tensor,
) = not_here(
    __name__,
    "hlo",
    "TORCH_DTYPES",
    "generate_route_key_from_provided_args",
    "get_dtype_enum",
    "get_dtype_from_enum",
    "retrieve_artifact_from_model",
    "ts_convert_dict_to_ordered_list_type_list_tensor",
    "ts_convert_dict_to_ordered_list_type_tensor",
)

__all__ = [
    "TORCH_DTYPES",
    "generate_route_key_from_provided_args",
    "get_dtype_enum",
    "get_dtype_from_enum",
    "retrieve_artifact_from_model",
    "ts_convert_dict_to_ordered_list_type_list_tensor",
    "ts_convert_dict_to_ordered_list_type_tensor",
]

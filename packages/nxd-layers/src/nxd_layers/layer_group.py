"""The tensor-parallel group that a layer computes on, checked against the one that its weights were split for."""

from nxd_state import Group, active_group


def layer_group(built_for: int) -> Group:
    """The current tensor-parallel group.

    Args:
        built_for: size of the group when the layer was built.

    Raises:
        RuntimeError: the group has another size by now, so that the layer's parts of the weights do not fit it.
    """
    group = active_group("tp")
    if group.size != built_for:
        raise RuntimeError(
            f"this layer was built for tensor_model_parallel_size={built_for}, but it is {group.size} now; "
            "call initialize_model_parallel() before building the model"
        )
    return group

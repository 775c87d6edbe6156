"""The group that a layer computes on: one that it was given, or the tensor-parallel one that it was built for."""

from nxd_state import Group, active_group


def layer_group(built_for: int, given: Group | None = None) -> Group:
    """The current tensor-parallel group, unless the layer was given another.

    Args:
        built_for: size of the group when the layer was built.
        given: the group that the layer was given, if it was.

    Raises:
        RuntimeError: the group has another size by now, so that the layer's parts of the weights do not fit it.
    """
    if given is not None:
        return given
    group = active_group("tp")
    if group.size != built_for:
        raise RuntimeError(
            f"this layer was built for tensor_model_parallel_size={built_for}, but it is {group.size} now; "
            "call initialize_model_parallel() before building the model"
        )
    return group

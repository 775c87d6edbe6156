"""How the existing library's tensor-parallel ranks shared out a model, told by what is known of ours.

With as many ranks as now, each had what the shard metadata of now says. With others, a parallel layer's tensors were
split evenly along the dimension in which their shape differs; fused and repeated heads cannot be told then.
"""

from collections.abc import Mapping, Sequence

from nxd_ckpt import CheckpointError, ShardedTensor
from nxd_ckpt.interop.neuronx import Piece, Pieces, Sharding, Split
from nxd_pipeline import NxDPPModel
from nxd_state import ShardSpec, active_group, all_gather_object, get_shard_spec
from torch import nn

from nxd_trainer.checkpoint import logical_name, model_state, named_parameters

Specs = Mapping[str, ShardSpec]
Shape = tuple[int, ...]


def gather_specs(model: nn.Module) -> list[Specs]:
    """The shard metadata by parameter on each tensor-parallel rank. Called by all of them."""
    specs = {name: spec for name, p in named_parameters(model) if (spec := get_shard_spec(p)) is not None}
    return all_gather_object(specs, active_group("tp"))


def sharding_of_model(
    model: nn.Module, specs_of_ranks: Sequence[Specs], saved_shapes: Mapping[str, Shape], saved_tp_size: int
) -> dict[str, Sharding]:
    """For each tensor of the model that was sharded, how it lay on the ranks that saved it.

    Args:
        model: what is to be filled.
        specs_of_ranks: from `gather_specs`.
        saved_shapes: of the tensors that the first tensor-parallel rank saved.
        saved_tp_size: how many tensor-parallel ranks there were.

    Raises:
        CheckpointError: there were other ranks than now, and it cannot be told for a tensor.
    """
    if saved_tp_size == len(specs_of_ranks):
        return {name: _pieces(name, [specs[name] for specs in specs_of_ranks]) for name in specs_of_ranks[0]}
    owners = _owners(model)
    for name, spec in specs_of_ranks[0].items():
        if any(piece.name for piece in spec.pieces):
            raise CheckpointError(
                f"{name} is fused of several tensors, and how {saved_tp_size} ranks shared them is not known here; "
                f"load it with tensor_parallel_size={saved_tp_size}, and save it anew: that loads anywhere"
            )
    rules: dict[str, Sharding] = {}
    for name, tensor in model_state(model).items():
        shape = tuple(tensor.global_shape if isinstance(tensor, ShardedTensor) else tensor.shape)
        if name in saved_shapes and saved_shapes[name] != shape:
            rules[name] = _split(name, owners.get(name), shape, saved_shapes[name], saved_tp_size)
    return rules


def _pieces(name: str, specs: Sequence[ShardSpec]) -> Pieces:
    pieces = [piece for spec in specs for piece in spec.pieces]
    return Pieces(
        specs[0].local_shape,
        {logical_name(name, piece.name): piece.logical_shape for piece in pieces},
        [
            [
                Piece(logical_name(name, piece.name), piece.local.offset, piece.local.shape, piece.logical.offset)
                for piece in spec.pieces
            ]
            for spec in specs
        ],
    )


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """The parallel layer that a tensor belongs to, by the tensor's name."""
    modules = model.local_named_modules() if isinstance(model, NxDPPModel) else model.named_modules()
    return {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in modules
        if hasattr(module, "tensor_parallel_size")
        for name, _ in module.named_parameters(recurse=False)
    }


def _split(name: str, owner: nn.Module | None, shape: Shape, saved: Shape, saved_tp_size: int) -> Split:
    dims = [dim for dim, sizes in enumerate(zip(shape, saved, strict=False)) if sizes[0] != sizes[1]]
    stride = int(getattr(owner, "stride", 1))
    if owner is None or len(shape) != len(saved) or len(dims) != 1 or saved[dims[0]] * saved_tp_size < shape[dims[0]]:
        raise CheckpointError(
            f"{name} is {list(shape)} here and {list(saved)} on each of {saved_tp_size} ranks, which is no even split "
            "of a parallel layer; load it into the layers that were saved"
        )
    is_padded = saved[dims[0]] * saved_tp_size != shape[dims[0]]
    return Split(dims[0], stride=stride, global_size=shape[dims[0]] if is_padded else None)

"""The place of a DTensor's local values in the whole tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from nxd_parity.events import Placement


def local_part(value: Tensor) -> tuple[Tensor, Placement | None]:
    """Return a rank's values of a tensor, without communication, and their place; None if the tensor is not a DTensor.

    Parts that lie in several boxes, as those of some combined placements, have no placement: it is inferred.
    """
    if not isinstance(value, DTensor):
        return value.detach(), None
    local = value.to_local().detach()
    # Parts of a sum lie where the sum does.
    added = [Replicate() if it.is_partial() else it for it in value.placements]
    summed = DTensor.from_local(
        local, value.device_mesh, added, run_check=False, shape=value.shape, stride=value.stride()
    )
    chunks = summed.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        return local, None
    return local, Placement(tuple(value.shape), tuple(chunks[0].offsets), _ranks_to_add(value))


def _ranks_to_add(value: DTensor) -> tuple[int, ...]:
    """Return the ranks whose parts add up: those along the mesh dims where the tensor is partial."""
    mesh = value.device_mesh
    place = mesh.get_coordinate()
    if place is None or not any(it.is_partial() for it in value.placements):
        return ()
    index = tuple(slice(None) if it.is_partial() else at for it, at in zip(value.placements, place, strict=True))
    return tuple(mesh.mesh[index].flatten().tolist())

"""Random numbers under model parallelism: one stream shared by all tensor-parallel ranks, one of each rank's own.

The default generator is the shared stream: dropout on activations that every tensor-parallel rank holds must drop
the same elements everywhere. Inside `rng_stream("tp")` each tensor-parallel rank draws from a stream of its own, for
activations that are split over the ranks. Replicas and stages always differ from each other.
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", describes both regions.)
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nxd_state.collectives import all_gather_object
from nxd_state.device import device_rng_state, seed_device, set_device_rng_state
from nxd_state.mesh import Mesh
from nxd_state.parallel_state import get_group, get_mesh, get_world_group, model_parallel_is_initialized

SHARED_STREAM = "default"


@dataclass
class _Streams:
    """This rank's streams beside the shared one, by name and device type, and the mesh whose ranks they are for."""

    mesh: Mesh | None = None
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)


_streams = _Streams()


def seed_model_parallel(seed: int) -> None:
    """Seed both streams of this rank from `seed`, its stage, its replica and, for "tp", its tensor-parallel rank.

    Call it after the weights are initialized: those must come from one seed on all ranks. The streams belong to the
    current mesh; call it again for another one.
    """
    coordinates = [0, 0, 0, 0]
    if model_parallel_is_initialized():
        coordinates = [get_group(axis).rank for axis in ("pp", "dp", "cp", "tp")]
    pp, dp, cp, tp = coordinates
    _seed_generators(_mix(seed, "tp", pp, dp, cp, tp))
    _current_streams()["tp"] = _generator_states()
    _seed_generators(_mix(seed, "shared", pp, dp, cp))


@contextmanager
def rng_stream(name: str) -> Iterator[None]:
    """Draw from another stream inside the `with` block, from where it left off.

    Raises:
        RuntimeError: `seed_model_parallel` has not been called since the mesh was made.
        ValueError: unknown stream.
    """
    streams = _current_streams()
    if not streams:
        raise RuntimeError(
            "random streams are not seeded; call seed_model_parallel(seed) after every initialize_model_parallel()"
        )
    if name not in streams:
        raise ValueError(f"unknown random stream {name!r}; use one of {', '.join(sorted(streams))}")
    shared = _generator_states()
    _set_generator_states(streams[name])
    try:
        yield
    finally:
        streams[name] = _generator_states()
        _set_generator_states(shared)


@contextmanager
def one_random_state() -> Iterator[None]:
    """Context in which all ranks draw the same numbers, so that models start equal. Called by all ranks.

    Ranks with equal states keep them. Otherwise all draw from rank 0's state, and each rank's own is restored
    afterwards; if the ranks of a replica, which need one stream, had different ones, they get a common one.
    """
    world = get_world_group() if model_parallel_is_initialized() else None
    if world is None or world.size == 1:
        yield
        return
    before = _generator_states()
    digests = all_gather_object(_digest(before), world)
    if len(set(digests)) == 1:
        yield
        return
    states = all_gather_object(before if world.rank == 0 else None, world)
    _set_generator_states(states[0])
    try:
        yield
    finally:
        mesh = get_mesh()
        replica = mesh.coordinates(world.ranks[world.rank])["dp"]
        mine = [it for rank, it in zip(world.ranks, digests, strict=True) if mesh.coordinates(rank)["dp"] == replica]
        _set_generator_states(before)
        if len(set(mine)) > 1 and not _current_streams():  # those of seed_model_parallel differ as they should
            _seed_generators(_mix(0, "replica", mine[0]))


@contextmanager
def rng_of_own_rank() -> Iterator[None]:
    """Draw numbers of this tensor-parallel rank's own inside the `with` block, from a seed of the shared stream.

    All tensor-parallel ranks must enter it. Unlike `rng_stream`, it needs no seeding, and draws the same numbers again
    when torch's random state is restored, as torch's own activation checkpointing does.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    shared = _generator_states()
    _seed_generators(_mix(seed, "own", get_group("tp").rank))
    try:
        yield
    finally:
        _set_generator_states(shared)


def get_rng_state() -> dict[str, dict[str, Tensor]]:
    """State of every stream of this rank as `{stream: {device type: uint8 tensor}}`, to save with a checkpoint."""
    return {SHARED_STREAM: _generator_states(), **{name: dict(states) for name, states in _current_streams().items()}}


def set_rng_state(state: dict[str, dict[str, Tensor]]) -> None:
    """Resume the streams from the state that `get_rng_state` returned.

    Raises:
        ValueError: the state has no shared stream.
    """
    if SHARED_STREAM not in state:
        raise ValueError(f"random state has streams {sorted(state)}; expected {SHARED_STREAM!r} among them")
    streams = _current_streams()
    streams.clear()
    streams.update({name: dict(states) for name, states in state.items() if name != SHARED_STREAM})
    _set_generator_states(state[SHARED_STREAM])


def _current_streams() -> dict[str, dict[str, Tensor]]:
    """The streams; none if they belong to another mesh than the current one."""
    mesh = get_mesh() if model_parallel_is_initialized() else None
    if _streams.mesh is not mesh:
        _streams.mesh, _streams.states = mesh, {}
    return _streams.states


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    seed_device(seed)


def _generator_states() -> dict[str, Tensor]:
    return {"cpu": torch.get_rng_state()} | device_rng_state()


def _set_generator_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    set_device_rng_state(states)


def _digest(states: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(bytes(state.tolist()) for _, state in sorted(states.items()))).hexdigest()


def _mix(seed: int, *coordinates: object) -> int:
    """A 63-bit seed; hashed, since neighbouring seeds give correlated streams in some generators."""
    text = repr((seed, *coordinates)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1

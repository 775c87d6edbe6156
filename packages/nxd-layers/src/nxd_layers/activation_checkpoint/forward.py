"""The replacements for the `forward` of checkpointed and tiled modules.

It uses torch's non-reentrant `torch.utils.checkpoint`, which keeps autocast and torch's own random state, and adds
this repository's random streams and the choice of operations whose outputs are kept. A recomputation stops where
backward needs no more, which depends on the graph only: all ranks stop at the same place.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from nxd_state import device_type, get_rng_state, has_streams, is_cpu, is_lazy_device, set_rng_state
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nxd_layers.mappings import reductions_out_of_place

Keep = Callable[[OpOverload], bool]
Context = AbstractContextManager[Any]

_MATMULS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def matmul_outputs(operation: OpOverload) -> bool:
    """Whether an operation is a product with a weight or an attention kernel, the most expensive ones to recompute.

    Batched products are excluded: attention without a kernel computes its `[seq, seq]` scores with them.
    """
    return operation in _MATMULS


class CheckpointedForward:
    """A module's `forward` that keeps its inputs, and runs again when backward asks for an activation.

    Args:
        module: its forward is replaced; this keeps the one that it had.
        keep: which operations' outputs are kept all the same.
        offload: inputs are kept in the host's memory.
    """

    def __init__(self, module: nn.Module, keep: Keep | None, *, offload: bool = False) -> None:
        self.module = module
        self.forward = module.forward
        self.keep = keep
        self.offload = offload
        self._contexts_compiled = _contexts_compiled(module, keep)

    def __getstate__(self) -> dict[str, Any]:
        return {name: it for name, it in vars(self).items() if name != "_contexts_compiled"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._contexts_compiled = _contexts_compiled(self.module, self.keep)  # of a copy, with its own module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.offload and (torch.compiler.is_compiling() or is_lazy_device()):
            raise NotImplementedError("a compiled graph cannot offload inputs to host memory; use offload=False")
        forward = partial(self.forward, **kwargs)  # bound here, since `checkpoint` has keywords of its own
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts_compiled)
        if any(isinstance(arg, Tensor) and is_lazy_device(arg) for arg in args):
            forward, args = partial(forward, *args), ()  # torch would look for a module torch.xla, which does not exist
        with _inputs_on_host() if self.offload else nullcontext():
            return checkpoint(
                forward, *args, use_reentrant=False, context_fn=partial(_contexts, self.module, self.keep)
            )


def _inputs_on_host() -> Context:
    """Keep the inputs that torch's checkpoint saves on the host, in pinned memory if copies can overlap computation."""
    if is_cpu():
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=has_streams(), device_type=device_type())


def _contexts(module: nn.Module, keep: Keep | None) -> tuple[Context, Context]:
    """The contexts of the forward and of its recomputation."""
    if keep is None:
        return nullcontext(), _Recomputation(module, nullcontext)
    forward, recomputation = _selection(keep)
    return _selective(forward), _Recomputation(module, partial(_selective, recomputation))


def _contexts_compiled(module: nn.Module, keep: Keep | None) -> Callable[[], tuple[Context, Context]]:
    """`_contexts` for a forward that is compiled, as a function, which is all that the compiler takes.

    The compiler replays random numbers and buffers itself, and takes no contexts but a selection. Where its graph
    breaks, it leaves the call of `checkpoint` to Python.
    """

    def contexts() -> tuple[Context, Context]:
        if TracingContext.try_get() is None:
            return _contexts(module, keep)
        return _selection(_nothing if keep is None else keep)

    return contexts


def _nothing(operation: OpOverload) -> bool:
    return False


def _selection(keep: Keep) -> tuple[Context, Context]:
    """Contexts that keep the outputs of some operations, and bring them back."""

    def policy(context: object, operation: OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keep(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextmanager
def _selective(selection: Context) -> Iterator[None]:
    # A product that is kept must not turn into the sum over the ranks.
    with selection, reductions_out_of_place():
        yield


class _Recomputation(AbstractContextManager[None]):
    """Random streams, autocast and buffers as they were when this was made, until the end; it can be entered again.

    Args:
        module: module with the buffers.
        inner: makes the context inside.
    """

    def __init__(self, module: nn.Module, inner: Callable[[], Context]) -> None:
        self._random_state = get_rng_state()
        self._buffers = BufferState(module)
        kind = device_type()
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._inner = inner
        self._leave = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.callback(set_rng_state, get_rng_state())
            set_rng_state(self._random_state)
            stack.enter_context(self._buffers.restored())
            kind, dtype, enabled = self._autocast  # torch itself does not restore that of XLA
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(self._inner())
            self._leave = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.__exit__(kind, error, trace)


_LARGEST_COPY = 2**18  # elements; a larger buffer, such as a mask or a quantized weight, is taken to stay as it is


class BufferState:
    """The current buffers of a module and its submodules, for the forward that is computed again.

    A forward may change buffers: running statistics, counters, codebooks. The recomputation must begin with the buffers
    that the first forward began with, and leave those that it left. Buffers are exchanged, not written to: backward may
    have saved their tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        copies: dict[int, Tensor] = {}  # a buffer that modules share is copied once
        self._buffers = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
        self._versions: list[tuple[nn.Module, str, Tensor, int]] = []
        for part, buffers in self._buffers:
            for name, buffer in buffers.items():
                if buffer is None:
                    continue
                if buffer.numel() <= _LARGEST_COPY and not buffer.requires_grad:
                    buffers[name] = copies.setdefault(id(buffer), buffer.clone())
                else:
                    self._versions.append((part, name, buffer, buffer._version))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, modules have copies of these buffers; afterwards those that they had before."""
        for part, name, buffer, version in self._versions:
            if part._buffers.get(name) is not buffer or buffer._version != version:
                raise RuntimeError(
                    f"buffer {name!r} of a {type(part).__name__}, {tuple(buffer.shape)}, has changed since the forward "
                    "that activation checkpointing recomputes; exclude the module from checkpointing (buffers of "
                    f"up to {_LARGEST_COPY} elements may change)"
                )
        copies: dict[int, Tensor] = {}
        unchanged = {id(buffer) for _, _, buffer, _ in self._versions}
        changed = [(part, dict(part._buffers)) for part, _ in self._buffers]
        for part, buffers in self._buffers:
            part._buffers.update(
                {
                    name: it if it is None or id(it) in unchanged else copies.setdefault(id(it), it.clone())
                    for name, it in buffers.items()
                }
            )
        try:
            yield
        finally:
            for part, buffers in changed:
                part._buffers.clear()
                part._buffers.update(buffers)


class TiledForward:
    """The `forward` of a module that treats each position separately, such as an MLP, tile by tile.

    Inside such a module activations are wider than its input. Tiles are recomputed for backward, so these activations
    exist for one tile only: their memory does not grow with the sequence (Bekman et al. 2025, "Arctic Long Sequence
    Training").
    """

    def __init__(self, module: nn.Module, num_tiles: int, sequence_dim: int) -> None:
        self._forward = CheckpointedForward(module, None)
        self._num_tiles = num_tiles
        self._dim = sequence_dim

    def __call__(self, hidden: Tensor) -> Tensor:
        """The module's output."""
        tiles = hidden.tensor_split(max(1, min(self._num_tiles, hidden.shape[self._dim])), self._dim)
        return torch.cat([self._forward(tile) for tile in tiles], self._dim)

"""`ShardedLinear`: the base of layers whose weight is split over the tensor-parallel ranks along one dim.

It owns what these layers share: the group, the shard metadata, padding, initialization, the master weight, quantized
weights, and the list of a layer's features. What a layer computes is in its own class: `linear`, `embedding`, `conv`
and `qkv_linear`.
"""

import math
from collections.abc import Collection, Sequence

import torch
from nxd_state import Group, ShardSpec, active_group, shard_along
from nxd_state.parameter_marks import MatrixLayout, mark_matrix_layout
from torch import Tensor, nn

from nxd_layers.initialization import InitMethod, default_bias_init, empty_sharded_parameter, fill_from_logical
from nxd_layers.mappings import GivenGroup, process_group_as
from nxd_layers.padding import length_for_heads, repartition, zero_padding_gradient


class ShardedLinear(nn.Module):
    """Base of the layers whose weight is split over ranks.

    Args:
        logical_shape: shape of the whole weight, without padding.
        partition_dim: the dim of the weight that is split; 0: outputs, 1: inputs.
        init_method: fills the whole weight in place.
        num_matrices: number of matrices fused along the split dim; each is split separately, so a rank holds chunks
            `[rank::tp]`.
        pad_multiple: pad the split dim until each rank's part of each matrix is a multiple of this; None: no padding.
        keep_master_weight: keep the whole initial values as `master_weight` and `master_bias`.
        tensor_model_parallel_group: the ranks to split over; None: the tensor-parallel ranks.
        rank_ordering: the part that each rank holds; None: rank r holds part r.

    Attributes:
        weight: this rank's part.
        bias: split like the outputs, or whole where the inputs are split; None without bias.
        scale: float32 scales of a quantized weight, `[1]` or `[out, 1]` split like the outputs; otherwise None.
        master_weight: the whole initial weight on the CPU with `keep_master_weight`, in no state dict; otherwise None.
        master_bias: the whole initial bias, likewise.
        padded_length: length of the split dim including padding.

    Raises:
        ValueError: the number of ranks (times `num_matrices`) does not divide the split dim, or `rank_ordering` is not
            a permutation of the ranks.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    scale: nn.Parameter | None
    master_weight: Tensor | None = None
    master_bias: Tensor | None = None

    def __init__(
        self,
        logical_shape: tuple[int, ...],
        *,
        partition_dim: int,
        init_method: InitMethod,
        num_matrices: int = 1,
        pad_multiple: int | None = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if num_matrices < 1 or (pad_multiple is not None and pad_multiple < 1):
            raise ValueError(f"stride={num_matrices}, padding to multiples of {pad_multiple}: both must be 1 or more")
        self.register_parameter("scale", None)
        self._has_own_forward = not _forward_owner(type(self)).__module__.startswith("nxd_layers.")
        group = process_group_as(tensor_model_parallel_group)
        self.given_group = None if tensor_model_parallel_group is None else group
        self.tensor_parallel_size = group.size
        self.rank_ordering = _checked_rank_ordering(rank_ordering, group.size)
        self.init_method, self.keep_master_weight = init_method, keep_master_weight
        self.logical_shape, self.partition_dim, self.num_matrices = logical_shape, partition_dim, num_matrices
        length = logical_shape[partition_dim]
        multiple = 1 if pad_multiple is None else group.size * num_matrices * pad_multiple
        self.padded_length = round_up(length, multiple)

    def _add_parameters(self, dtype: torch.dtype, device: torch.device | str | None, *, bias: bool) -> None:
        """Create weight and bias, and initialize them. Subclasses call it when they have set their attributes."""
        self._specs = self._specs_of(self.group().rank)
        self.weight = self.new_parameter(self.weight_spec, dtype, device, split_dim=self.partition_dim)
        if self.num_matrices > 1 and self.partition_dim == 0:
            each = self.logical_shape[0] // self.num_matrices
            mark_matrix_layout(self.weight, MatrixLayout(sections=(each,) * self.num_matrices))
        self.bias = self.new_parameter(self.bias_spec, dtype, device, split_dim=self.output_split_dim) if bias else None
        self.reset_parameters()

    def new_parameter(
        self,
        spec: ShardSpec,
        dtype: torch.dtype,
        device: torch.device | str | None,
        *,
        split_dim: int | None,
        requires_grad: bool = True,
    ) -> nn.Parameter:
        """Return an uninitialized parameter of this layer with its shard metadata.

        Args:
            spec: how this rank's part maps to the whole tensor.
            dtype: dtype of the parameter.
            device: device of the parameter; None: torch's default device.
            split_dim: the dim that the ranks split; None: every rank holds the whole tensor.
            requires_grad: whether the parameter is trained.
        """
        return empty_sharded_parameter(
            spec,
            partition_dim=split_dim or 0,
            num_partitions=1 if split_dim is None else self.tensor_parallel_size,
            stride=self.num_matrices,
            dtype=dtype,
            device=device,
            requires_grad=requires_grad,
        )

    @property
    def output_split_dim(self) -> int | None:
        """The dim of a tensor `[out, ...]`, such as the bias, that ranks split; None if every rank holds it whole."""
        return 0 if self.partition_dim == 0 else None

    # Where the parts lie.

    def group(self) -> Group:
        """Return the ranks that the weight is split over.

        Raises:
            RuntimeError: the mesh has changed since the layer was built.
        """
        return layer_group(self.tensor_parallel_size, self.given_group)

    def part_of(self, rank: int) -> int:
        """Return the index of the part that a rank of the group holds."""
        return rank if self.rank_ordering is None else self.rank_ordering[rank]

    def _spec_along(self, shape: tuple[int, ...], dim: int, rank: int) -> ShardSpec:
        """Return the shard metadata of a tensor of the layer that is split along `dim`, on a rank of the group."""
        return shard_along(
            shape,
            dim,
            rank=self.part_of(rank),
            size=self.tensor_parallel_size,
            stride=self.num_matrices,
            padded_length=self.padded_length,
            axis="tp" if self.given_group is None else self.given_group.axis,
        )

    def _specs_of(self, rank: int) -> list[ShardSpec]:
        """Return the shard metadata of the parameters, weight and bias, on a rank of the group."""
        outputs = self.logical_shape[:1]
        return [
            self._spec_along(self.logical_shape, self.partition_dim, rank),
            ShardSpec.whole(outputs) if self.output_split_dim is None else self._spec_along(outputs, 0, rank),
        ]

    def _held(self) -> list[nn.Parameter | None]:
        """Return the parameters in the order of `_specs_of`."""
        return [self.weight, self.bias]

    @property
    def weight_spec(self) -> ShardSpec:
        """How this rank's part of the weight maps to the whole weight."""
        return self._specs[0]

    @property
    def bias_spec(self) -> ShardSpec:
        """How this rank's part of the bias maps to the whole bias."""
        return self._specs[1]

    # Values.

    def reset_parameters(self) -> None:
        """Initialize weight and bias again, with the same values at every tensor-parallel degree.

        Values of a quantized weight become zero: they come from a state dict or from a float layer.
        """
        if self.scale is not None:
            _fill_quantized(self.weight, self.scale, self.bias)
            return
        whole = fill_from_logical(self.weight, self.weight_spec, self.logical_shape, self._init_whole_weight)
        self.master_weight = self._kept(whole, self.weight.dtype)
        if self.bias is not None:
            init_bias = default_bias_init(math.prod(self.logical_shape[1:]))
            whole = fill_from_logical(self.bias, self.bias_spec, self.logical_shape[:1], init_bias)
            self.master_bias = self._kept(whole, self.weight.dtype)

    def _init_whole_weight(self, weight: Tensor) -> None:
        self.init_method(weight)

    def _kept(self, whole: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return initial values in the parameters' dtype if the layer keeps master weights."""
        return whole.to(dtype) if self.keep_master_weight and whole is not None else None

    def init_weight_cpu(self) -> None:
        """Call `reset_parameters`, under the name that `param_init_fn` of NeuronX Distributed scripts uses."""
        self.reset_parameters()

    def weight_and_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the parameters as the product reads them: padding gets no gradient.

        Args:
            dtype: dtype of the input; a quantized weight is converted to it, and `scaled` must follow the product.
        """
        if self.scale is not None:
            return self.weight.to(dtype), self.bias
        weight = zero_padding_gradient(self.weight, self.weight_spec) if self._is_padded else self.weight
        return weight, self.read_bias()

    def read_bias(self) -> Tensor | None:
        """Return the bias as the layer adds it: padding gets no gradient."""
        if self.bias is None or self.output_split_dim is None or not self._is_padded:
            return self.bias
        return zero_padding_gradient(self.bias, self.bias_spec)

    @property
    def _is_padded(self) -> bool:
        return self.padded_length != self.logical_shape[self.partition_dim]

    def scaled(self, output: Tensor) -> Tensor:
        """Return `output` `[..., out]` times the scales of a quantized weight.

        Each scale belongs to one output, so scaling outputs is scaling weights, without rounding the weights.
        """
        return output if self.scale is None else (output * self.scale.t()).to(output.dtype)

    # Padding of attention heads, for `pad_model`.

    def _length_for_heads(self, num_heads: int, padded_num_heads: int) -> int:
        if self.scale is not None:
            raise ValueError(f"{self} has a quantized weight, which cannot be padded; call pad_model before convert")
        length = self.logical_shape[self.partition_dim]
        num_parts = self.group().size * self.num_matrices
        return length_for_heads(length, num_heads, padded_num_heads, num_parts=num_parts)

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Raise what `pad_heads` would raise, without changing the layer."""
        self._length_for_heads(num_heads, padded_num_heads)

    def pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Pad the split dim to its length in a model with `padded_num_heads`. `pad_model` calls this.

        Raises:
            ValueError: that length is not a whole number, or the number of ranks does not divide it.
        """
        padded = self._length_for_heads(num_heads, padded_num_heads)
        if padded != self.padded_length:
            old = self._specs_of_ranks()
            self.padded_length = padded
            self._repartition(old)

    def _specs_of_ranks(self) -> list[list[ShardSpec]]:
        return [self._specs_of(rank) for rank in range(self.group().size)]

    def _repartition(self, old: list[list[ShardSpec]]) -> None:
        """Move the parts of the parameters between the ranks, from where `_specs_of_ranks` said they are."""
        group = self.group()
        self._specs = self._specs_of(group.rank)
        for index, (parameter, spec) in enumerate(zip(self._held(), self._specs, strict=True)):
            if parameter is not None and parameter.shape != spec.local_shape:
                repartition(parameter, [specs[index] for specs in old], spec, group)

    # What the layer does beyond `nn.Linear`.

    def features(self) -> dict[str, str]:
        """Return what this layer does beyond the plain, whole layer: by the feature's name, its text for errors.

        Code that works beside a layer's forward (adapters, losses, conversions) supports some of these names, and
        refuses a layer that has others: see `check_features`.
        """
        adapter = getattr(self, "lora", None)
        found = {
            "stride": (self.num_matrices > 1, f"stride={self.num_matrices}"),
            "padding": (self._is_padded, "padding"),
            "rank_ordering": (self.rank_ordering is not None, f"rank_ordering={self.rank_ordering}"),
            "tensor_model_parallel_group": (self.given_group is not None, "a tensor_model_parallel_group"),
            "quantized": (self.scale is not None, "a quantized weight"),
            "adapter": (adapter is not None and not adapter.is_merged, "a LoRA adapter that is not merged"),
            "forward": (self._has_own_forward, "a forward of its own"),
        }
        return {name: text for name, (is_set, text) in found.items() if is_set}

    def _set_flags(self, *names: str) -> dict[str, str]:
        """Return those of the layer's arguments that are neither False nor None, in the form of `features`."""
        values = {name: getattr(self, name) for name in names}
        return {name: f"{name}={value}" for name, value in values.items() if value is not None and value is not False}

    def check_features(self, supported: Collection[str], *, by: str, remedy: str) -> None:
        """Raise a ValueError if the layer has features that the caller does not support.

        Args:
            supported: names of `features` that the caller supports.
            by: what does not support the others, for the message.
            remedy: what to do, for the message.
        """
        unsupported = [text for name, text in self.features().items() if name not in supported]
        if unsupported:
            raise ValueError(f"{self} has {', '.join(unsupported)}, which {by} does not support; {remedy}")


def layer_group(built_for: int, given: Group | None = None) -> Group:
    """Return the current tensor-parallel group, or the group that the layer was given."""
    if given is not None:
        return given
    group = active_group("tp")
    if group.size != built_for:
        raise RuntimeError(
            f"this layer was built for tensor_model_parallel_size={built_for}, but it is {group.size} now; "
            "call initialize_model_parallel() before building the model"
        )
    return group


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `length`."""
    return -(-length // multiple) * multiple


def _checked_rank_ordering(rank_ordering: Sequence[int] | None, size: int) -> tuple[int, ...] | None:
    if rank_ordering is None:
        return None
    if not isinstance(rank_ordering, Sequence):
        raise ValueError(f"rank_ordering={rank_ordering!r} is not a sequence of ranks; pass one, such as [1, 0]")
    if sorted(rank_ordering) != list(range(size)):
        raise ValueError(f"rank_ordering={list(rank_ordering)} must name each of the ranks 0..{size - 1} once")
    return tuple(rank_ordering)


def _forward_owner(layer_class: type[nn.Module]) -> type:
    """Return the class that the layer has its forward from."""
    return next(it for it in layer_class.__mro__ if "forward" in vars(it))


@torch.no_grad()
def _fill_quantized(weight: nn.Parameter, scale: nn.Parameter, bias: nn.Parameter | None) -> None:
    if weight.is_meta:
        return
    weight.zero_()
    scale.fill_(1.0)
    if bias is not None:
        bias.zero_()

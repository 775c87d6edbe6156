"""Splits fused weights of a Llama of NeuronX Distributed into those that a Hugging Face Llama has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from nxd_ckpt.boxes import Box
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard

_FUSED = ".mlp.gate_up_proj.weight"
_HALVES = (".mlp.gate_proj.weight", ".mlp.up_proj.weight")
_FUSED_HEADS = ".qkv_proj."


class _Half(NamedTuple):
    """The box of a fused tensor that is one tensor of its own."""

    fused: str
    box: Box


def is_gate_up(name: str) -> bool:
    """Whether a tensor's name is that of a gate and an up projection in one weight."""
    return name.endswith(_FUSED)


def split_gate_up(source: TensorSource) -> TensorSource:
    """Return a source that has `gate_proj` and `up_proj`, the halves of each `gate_up_proj`; other tensors stay.

    Args:
        source: whole tensors, such as those of `open_neuronx(folder, sharding=LLAMA)`.

    Raises:
        ValueError: queries, keys and values are fused too, or a fused weight has no two halves.
    """
    for name, info in source.tensors.items():
        if _FUSED_HEADS in name:
            raise ValueError(
                f"{name} holds queries, keys and values together; only the model's config says which rows are whose. "
                "Convert it with CheckpointConverterBase of neuronx_distributed.scripts.checkpoint_converter: "
                "--convert_to_full_state with the model's --config, and --qkv_linear, --fuse_qkv and the others as it "
                "was trained"
            )
        if is_gate_up(name) and (len(info.global_shape) != 2 or info.global_shape[0] % 2):
            raise ValueError(
                f"{name} {list(info.global_shape)} is not a gate and an up projection of the same size, one above the "
                "other; leave it out with --exclude, or convert to another format"
            )
    return _Halves(source)


@dataclass(frozen=True)
class _Halves:
    source: TensorSource

    @property
    def objects(self) -> Any:
        return self.source.objects

    @property
    def is_mapped(self) -> bool:
        return self.source.is_mapped

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        whole = self.source.tensors
        kept = {name: info for name, info in whole.items() if not is_gate_up(name)}
        return kept | {name: TensorInfo(whole[it.fused].dtype, it.box.shape) for name, it in self._halves.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        half = self._halves.get(name)
        if half is None:
            return self.source.shards(name, box)
        begin, *_ = half.box.offsets
        wanted = Box((begin + box.offsets[0], *box.offsets[1:]), box.shape)
        parts = []
        for shard in self.source.shards(half.fused, wanted):
            common = shard.box.intersect(half.box)
            if common is not None:
                part = shard.tensor[common.relative_to(shard.box).slices]
                parts.append(Shard(part, common.relative_to(half.box).offsets))
        return parts

    @cached_property
    def _halves(self) -> Mapping[str, _Half]:
        halves = {}
        for name, info in self.source.tensors.items():
            if is_gate_up(name):
                rows, *rest = info.global_shape
                for index, ending in enumerate(_HALVES):
                    box = Box((index * rows // 2, *[0] * len(rest)), (rows // 2, *rest))
                    halves[name.removesuffix(_FUSED) + ending] = _Half(name, box)
        return halves

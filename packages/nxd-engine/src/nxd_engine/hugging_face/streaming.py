"""`stream_weights`: the weights of a model of any layout, whole and one by one, for whoever uses them during training.

The tensors are those that `save_pretrained` writes. Rank 0 requests them in buckets, see `gathering.py`.
"""

import fnmatch
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from nxd_ckpt import ShardedTensor, TensorInfo
from nxd_ckpt.boxes import Box
from nxd_ckpt.interop import TensorSource
from nxd_ckpt.interop.huggingface.writing import parse_size
from nxd_ckpt.interop.source import converted, fill
from nxd_ckpt.sharded_tensor import as_sharded_state
from nxd_layers.quantization import quantize_fp8_blocks
from nxd_lora import LoraModel, adapter_names, peft_form
from nxd_state import Group, all_gather_object, get_world_group, is_peft_model, model_parallel_is_initialized
from torch import Tensor, nn

from nxd_engine.checkpoints.state import model_state, saved_here
from nxd_engine.hugging_face.conversion import reference_model
from nxd_engine.hugging_face.folder import PathLike
from nxd_engine.hugging_face.gathering import GatheredTensors, gathered, leading, serve
from nxd_engine.hugging_face.loading import check_dtype, stored_shapes
from nxd_engine.hugging_face.rearrangement import RearrangedSource
from nxd_engine.hugging_face.saving import as_stored, config_content
from nxd_engine.nxd_model import NxDModel
from nxd_engine.rank_sync import check_same_call, run_or_raise_peer_error
from nxd_engine.unwrap import adapters_of, plain_model

Receivers = Literal["rank_0", "every_rank"]
Adapters = Literal["merged", "alone"]
Quantization = Literal["fp8_blocks"]

_Finish = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]


def stream_weights(
    model: nn.Module,
    *,
    to: Receivers = "rank_0",
    names: str | Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    adapters: Adapters = "merged",
    quantize: Quantization | None = None,
    bucket_size: int | str = "512MiB",
    like: PathLike | None = None,
    config: Any = None,
) -> Generator[tuple[str, Tensor]]:
    """Yield the weights of a model of any layout under their Hugging Face names. Called by all ranks.

    Names, values and order are those of the folder that `save_pretrained` writes from the same arguments. Every rank
    must iterate to the end; where nothing is delivered, the loop has no turns, and takes as long as rank 0's:

        for name, tensor in nxd_engine.stream_weights(model):
            rollout_engine.update(name, tensor)  # on rank 0 only

    The tensors are new ones in host memory, and belong to the caller. Values are read as the loop goes on, so the model
    must not be trained meanwhile. A rank that leaves the loop early, by `break` or by an error, ends it with a
    `PeerError` on all others. (If you keep the iterator in a variable, close it: `contextlib.closing`.)

    Memory, besides what the caller keeps: rank 0 holds a bucket and the largest tensor, quantized ones twice for a
    moment; with `to="every_rank"`, so does each rank. While adapters are merged, the weights that they change are kept
    twice on their rank.

    Args:
        model: the model, see `load_pretrained`; perhaps with adapters, or a `LoraModel`.
        to: "rank_0" or "every_rank".
        names: a shell pattern such as "model.layers.0.*", or a collection of names; None for all tensors. Only rank 0's
            counts.
        dtype: dtype of floating-point tensors; unchanged if None. Only rank 0's counts.
        adapters: "merged" for the whole model with its LoRA adapters, if it has any, in its weights; "alone" for the
            adapters only, with the names and shapes of `nxd_lora.save_peft_adapter`.
        quantize: "fp8_blocks" for the weights of the base model's linear layers, and of experts that files hold one by
            one, in float8_e4m3fn, each followed by its scales, float32, one per block of 128 x 128, under the name
            `..._scale_inv`, as the files of DeepSeek-V3 have them; quantized after conversion to `dtype`. The other
            tensors, such as embeddings, norms, routers and heads, are as without. Only rank 0's counts.
        bucket_size: bytes of the tensors, or parts of a larger tensor, that rank 0 requests at a time. Only rank 0's
            counts.
        like: as for `save_pretrained`; needed on rank 0 only.
        config: as for `save_pretrained`; needed on rank 0 only.

    Yields:
        Pairs of a name and a whole tensor.

    Raises:
        ValueError: invalid arguments, a name that the model does not have, a pattern that matches nothing, there is no
            config, "alone" without adapters, with merged ones or quantized, or `quantize` for a model that transformers
            does not know; on the rank where it is found.
        PeerError: another rank failed or left the loop; the message has its error.
    """
    doing = "streaming the weights"
    group, lora, limit = _same_call(model, to, adapters, quantize, dtype, bucket_size)
    with _merged(lora if adapters == "merged" else None, group):
        state = _state_of_ranks(model, lora, adapters, group)
        if group.rank != 0:
            yield from serve(state, group, doing)
            return
        with leading(state, group, doing) as everything:
            plan = _planned(everything, model, names, adapters, quantize, like, config)
            yield from _delivered(everything, plan, to=to, dtype=dtype, limit=limit)


def streamed_infos(
    model: nn.Module,
    *,
    names: str | Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    adapters: Adapters = "merged",
    quantize: Quantization | None = None,
    like: PathLike | None = None,
    config: Any = None,
) -> dict[str, TensorInfo]:
    """Return dtypes and shapes of what `stream_weights` yields, by name, in its order. Called by all ranks.

    No values are sent. Arguments and errors are those of `stream_weights`; the result is the same on all ranks.
    """
    group, lora, _ = _same_call(model, "rank_0", adapters, quantize, dtype, 1)
    infos: dict[str, TensorInfo] = {}
    with gathered(_state_of_ranks(model, lora, adapters, group), group, "listing the weights") as everything:
        if everything is not None:
            plan = _planned(everything, model, names, adapters, quantize, like, config)
            for name, info in plan.infos.items():
                whole = torch.empty(info.global_shape, dtype=converted(info.dtype, dtype), device="meta")
                infos |= {it: TensorInfo(made.dtype, tuple(made.shape)) for it, made in plan.finish(name, whole)}
    of_rank_0: dict[str, TensorInfo] = all_gather_object(infos, group)[0]
    return of_rank_0


def _same_call(
    model: nn.Module,
    to: Receivers,
    adapters: Adapters,
    quantize: Quantization | None,
    dtype: torch.dtype | None,
    bucket_size: int | str,
) -> tuple[Group, LoraModel | None, int]:
    """Check the arguments on all ranks; return the ranks, the model's adapters, and the bytes of a bucket."""
    group = get_world_group() if model_parallel_is_initialized() else Group.solo("world")
    lora = adapters_of(model)

    def checked() -> dict[str, object]:
        parts = model.stages if isinstance(model, NxDModel) else [model]
        if any(is_peft_model(module) for part in parts for module in part.modules()):
            raise ValueError(
                "the model has PEFT's adapters, which are not merged here; call its merge_and_unload() first, or use "
                "adapters of lora_config"
            )
        check_arguments(to, adapters, quantize, lora)
        check_dtype(dtype)
        return {"call": "stream_weights", "to": to, "adapters": adapters, "bytes": parse_size(bucket_size)}

    call = run_or_raise_peer_error("stream_weights", checked, group=group)
    limit = call.pop("bytes")
    assert isinstance(limit, int)
    check_same_call(all_gather_object(call, group))
    return group, lora, limit


@dataclass(frozen=True)
class _Plan:
    """What rank 0 delivers.

    Attributes:
        stored: the model's tensors, under their names in files or, for adapters, in the model.
        infos: those of them that are delivered.
        finish: makes the pairs that are delivered from a whole one of them.
    """

    stored: TensorSource
    infos: Mapping[str, TensorInfo]
    finish: _Finish


def _planned(
    everything: GatheredTensors,
    model: nn.Module,
    names: str | Collection[str] | None,
    adapters: Adapters,
    quantize: Quantization | None,
    like: PathLike | None,
    config: Any,
) -> _Plan:
    """Choose the tensors, on rank 0."""
    lora = adapters_of(model)
    in_files = peft_form(lora) if lora is not None and adapters == "alone" else None
    if in_files is not None:
        stored: TensorSource = everything
        chosen, quantized = {in_files(name)[0]: name for name in stored.tensors}, set()
    else:
        base = model.module if isinstance(model, LoraModel) else model
        content = config_content(config, like, base)
        stored = as_stored(everything, content, None if like is None else stored_shapes(like))
        chosen = {name: name for name in stored.tensors}
        quantized = set() if quantize is None else quantizable(stored, content)

    def finish(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if in_files is not None:
            in_file, reshape = in_files(name)
            yield in_file, reshape(tensor).contiguous()
        elif name in quantized:
            values, scales = quantize_fp8_blocks(tensor)
            yield from ((name, values), (f"{name}_scale_inv", scales))
        else:
            yield name, tensor

    return _Plan(stored, {chosen[name]: stored.tensors[chosen[name]] for name in select(chosen, names)}, finish)


def quantizable(stored: TensorSource, config: Mapping[str, Any]) -> set[str]:
    """Return the names of the matrices that linear layers and single experts multiply by.

    Raises:
        ValueError: transformers does not know the model, so its layers are not known.
    """
    reference = reference_model(config)
    if reference is None or not isinstance(stored, RearrangedSource):
        raise ValueError(
            f"quantize= needs a model that transformers knows, and it does not know {config.get('architectures')}; "
            "quantize what you receive"
        )
    linear = reference.linear_weights
    return {
        name
        for name, made in stored.rearranged.items()
        if len(made.shape) == 2 and stored.tensors[name].dtype.is_floating_point
        if linear.issuperset(part.source for part in made.parts)
    }


def check_arguments(to: str, adapters: str, quantize: str | None, lora: LoraModel | None) -> None:
    """Raise ValueError for arguments that cannot be followed."""
    if to not in get_args(Receivers):
        raise ValueError(f"to={to!r} is not a receiver; use one of {', '.join(get_args(Receivers))}")
    if adapters not in get_args(Adapters):
        raise ValueError(f"adapters={adapters!r} is unknown; use one of {', '.join(get_args(Adapters))}")
    if quantize is not None and quantize not in get_args(Quantization):
        raise ValueError(f"quantize={quantize!r} is unknown; use {', '.join(get_args(Quantization))} or None")
    if adapters == "alone" and quantize is not None:
        raise ValueError('adapters="alone" cannot be quantized; leave quantize= out, or use adapters="merged"')
    if adapters == "alone" and lora is None:
        raise ValueError('adapters="alone", but the model has no adapters; leave it out')
    if adapters == "alone" and lora is not None and lora.is_merged:
        raise ValueError('adapters="alone", but they are merged into the weights; unmerge() first')


def select(known: Collection[str], names: str | Collection[str] | None) -> list[str]:
    """Return the names that are asked for, in the order of `known`.

    Raises:
        ValueError: a name is not known, or the pattern matches none.
    """
    if names is None:
        return list(known)
    if isinstance(names, str):
        found = [name for name in known if fnmatch.fnmatchcase(name, names)]
        if not found:
            raise ValueError(f"names={names!r} matches none of the {len(known)} tensors, such as {next(iter(known))!r}")
        return found
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"names has {unknown[:5]}, which the model lacks; it has {sorted(known)[:5]} and others")
    return [name for name in known if name in set(names)]


def _delivered(
    everything: GatheredTensors, plan: _Plan, *, to: Receivers, dtype: torch.dtype | None, limit: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on rank 0, and share them with the others if they get them, too."""
    stored, unfinished = plan.stored, dict[str, Tensor]()
    for bucket in buckets(plan.infos, dtype, limit):
        if isinstance(stored, RearrangedSource):
            everything.fetch([source for piece in bucket for source in stored.sources_of(*piece)])
        else:
            everything.fetch(bucket)
        made = (pair for whole in _assembled(stored, bucket, dtype, unfinished) for pair in plan.finish(*whole))
        if to == "rank_0":
            yield from made
            continue
        together = dict(made)
        everything.share(together)
        while together:
            name = next(iter(together))
            yield name, together.pop(name)


def buckets(infos: Mapping[str, TensorInfo], dtype: torch.dtype | None, limit: int) -> Iterator[list[tuple[str, Box]]]:
    """Divide tensors into lists of boxes of at most `limit` bytes, before and after conversion to `dtype`.

    A tensor is cut only if it is larger than that. Each list has at least one box, of at least one element.
    """
    bucket: list[tuple[str, Box]] = []
    used = 0
    for name, info in infos.items():
        itemsize = max(info.dtype.itemsize, converted(info.dtype, dtype).itemsize)
        for box in _cut(Box.whole(info.global_shape), max(1, limit // itemsize)):
            size = box.num_elements * itemsize
            if bucket and used + size > limit:
                yield bucket
                bucket, used = [], 0
            bucket.append((name, box))
            used += size
    if bucket:
        yield bucket


def _cut(box: Box, num_elements: int) -> Iterator[Box]:
    """Cut a box into boxes of at most this many elements, of whole rows where possible."""
    if box.num_elements <= num_elements:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    rows = max(1, num_elements * box.shape[dim] // box.num_elements)
    for start in range(0, box.shape[dim], rows):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[dim] += start
        shape[dim] = min(rows, box.shape[dim] - start)
        yield from _cut(Box(tuple(offsets), tuple(shape)), num_elements)


def _assembled(
    stored: TensorSource, bucket: list[tuple[str, Box]], dtype: torch.dtype | None, unfinished: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Copy the boxes of a bucket to their places; yield each tensor whose last box is among them."""
    for name, box in bucket:
        info = stored.tensors[name]
        if name not in unfinished:
            wanted = converted(info.dtype, dtype)
            unfinished[name] = torch.empty(info.global_shape, dtype=wanted, device="cpu")
        fill(stored, name, box, unfinished[name][box.slices])
        ends = (offset + size for offset, size in zip(box.offsets, box.shape, strict=True))
        if tuple(ends) == info.global_shape:
            yield name, unfinished.pop(name)


def _state_of_ranks(
    model: nn.Module, lora: LoraModel | None, adapters: Adapters, group: Group
) -> dict[str, ShardedTensor]:
    """Return this rank's tensors, once every rank has its own."""
    return run_or_raise_peer_error("reading a part of the model", lambda: _state(model, lora, adapters), group=group)


def _state(model: nn.Module, lora: LoraModel | None, adapters: Adapters) -> dict[str, ShardedTensor]:
    module = plain_model(model)
    state = saved_here(module, model_state(module))
    if lora is not None and adapters == "alone":
        state = {name: state[name] for name in adapter_names(lora) if name in state}
    elif lora is not None:
        factors = set(adapter_names(lora, with_biases=False))
        state = {name: tensor for name, tensor in state.items() if name not in factors}
    return as_sharded_state(state)


@contextmanager
def _merged(lora: LoraModel | None, group: Group) -> Iterator[None]:
    """Inside the block, adapters are in the weights. Called by all ranks, which all leave it together."""
    if lora is None or any(all_gather_object(lora.is_merged, group)):
        yield
        return
    try:
        run_or_raise_peer_error("merging the adapters", lora.merge, group=group)
        yield
    finally:
        lora.unmerge()

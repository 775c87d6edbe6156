"""`stream_weights`: the weights of a model of any layout, whole and one by one, for whoever uses them during training.

The tensors are those that `save_pretrained` writes. Rank 0 requests them in buckets, see `gathering.py`.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from nxd_ckpt import ShardedTensor, TensorInfo
from nxd_ckpt.boxes import Box
from nxd_ckpt.interop import TensorSource
from nxd_ckpt.interop.huggingface.writing import parse_size
from nxd_ckpt.interop.source import converted, fill
from nxd_ckpt.sharded_tensor import as_sharded_state
from nxd_lora import LoraModel, adapter_names, peft_form
from nxd_state import Group, all_gather_object, get_world_group, model_parallel_is_initialized
from torch import Tensor, nn

from nxd_engine.checkpoints.state import model_state, saved_here
from nxd_engine.hugging_face.folder import PathLike
from nxd_engine.hugging_face.gathering import GatheredTensors, leading, serve
from nxd_engine.hugging_face.loading import check_dtype, stored_shapes
from nxd_engine.hugging_face.rearrangement import RearrangedSource
from nxd_engine.hugging_face.saving import as_stored, config_content
from nxd_engine.rank_sync import check_same_call, run_or_raise_peer_error
from nxd_engine.unwrap import adapters_of, plain_model

Receivers = Literal["rank_0", "every_rank"]
Adapters = Literal["merged", "alone"]

_Finish = Callable[[str, Tensor], tuple[str, Tensor]]


def stream_weights(
    model: nn.Module,
    *,
    to: Receivers = "rank_0",
    names: str | Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    adapters: Adapters = "merged",
    bucket_size: int | str = "512MiB",
    like: PathLike | None = None,
    config: Any = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model of any layout under their Hugging Face names. Called by all ranks.

    Names, values and order are those of the folder that `save_pretrained` writes from the same arguments. Every rank
    must iterate to the end; where nothing is delivered, the loop has no turns, and takes as long as rank 0's:

        for name, tensor in nxd_engine.stream_weights(model):
            rollout_engine.update(name, tensor)  # on rank 0 only

    The tensors are new ones in host memory, and belong to the caller. Values are read as the loop goes on, so the model
    must not be trained meanwhile. A rank that leaves the loop early, by `break` or by an error, ends it with a
    `PeerError` on all others. (If you keep the iterator in a variable, close it: `contextlib.closing`.)

    Memory, besides what the caller keeps: rank 0 holds a bucket and the largest tensor; with `to="every_rank"`, so does
    each rank. While adapters are merged, the weights that they change are kept twice on their rank.

    Args:
        model: the model, see `load_pretrained`; perhaps with adapters, or a `LoraModel`.
        to: "rank_0" or "every_rank".
        names: a shell pattern such as "model.layers.0.*", or a collection of names; None for all tensors. Only rank 0's
            counts.
        dtype: dtype of floating-point tensors; unchanged if None. Only rank 0's counts.
        adapters: "merged" for the whole model with its LoRA adapters, if it has any, in its weights; "alone" for the
            adapters only, with the names and shapes of `nxd_lora.save_peft_adapter`.
        bucket_size: bytes of the tensors, or parts of a larger tensor, that rank 0 requests at a time. Only rank 0's
            counts.
        like: as for `save_pretrained`; needed on rank 0 only.
        config: as for `save_pretrained`; needed on rank 0 only.

    Yields:
        Pairs of a name and a whole tensor.

    Raises:
        ValueError: invalid arguments, a name that the model does not have, a pattern that matches nothing, there is no
            config, or "alone" without adapters or with merged ones; on the rank where it is found.
        PeerError: another rank failed or left the loop; the message has its error.
    """
    group = get_world_group() if model_parallel_is_initialized() else Group.solo("world")
    lora = adapters_of(model)

    def checked() -> dict[str, object]:
        check_arguments(to, adapters, lora)
        check_dtype(dtype)
        return {"call": "stream_weights", "to": to, "adapters": adapters, "bytes": parse_size(bucket_size)}

    call = run_or_raise_peer_error("stream_weights", checked, group=group)
    limit = call.pop("bytes")
    assert isinstance(limit, int)
    check_same_call(all_gather_object(call, group))
    in_files = peft_form(lora) if lora is not None and adapters == "alone" else None
    doing = "streaming the weights"
    with _merged(lora if adapters == "merged" else None, group):
        state = run_or_raise_peer_error(
            "reading a part of the model", lambda: _state(model, lora, adapters), group=group
        )
        if group.rank != 0:
            yield from serve(state, group, doing)
            return
        with leading(state, group, doing) as everything:
            if in_files is None:
                base = model.module if isinstance(model, LoraModel) else model
                shapes = None if like is None else stored_shapes(like)
                stored = as_stored(everything, config_content(config, like, base), shapes)
                chosen = {name: name for name in stored.tensors}
            else:
                stored = everything
                chosen = {in_files(name)[0]: name for name in stored.tensors}
            infos = {chosen[name]: stored.tensors[chosen[name]] for name in select(chosen, names)}

            def finish(name: str, tensor: Tensor) -> tuple[str, Tensor]:
                if in_files is None:
                    return name, tensor
                in_file, reshape = in_files(name)
                return in_file, reshape(tensor).contiguous()

            yield from _delivered(everything, stored, infos, finish, to=to, dtype=dtype, limit=limit)


def check_arguments(to: str, adapters: str, lora: LoraModel | None) -> None:
    """Raise ValueError for arguments that cannot be followed."""
    if to not in get_args(Receivers):
        raise ValueError(f"to={to!r} is not a receiver; use one of {', '.join(get_args(Receivers))}")
    if adapters not in get_args(Adapters):
        raise ValueError(f"adapters={adapters!r} is unknown; use one of {', '.join(get_args(Adapters))}")
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
    everything: GatheredTensors,
    stored: TensorSource,
    infos: Mapping[str, TensorInfo],
    finish: _Finish,
    *,
    to: Receivers,
    dtype: torch.dtype | None,
    limit: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on rank 0, and share them with the others if they get them, too."""
    unfinished: dict[str, Tensor] = {}
    for bucket in buckets(infos, dtype, limit):
        if isinstance(stored, RearrangedSource):
            everything.fetch([source for piece in bucket for source in stored.sources_of(*piece)])
        else:
            everything.fetch(bucket)
        made = (finish(*pair) for pair in _assembled(stored, bucket, dtype, unfinished))
        if to == "rank_0":
            yield from made
            continue
        whole = dict(made)
        everything.share(whole)
        while whole:
            name = next(iter(whole))
            yield name, whole.pop(name)


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

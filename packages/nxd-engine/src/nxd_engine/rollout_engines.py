"""Weights for other rollout engines: a source for vLLM's weight transfer, and updates of an SGLang server.

Only their documented interfaces are used, and neither is imported. Nothing that a server answers is executed.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from nxd_ckpt.interop.huggingface.writing import parse_size
from nxd_state import get_device, get_world_group, model_parallel_is_initialized
from torch import Tensor, nn

from nxd_engine.hugging_face.saving import save_pretrained
from nxd_engine.hugging_face.streaming import Receivers, stream_weights, streamed_infos
from nxd_engine.rank_sync import run_or_raise_peer_error

_LONGEST_ANSWER = 100_000  # bytes
_TIMEOUT = 600  # seconds; a server answers when it has loaded the weights


class WeightMetadata(NamedTuple):
    """A tensor's name, and its dtype and shape when it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The weights of a model of any layout, as the trainer's side of vLLM's weight transfer takes them.

    It has the two methods of vLLM's class of this name, which say the same tensors in the same order:

        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=WeightSource(model))
        engine.send_weights()  # after each step, on all ranks

    If an engine of vLLM wants more of its sources, make one class of both: `class Source(WeightSource, vllms)`.

    Args:
        model: see `stream_weights`.
        to: "rank_0" suits vLLM's NCCL engine, where rank 0 sends; with "every_rank" each rank gets every tensor, as its
            IPC engine needs.
        device: where the tensors are to be when they are sent; default: this rank's device.
        options: further arguments of `stream_weights`.
    """

    def __init__(
        self, model: nn.Module, *, to: Receivers = "rank_0", device: torch.device | None = None, **options: Any
    ) -> None:
        self._model = model
        self._to: Receivers = to
        self._device = get_device() if device is None else device
        self._options = options

    def metadata(self) -> list[WeightMetadata]:
        """Return what an iteration yields, without sending values. Called by all ranks; the same on each."""
        options = {name: value for name, value in self._options.items() if name != "bucket_size"}
        infos = streamed_infos(self._model, **options)
        return [WeightMetadata(name, info.dtype, info.global_shape) for name, info in infos.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the present weights, see `stream_weights`. Iterated by all ranks."""
        for name, tensor in stream_weights(self._model, to=self._to, **self._options):
            yield name, tensor.to(self._device)


def update_sglang_from_disk(
    model: nn.Module, url: str, folder: str | Path, *, server: dict[str, Any] | None = None, **options: Any
) -> None:
    """Write the model to a folder that an SGLang server can read, and have the server load it. Called by all ranks.

    Args:
        model: see `save_pretrained`.
        url: of the server, such as "http://localhost:30000"; needed on rank 0 only, like all below.
        folder: a new folder, by a path that is the same for the server.
        server: further fields of the request `/update_weights_from_disk`, such as `weight_version`.
        options: further arguments of `save_pretrained`.

    Raises:
        RuntimeError: the server refused; on rank 0, and a `PeerError` on the others.
        ValueError: see `save_pretrained`.
    """
    save_pretrained(model, folder, **options)
    body = {"model_path": str(folder), "flush_cache": True, **(server or {})}
    _on_rank_0(lambda: _post(url, "update_weights_from_disk", body))


def update_sglang_from_distributed(
    model: nn.Module,
    url: str,
    broadcast: Callable[[Tensor], object],
    *,
    group_name: str = "weight_update_group",
    server: dict[str, Any] | None = None,
    bucket_size: int | str = "512MiB",
    device: torch.device | None = None,
    **options: Any,
) -> None:
    """Broadcast the weights to an SGLang server, in buckets. Called by all ranks.

    Rank 0 and the server's workers are already in a process group: the server by its `/init_weights_update_group`. The
    server's cache is flushed with the last bucket, so do not let it generate meanwhile (`/pause_generation`).

    Args:
        model: see `stream_weights`.
        url: of the server, such as "http://localhost:30000"; needed on rank 0 only, like all below.
        broadcast: sends a tensor from this rank to the workers, such as `partial(torch.distributed.broadcast, src=0,
            group=group)`. If the server fails meanwhile, only the group's timeout ends its waiting.
        group_name: the server's name of the group.
        server: further fields of the last request `/update_weights_from_distributed`, such as `weight_version`.
        bucket_size: bytes of the tensors in one request, unless one is larger; rank 0 holds twice as much.
        device: where the tensors are to be when they are sent; default: this rank's device.
        options: further arguments of `stream_weights`.

    Raises:
        RuntimeError: the server refused; on rank 0, and a `PeerError` on the others.
        ValueError: see `stream_weights`.
    """
    device, limit = get_device() if device is None else device, parse_size(bucket_size)
    bucket: dict[str, Tensor] = {}

    def send(**more: Any) -> None:
        body = {
            "names": list(bucket),
            "dtypes": [str(it.dtype).removeprefix("torch.") for it in bucket.values()],
            "shapes": [list(it.shape) for it in bucket.values()],
            "group_name": group_name,
            **more,
        }
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(_post, url, "update_weights_from_distributed", body)
            for name in list(bucket):
                if answer.done():
                    answer.result()  # raises if the server has refused; it answers after the last tensor
                broadcast(bucket.pop(name).to(device))
            answer.result()

    for name, tensor in stream_weights(model, to="rank_0", bucket_size=bucket_size, **options):
        if bucket and sum(it.nbytes for it in bucket.values()) + tensor.nbytes > limit:
            send(flush_cache=False)
        bucket[name] = tensor
    _on_rank_0(lambda: send(**{"flush_cache": True, **(server or {})}))


def _on_rank_0(act: Callable[[], None]) -> None:
    is_first = not model_parallel_is_initialized() or get_world_group().rank == 0
    run_or_raise_peer_error("updating the rollout engine", lambda: act() if is_first else None)


def _post(url: str, route: str, body: dict[str, Any]) -> None:
    """Send a request to an SGLang server.

    Raises:
        ValueError: the URL is not one of http.
        RuntimeError: the server answers that it has failed.
    """
    address = f"{url.rstrip('/')}/{route}"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the URL of a server; use one such as 'http://localhost:30000'")
    content = json.dumps(body).encode()
    request = Request(address, content, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_TIMEOUT) as response:
            answer = response.read(_LONGEST_ANSWER)
    except HTTPError as error:
        text = error.read(_LONGEST_ANSWER).decode(errors="replace")
        raise RuntimeError(f"{address} answered {error.code}: {text}") from None
    try:
        succeeded = json.loads(answer)["success"] is True
    except (ValueError, TypeError, LookupError):
        succeeded = False
    if not succeeded:
        raise RuntimeError(f"{address} answered {answer.decode(errors='replace')!r}; expected that success is true")

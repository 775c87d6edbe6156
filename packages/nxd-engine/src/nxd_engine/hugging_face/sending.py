"""`send_weights`: from a model of any layout into a running `nxd serve --accept-weights`, over HTTP.

The endpoints are described in docs/reference/serving-endpoints.md. Buckets are sent as safetensors bytes.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from nxd_ckpt import TensorInfo
from nxd_ckpt.interop.huggingface.reading import make_header
from nxd_ckpt.interop.huggingface.writing import parse_size
from nxd_state import Group, all_gather_object, get_world_group, model_parallel_is_initialized
from torch import Tensor, nn

from nxd_engine.hugging_face.streaming import stream_weights
from nxd_engine.rank_sync import run_or_raise_peer_error


def send_weights(
    model: nn.Module,
    url: str,
    *,
    token: str,
    version: str | None = None,
    bucket_size: int | str = "256MiB",
    timeout: float = 600.0,
    **options: Any,
) -> str:
    """Replace the weights of a running `nxd serve` by those of a model of any layout. Called by all ranks.

    The server keeps its old weights until it has received all new ones, and if anything fails. Requests that have begun
    finish on the old weights before the new ones are put in place; all others wait for the new ones.

    Rank 0 sends, and holds two buckets and the largest tensor.

    Args:
        model: the model, see `stream_weights`; adapters are sent merged.
        url: address of the server, such as "http://127.0.0.1:8000".
        token: content of the file that the server was given as `--accept-weights`.
        version: name of the new version in the server's answers; by default it counts.
        bucket_size: bytes of the tensors in a request; a larger tensor gets a request of its own.
        timeout: seconds for the server to answer a request. The last one takes as long as the requests that it is
            answering, and the replacement of its weights.
        **options: `dtype`, `like` and `config` of `stream_weights`. The server converts to its own dtype.

    Returns:
        The new version, on all ranks.

    Raises:
        ValueError: invalid arguments; on the rank where it is found.
        RuntimeError: the server does not answer, or refuses the weights, with its reason; on rank 0.
        PeerError: another rank failed; the message has its error.
    """
    group = get_world_group() if model_parallel_is_initialized() else Group.solo("world")

    def start() -> _Update | None:
        limit = parse_size(bucket_size)
        return _Update(url, token, timeout, version, limit) if group.rank == 0 else None

    update = run_or_raise_peer_error("starting the update of the weights", start, group=group)
    try:
        tensors = stream_weights(model, bucket_size=bucket_size, **options)
        try:
            for name, tensor in tensors:  # on rank 0 only
                assert update is not None
                update.add(name, tensor)
        except BaseException as error:
            tensors.throw(error)  # so that it ends the loops of all ranks
        finished = run_or_raise_peer_error(
            "finishing the update of the weights", lambda: "" if update is None else update.finish(), group=group
        )
    except BaseException:
        if update is not None:
            update.abort()
        raise
    return str(all_gather_object(finished, group)[0])


class _Update:
    """One update, on rank 0; tensors wait until they fill a bucket."""

    def __init__(self, url: str, token: str, timeout: float, version: str | None, limit: int) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"url={url!r} is not an address of a server; use one such as http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._token = token.strip()
        self._timeout = timeout
        self._limit = limit
        self._waiting: dict[str, Tensor] = {}
        self._id = self._post("/start_weight_update", {} if version is None else {"version": version})["update_id"]

    def add(self, name: str, tensor: Tensor) -> None:
        """Send the waiting tensors if the bucket has no room for this one."""
        if sum(it.nbytes for it in self._waiting.values()) + tensor.nbytes > self._limit:
            self._send()
        self._waiting[name] = tensor

    def finish(self) -> str:
        """Send the last tensors, and return the version once the new weights are in place."""
        self._send()
        return str(self._post("/finish_weight_update", {"update_id": self._id})["weights_version"])

    def abort(self) -> None:
        """Drop the update on the server, if it can be reached."""
        with suppress(RuntimeError):
            self._post("/abort_weight_update", {"update_id": self._id})

    def _send(self) -> None:
        if not self._waiting:
            return
        # Large elements first, so that all are aligned.
        tensors = dict(sorted(self._waiting.items(), key=lambda item: -item[1].itemsize))
        infos = {name: TensorInfo(it.dtype, tuple(it.shape)) for name, it in tensors.items()}
        header = make_header(infos, {"format": "pt"})
        values = (memoryview(it.contiguous().view(-1).view(torch.uint8).numpy().data) for it in tensors.values())
        size = len(header) + sum(it.nbytes for it in tensors.values())
        self._waiting = {}
        self._request(f"/update_weights?update_id={self._id}", [header, *values], size, "application/octet-stream")

    def _post(self, path: str, body: Mapping[str, str]) -> Any:
        data = json.dumps(body).encode()
        return self._request(path, [data], len(data), "application/json")

    def _request(self, path: str, data: Iterable[Any], size: int, kind: str) -> Any:
        """Send a request and return the JSON of the response.

        Raises:
            RuntimeError: the server does not answer, or refuses.
        """
        headers = {"Content-Type": kind, "Content-Length": str(size)}
        request = Request(self._url + path, data, headers, method="POST")
        request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with urlopen(request, timeout=self._timeout) as response:
                return json.load(response)
        except HTTPError as error:
            raise RuntimeError(f"{self._url} refused the weights: {_reason(error)}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise RuntimeError(
                f"{self._url} did not answer {path.partition('?')[0]}: {error}; is it a running "
                "`nxd serve --accept-weights`?"
            ) from error


def _reason(error: HTTPError) -> str:
    if error.code == HTTPStatus.NOT_FOUND:
        return "it accepts none; start it with --accept-weights TOKEN_FILE"
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return f"status {error.code}"

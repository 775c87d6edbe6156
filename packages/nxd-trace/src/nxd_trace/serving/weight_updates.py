"""Live updates of a served model's weights: received into a folder, then put in place between requests.

The phases have the names of vLLM's: start, any number of buckets (each a safetensors file), finish; or abort. Buckets
are stored in the folder for temporary files, so this process holds no weights, and the workers keep one copy, which is
overwritten only once everything has been received and fits. Until then, and after a failure, the old weights serve.
"""

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from nxd_trace.errors import ModelFolderError, RequestError
from nxd_trace.model import TemporaryModelFolder
from nxd_trace.serving.scheduler import Scheduler
from nxd_trace.weights import SafetensorsFiles, WeightSource, stored_tensors

_MIN_TOKEN_LENGTH = 16
_MAX_VERSION_LENGTH = 200
_BYTES_PER_WRITE = 1 << 20


@dataclass(frozen=True)
class UpdateSettings:
    """Who may update the weights, and how they are read.

    Attributes:
        token: the secret that senders send as `Authorization: Bearer TOKEN`.
        max_bytes: maximum size of all buckets of an update.
        open_folder: function that opens the received folder, with the files and index of a Hugging Face folder and no
            config; it raises ValueError if the tensors are not those of the model.

    Raises:
        ValueError: the token is short, or cannot be part of a header.
    """

    token: str = field(repr=False)
    max_bytes: int
    open_folder: Callable[[Path], WeightSource] = SafetensorsFiles

    def __post_init__(self) -> None:
        is_word = self.token.isascii() and self.token.isprintable() and " " not in self.token
        if not is_word or len(self.token) < _MIN_TOKEN_LENGTH:
            raise ValueError(
                f"the token has {len(self.token)} characters; use one word of {_MIN_TOKEN_LENGTH} or more ASCII "
                "characters, such as `openssl rand -hex 32` prints"
            )


class _Update:
    """One update: its buckets so far."""

    def __init__(self, version: str | None) -> None:
        self.id = secrets.token_hex(8)
        self.version = version
        self.folder = TemporaryModelFolder()
        self.files: dict[str, str] = {}  # by the tensors that they hold
        self.num_files = 0
        self.num_bytes = 0
        self.num_receiving = 0
        self.is_finishing = False


class WeightUpdates:
    """Updates of the weights, one at a time. Used in the event loop's thread.

    Args:
        scheduler: the queue, which puts new weights in place.
        settings: who may send, and how weights are read.
    """

    def __init__(self, scheduler: Scheduler, settings: UpdateSettings) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._current: _Update | None = None

    def check_sender(self, authorization: str) -> None:
        """Raise RequestError (401) unless the header has the token."""
        expected = f"Bearer {self._settings.token}"
        if not hmac.compare_digest(authorization.encode(errors="replace"), expected.encode()):
            raise RequestError(401, "weights are accepted with the server's token: 'Authorization: Bearer TOKEN'")

    def start(self, version: Any = None) -> str:
        """Start an update and return its id. One that is unfinished is dropped: its sender may have died.

        Args:
            version: name of the new version; None for the number of updates so far.

        Raises:
            RequestError: the version is not a short text (400), or an update is being put in place (409).
        """
        is_text = isinstance(version, str) and version.isprintable() and 0 < len(version) <= _MAX_VERSION_LENGTH
        if version is not None and not is_text:
            raise RequestError(
                400,
                f"version is {short_repr(version)}; send a text of 1 to {_MAX_VERSION_LENGTH} characters",
                "version",
            )
        if self._current is not None and self._current.is_finishing:
            raise RequestError(409, "another update is being put in place; start again later", retry_after=1)
        self.close()
        self._current = _Update(version)
        return self._current.id

    async def receive(self, update_id: Any, chunks: AsyncIterator[bytes]) -> list[str]:
        """Store a bucket, the bytes of a safetensors file, and return the names of its tensors.

        Raises:
            RequestError: there is no such update (409), the bucket is no safetensors file or repeats a tensor (400),
                the update is too large (413), or the disk is full (507). The update goes on without the bucket.
        """
        update = self._find(update_id)
        update.num_files += 1
        file = Path(update.folder.name) / f"model-{update.num_files:05d}.safetensors"
        update.num_receiving += 1
        try:
            await self._store(update, chunks, file)
            names = list(await asyncio.to_thread(stored_tensors, file))
            self._find(update_id)
            if repeated := [name for name in names if name in update.files]:
                raise RequestError(400, f"{short_repr(repeated[0])} is already in this update; send each tensor once")
        except Exception as error:
            file.unlink(missing_ok=True)
            self._find(update_id)  # otherwise the error is that its folder is gone
            if isinstance(error, ModelFolderError):
                raise RequestError(400, f"the bucket is not a safetensors file: {_without(file, error)}") from error
            if isinstance(error, OSError):
                raise RequestError(507, f"the bucket cannot be stored: {_without(file, error)}") from error
            raise
        finally:
            update.num_receiving -= 1
        update.files |= dict.fromkeys(names, file.name)
        return names

    async def finish(self, update_id: Any) -> str:
        """Put the new weights in place and return their version. If that fails, the update is dropped.

        Raises:
            RequestError: there is no such update or a bucket is still being received (409), the tensors are not those
                of the model (400), or the model failed (503). The old weights stay.
        """
        update = self._find(update_id)
        if update.num_receiving:
            raise RequestError(409, "a bucket is still being received; finish after its response")
        update.is_finishing = True
        try:
            weights = await asyncio.to_thread(self._open, update)
            return await asyncio.wrap_future(self._scheduler.replace_weights(weights, update.version))
        except (ValueError, OSError) as error:
            raise RequestError(400, f"the update is refused: {_without(Path(update.folder.name), error)}") from error
        finally:
            self.close()

    def abort(self, update_id: Any) -> None:
        """Drop an update.

        Raises:
            RequestError: there is no such update (409).
        """
        self._find(update_id)
        self.close()

    def close(self) -> None:
        """Drop the current update, if any."""
        if self._current is not None:
            self._current.folder.cleanup()
            self._current = None

    def _find(self, update_id: Any) -> _Update:
        """Return the current update, if it has this id and still takes buckets."""
        update = self._current
        if update is None or update.id != update_id or update.is_finishing:
            raise RequestError(
                409, f"update {short_repr(update_id)} is not open: it was finished, aborted, or replaced by a newer one"
            )
        return update

    async def _store(self, update: _Update, chunks: AsyncIterator[bytes], file: Path) -> None:
        with file.open("xb") as stream:
            waiting = bytearray()
            async for chunk in chunks:
                update.num_bytes += len(chunk)
                if update.num_bytes > self._settings.max_bytes:
                    raise RequestError(413, f"the update has more than {self._settings.max_bytes} bytes of tensors")
                waiting += chunk
                if len(waiting) >= _BYTES_PER_WRITE:
                    await asyncio.to_thread(stream.write, bytes(waiting))
                    waiting.clear()
            await asyncio.to_thread(stream.write, bytes(waiting))

    def _open(self, update: _Update) -> WeightSource:
        folder = Path(update.folder.name)
        index = {"metadata": {}, "weight_map": update.files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return self._settings.open_folder(folder)


def _without(path: Path, error: Exception) -> str:
    """Return an error's text without the path of a temporary file."""
    return str(error).replace(str(path), "it")

"""Checkpoints in host memory: each rank's files are stored on its own host and on others, so that hosts may be lost.

    peers://10.0.0.1:4001,10.0.0.2:4002,10.0.0.3:4003/?copies=1

lists the memory servers of a job's hosts, in the order in which copies are placed. A rank's file is stored on its own
host, given by `&own=10.0.0.2:4002` or `NXD_MEMORY_SERVER`, and on the next `copies` hosts, so any `copies` hosts may be
lost. The manifest is stored on every host and written last: a checkpoint exists as soon as one host has it. Any layout
can load it.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from urllib.parse import parse_qs

from nxd_ckpt.arguments import is_tag
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, file_names_in
from nxd_ckpt.manifest_text import decode
from nxd_ckpt.stores import Capabilities, Garbage, ReadRange

from nxd_elastic.peers.client import MemoryServerClient, Upload
from nxd_elastic.peers.server import PINS

SCHEME = "peers://"

# Environment variables of a job with memory servers.
SERVERS = "NXD_MEMORY_SERVERS"  # `host:port` of each host's memory server, separated by commas
OWN_SERVER = "NXD_MEMORY_SERVER"  # the one on this rank's host

_PIN = f"{PINS}/"


def peers_url(servers: Sequence[str], own: str | None = None, copies: int = 1) -> str:
    """Return the path by which `save` and `load` find checkpoints in host memory.

    Args:
        servers: `host:port` of each host's memory server, in the same order on all ranks.
        own: the memory server on this rank's host; that of `NXD_MEMORY_SERVER`, or the first one, if None.
        copies: number of other hosts that also hold each file, as far as there are enough hosts.

    Raises:
        ValueError: `own` is not one of the memory servers, or `copies` is negative.
    """
    if not servers or (own is not None and own not in servers) or copies < 0:
        raise ValueError(
            f"own={own!r} and copies={copies} do not match the memory servers {', '.join(servers) or '(none)'}; set "
            "own to one of them, and copies to 0 or more"
        )
    return f"{SCHEME}{','.join(servers)}/?copies={copies}" + (f"&own={own}" if own else "")


def job_url(copies: int = 1) -> str | None:
    """Return the `peers_url` of the servers in `NXD_MEMORY_SERVERS`, the same on all ranks; None if it is not set."""
    servers = [it for it in os.environ.get(SERVERS, "").split(",") if it]
    return peers_url(servers, copies=copies) if servers else None


def _own_among(servers: Sequence[str]) -> str:
    own = os.environ.get(OWN_SERVER, "")
    return own if own in servers else servers[0]


class PeerStore:
    """A root of checkpoints in host memory.

    Reading skips hosts that cannot be reached; writing needs all hosts.

    Args:
        url: a URL from `peers_url`.

    Attributes:
        copies: number of copies of each file on other hosts.
        servers: the memory servers of all hosts, from this rank's host on.

    Raises:
        ValueError: the URL is not valid.
    """

    capabilities = Capabilities(other_processes=True, other_files=False, remote=True)

    def __init__(self, url: str) -> None:
        hosts, _, query = url.removeprefix(SCHEME).partition("?")
        hosts = hosts.rstrip("/")
        servers = tuple(hosts.split(","))
        options = {name: values[-1] for name, values in parse_qs(query).items()}
        copies, own = options.get("copies", "1"), options.get("own", _own_among(servers))
        if not url.startswith(SCHEME) or not copies.isdecimal() or not hosts or own not in servers:
            raise ValueError(
                f"{url!r} names no memory servers; expected {SCHEME}HOST:PORT,HOST:PORT/?copies=1&own=HOST:PORT"
            )
        self.location = f"{SCHEME}{hosts}/?copies={copies}"  # the same on all hosts
        self.copies = int(copies)
        first = servers.index(own)
        self.servers = [MemoryServerClient(address) for address in (*servers[first:], *servers[:first])]
        self._holders: dict[str, MemoryServerClient] = {}

    def where(self, tag: str, file: str = MANIFEST_NAME) -> str:
        """See `Store.where`."""
        return f"{SCHEME}{self.location.split('/')[2]}/{tag}/{file}"

    def tags(self) -> list[str]:
        """See `Store.tags`."""
        names = {name for _, files in self.listings() for name in files if name.endswith(f"/{MANIFEST_NAME}")}
        return sorted(tag for tag in {name.partition("/")[0] for name in names} if is_tag(tag))

    def beginnings(self, num_bytes: int) -> Iterator[tuple[str, bytes, int | None]]:
        """See `Store.beginnings`. Manifests are read whole, since hosts may have different ones, and there are few."""
        for tag in self.tags():
            try:
                text = self.read_manifest(tag)
                yield tag, text, len(text)
            except (OSError, CheckpointError):
                yield tag, b"", None

    def read_manifest(self, tag: str) -> bytes:
        """See `Store.read_manifest`. If an interrupted save has reached only some hosts, the newest is returned."""
        found: list[bytes] = []
        for server in self.servers:
            with suppress(OSError):
                content = server.content(f"{tag}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
                if content not in found:
                    found.append(content)
        if not found:
            raise FileNotFoundError(f"{self.where(tag)} is on no reachable host")
        if len(found) == 1:
            return found[0]
        return max(found, key=lambda content: decode(content, self.where(tag)).committed_at)

    def file_size(self, tag: str, file: str) -> int:
        """See `Store.file_size`."""
        name = f"{tag}/{file}"
        for server in self.servers:
            with suppress(OSError):
                size = server.size(name)
                self._holders[name] = server
                return size
        raise FileNotFoundError(f"{self.where(tag, file)} is on no reachable host")

    def read_into(self, tag: str, file: str, ranges: Sequence[ReadRange]) -> None:
        """See `Store.read_into`. This host is tried first."""
        name = f"{tag}/{file}"
        wanted = [(piece.offset, piece.destination) for piece in ranges]
        problem: OSError | None = None
        for server in [self._holders[name]] * (name in self._holders) + self.servers:
            try:
                return server.get(name, wanted)
            except OSError as error:
                problem = problem if isinstance(error, FileNotFoundError) and problem else error
        raise problem or FileNotFoundError(f"{self.where(tag, file)} is on no host")

    def delete(self, tag: str) -> None:
        """See `Store.delete`."""
        self.file_size(tag, MANIFEST_NAME)
        listings = self.listings()
        for server, _ in listings:
            server.remove([f"{tag}/{MANIFEST_NAME}"])
        for server, files in listings:
            server.remove([name for name in files if name.startswith(f"{tag}/")])

    def begin_save(self, tag: str, save_id: str, *, overwrite: bool) -> "PeerSave":
        """See `Store.begin_save`."""
        return PeerSave(self, tag, overwrite=overwrite)

    def held(self) -> set[str]:
        """See `Store.held`. Checkpoints here never reference one another."""
        return set()

    def pinned(self) -> set[str]:
        """See `Store.pinned`."""
        return {name.removeprefix(_PIN) for _, files in self.listings() for name in files if name.startswith(_PIN)}

    def set_pinned(self, tag: str, *, to: bool) -> None:
        """See `Store.set_pinned`."""
        for server, _ in self.listings():
            if to:
                with closing(server.put(f"{_PIN}{tag}", 0)) as upload:
                    upload.finish()
            else:
                server.remove([f"{_PIN}{tag}"])

    def garbage(self, *, dead_after: float, delete: bool) -> list[Garbage]:
        """See `Store.garbage`: files that no manifest names; files of a running save are recognized by their age."""
        listings = self.listings()
        needed: set[str] = set()
        for server, files in listings:
            needed |= {name for name in files if name.startswith(_PIN)}
            for name in [it for it in files if it.endswith(f"/{MANIFEST_NAME}")]:
                tag = name.partition("/")[0]
                needed |= {name, *(f"{tag}/{file}" for file in file_names_in(server.content(name, MAX_MANIFEST_BYTES)))}
        found: list[Garbage] = []
        for server, files in listings:
            dead = server.files(unchanged=dead_after) if dead_after else files
            doomed = {name: size for name, size in files.items() if name in dead and name not in needed}
            found += [Garbage(f"{server.address}/{name}", size) for name, size in doomed.items()]
            if delete:
                server.remove(doomed)
        return found

    def listings(self) -> list[tuple[MemoryServerClient, dict[str, int]]]:
        """Return the reachable memory servers, this host's first, each with its files and their sizes.

        Raises:
            OSError: no memory server can be reached.
        """
        found = []
        for server in self.servers:
            with suppress(OSError):
                found.append((server, server.files()))
        if not found:
            raise OSError(f"no memory server of {self.location} can be reached")
        return found


class PeerSave:
    """A `SaveTransaction` that writes each file to several hosts, and commits by writing the manifest to every host."""

    def __init__(self, store: PeerStore, tag: str, *, overwrite: bool) -> None:
        self._store = store
        self._tag = tag
        self._overwrite = overwrite
        self._begun = False

    def begin(self) -> None:
        """See `SaveTransaction.begin`."""
        self._check_tag()
        self._begun = True
        self._store.garbage(dead_after=0, delete=True)

    def hold(self, files: Collection[str]) -> None:
        """See `SaveTransaction.hold`. Checkpoints here never reference one another."""
        raise CheckpointError("checkpoints in host memory cannot be incremental; remove incremental=True")

    def write_file(self, file: str, parts: "Iterable[bytes | memoryview]", num_bytes: int) -> None:
        """See `SaveTransaction.write_file`. The hosts are written to at the same time."""
        holders = self._store.servers[: 1 + self._store.copies]
        name = f"{self._tag}/{file}"
        with ExitStack() as begun:
            uploads: list[Upload] = []
            for server in holders:
                uploads.append(begun.enter_context(closing(server.put(name, num_bytes))))
            for part in parts:
                for upload in uploads:
                    upload.send(part)
            for upload in uploads:
                upload.finish()

    def file_size(self, file: str) -> int:
        """See `SaveTransaction.file_size`."""
        return self._store.file_size(self._tag, file)

    def commit(self, manifest: bytes) -> None:
        """See `SaveTransaction.commit`. The first host that has the manifest commits."""
        self._check_tag()
        for server in self._store.servers:
            with closing(server.put(f"{self._tag}/{MANIFEST_NAME}", len(manifest))) as upload:
                upload.send(manifest)
                upload.finish()

    def end(self) -> None:
        """See `SaveTransaction.end`."""
        if self._begun:
            self._begun = False
            with suppress(OSError):
                self._store.garbage(dead_after=0, delete=True)

    def _check_tag(self) -> None:
        if not self._overwrite and self._tag in self._store.tags():
            raise CheckpointError(f"checkpoint {self._tag} exists; choose another tag or pass overwrite=True")

"""How ranks on several hosts find each other: the address of rank 0's host, and the interface that gloo listens on."""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path

INTERFACE = "GLOO_SOCKET_IFNAME"
_IPV4_ROUTES, _IPV6_ROUTES = Path("/proc/net/route"), Path("/proc/net/ipv6_route")

_logger = logging.getLogger(__name__)


def wait_for_address(seconds: float) -> None:
    """Wait until the name of rank 0's host has an address here.

    torch's own client would try for the whole timeout of collectives, in C++, where Python sees no signal.

    Raises:
        ValueError: it still has none.
    """
    host, end = os.environ.get("MASTER_ADDR", "localhost"), time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:  # the latter for labels that are too long
            if time.monotonic() > end:
                raise ValueError(
                    f"MASTER_ADDR={host} has no address on this host: {error}; set it to a name or address of the host "
                    "of rank 0 that all hosts can reach"
                ) from error
        time.sleep(0.5)


def choose_interface() -> None:
    """Set `GLOO_SOCKET_IFNAME` if gloo would listen on the loopback interface while ranks are on several hosts.

    gloo listens on the first address of the host's own name that it can bind. If the name has none, or as on Debian
    127.0.1.1, that is the loopback interface, and ranks on other hosts would wait until their timeout. The interface of
    the route to rank 0's host takes its place. Nothing is done if the variable is set, or all ranks are on this host.
    """
    environment = os.environ
    host = environment.get("MASTER_ADDR", "localhost")
    all_are_here = environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE", "1")
    is_local_address = host == "localhost" or _is_loopback(host)
    if INTERFACE in environment or all_are_here or is_local_address or sys.platform != "linux":
        return
    listens_on = next((it for it in _addresses(socket.gethostname()) if _can_bind(it)), "127.0.0.1")
    if not _is_loopback(listens_on):
        return
    found = _interface_towards(host)
    if found is not None:
        environment[INTERFACE] = found
    if environment.get("LOCAL_RANK", "0") == "0":
        _logger.warning(
            "this host's own name, %s, leads to %s, which other hosts cannot reach; %s",
            socket.gethostname(),
            listens_on,
            f"gloo listens on {found} instead, and {INTERFACE} chooses another interface"
            if found
            else f"set {INTERFACE} to the interface that they reach",
        )


def _addresses(name: str) -> list[str]:
    """The addresses of a name, in the order in which they are tried; none if it has none."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def _interface_towards(host: str) -> str | None:
    """The interface of the route to a host. If it is this host: of the default route, or the only one that there is."""
    routes = [*_ipv4_routes(), *_ipv6_routes()]
    for text in _addresses(host):
        address = ip_address(text.partition("%")[0])
        found = [(network.prefixlen, name) for network, name in routes if address in network]
        if found and not address.is_loopback:
            return max(found)[1]
    default = next((name for network, name in routes if network.prefixlen == 0), None)
    names = {name for network, name in routes if network.version == 4}
    return default or (names.pop() if len(names) == 1 else None)


def _ipv4_routes() -> Iterator[tuple[IPv4Network | IPv6Network, str]]:
    """The routes of proc(5)'s net/route, whose numbers are in the order of bytes of the network, read as integers."""
    for fields in _lines(_IPV4_ROUTES):
        with suppress(ValueError, IndexError):  # the heading
            destination, mask = (int(it, 16).to_bytes(4, sys.byteorder) for it in (fields[1], fields[7]))
            yield ip_network((destination, int.from_bytes(mask, "big").bit_count())), fields[0]


def _ipv6_routes() -> Iterator[tuple[IPv4Network | IPv6Network, str]]:
    for fields in _lines(_IPV6_ROUTES):
        network = ip_network((bytes.fromhex(fields[0]), int(fields[1], 16)))
        if fields[-1] != "lo" and not network.is_link_local and not network.is_multicast:
            yield network, fields[-1]


def _lines(file: Path) -> list[list[str]]:
    try:
        return [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []

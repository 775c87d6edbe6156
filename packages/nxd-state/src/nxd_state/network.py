"""How ranks on several hosts find each other: the address of rank 0's host, and the interface that gloo listens on."""

import ipaddress
import logging
import os
import socket
import struct
import sys
import time

INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # netdevice(7): an interface's IPv4 address
_ANY_PORT = 9  # nothing is sent to it

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
    """Set `GLOO_SOCKET_IFNAME` where gloo would listen on an address that no other host reaches.

    gloo listens on the address of the host's own name. Where that name has none, or as on Debian 127.0.1.1, it would
    listen on the loopback interface, and ranks on other hosts would wait for it until their timeout. Without effect if
    the variable is set, if all ranks are on this host, or if no interface can be told.
    """
    environment = os.environ
    all_are_here = environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE", "1")
    if INTERFACE in environment or all_are_here or sys.platform != "linux" or _is_reached(_own_addresses()):
        return
    found = _interface_towards(environment.get("MASTER_ADDR", "localhost"))
    if found is None:
        return
    environment[INTERFACE] = found
    _logger.warning(
        "gloo listens on %s, since the address of this host's own name, %s, is not reached from other hosts; "
        "%s chooses another interface",
        found,
        socket.gethostname(),
        INTERFACE,
    )


def _own_addresses() -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    except (OSError, UnicodeError):
        return set()


def _is_reached(addresses: set[str]) -> bool:
    """Whether other hosts may reach one of the addresses."""
    return any(not ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _interface_towards(host: str) -> str | None:
    """The interface of the route to a host; the only one with an IPv4 address if that is the loopback; or None."""
    interfaces = {_ipv4_address(name): name for _, name in socket.if_nameindex()}
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, _ANY_PORT))
            except OSError:
                continue
            address = str(probe.getsockname()[0])
        if _is_reached({address}):
            return interfaces.get(address) if family == socket.AF_INET else _interface_of_ipv6(address)
    others = [name for address, name in interfaces.items() if address is not None and _is_reached({address})]
    return others[0] if len(others) == 1 else None


def _ipv4_address(interface: str) -> str | None:
    import fcntl  # noqa: PLC0415 - Linux and macOS only

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has none
            return None


def _interface_of_ipv6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            return next((line.split()[-1] for line in lines if line.startswith(wanted)), None)
    except OSError:
        return None

"""Ports and addresses: where ranks meet, and whether they can listen and connect."""

import socket
from collections.abc import Mapping

from nxd_trainer.doctor.finding import Finding, ok, wrong

HIGHEST_PORT = 65_535


def check_rendezvous(environment: Mapping[str, str]) -> Finding:
    """Whether MASTER_ADDR and MASTER_PORT, where set, can be used.

    The host must have an address; if it is this one, the port must be free.
    """
    name = "rendezvous"
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host is None and port is None:
        return ok(name, "MASTER_ADDR and MASTER_PORT are unset: torchrun chooses them")
    if host is None or port is None:
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        return wrong(name, f"{missing} is unset, the other is set", f"set {missing}, or leave both to torchrun")
    if not port.isdecimal() or not 0 < int(port) <= HIGHEST_PORT:
        return wrong(name, f"MASTER_PORT={port}", f"use a free port from 1024 to {HIGHEST_PORT}")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        return wrong(
            name, f"MASTER_ADDR={host} has no address: {error}", "use a name or address that every host can reach"
        )
    if _is_here(host) and not _is_free(port):
        return wrong(name, f"port {port} is in use", "end what listens there (ss -ltnp), or set another MASTER_PORT")
    return ok(name, f"{host}:{port}")


def check_loopback() -> Finding:
    """Whether a process can listen on this host, and another connect to it."""
    name = "ports"
    mend = "let processes of this host connect to 127.0.0.1 (firewall, sandbox, network namespace)"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return wrong(name, f"a connection to 127.0.0.1 failed: {error}", mend)
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        found = f"the host's own name {socket.gethostname()} has no address: {error}"
        return wrong(name, found, f"add it to /etc/hosts: 127.0.0.1 {socket.gethostname()}")
    return ok(name, "processes of this host can connect")


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _is_free(port: str) -> bool:
    try:
        with socket.create_server(("", int(port))):
            return True
    except OSError:
        return False

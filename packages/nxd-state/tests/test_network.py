"""The interface that gloo listens on; `tests-integration/hosts` has ranks on several hosts."""

import os
import socket
import sys

import pytest
from nxd_state import network

TWO_HOSTS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.1.2.4"}


@pytest.fixture
def chosen(monkeypatch):
    """`chosen(own_addresses, **environment)`: the interface that is set for a host whose own name has addresses."""

    def choose(own_addresses, **environment):
        monkeypatch.setenv(network.INTERFACE, "")  # so that it is put back whatever becomes of it
        monkeypatch.delenv(network.INTERFACE)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        def resolve(host, port):
            if host == socket.gethostname() and own_addresses:
                return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in own_addresses]
            raise socket.gaierror(f"{host} has no address")

        monkeypatch.setattr(network.socket, "getaddrinfo", resolve)
        monkeypatch.setattr(network, "_interface_towards", lambda host: f"towards {host}")
        network.choose_interface()
        return os.environ.get(network.INTERFACE)

    return choose


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are told on Linux only")
@pytest.mark.parametrize("own_addresses", [[], ["127.0.1.1"], ["::1", "127.0.0.1"]])
def test_a_name_that_leads_nowhere_makes_gloo_listen_where_rank_0_is_reached(chosen, caplog, own_addresses):
    assert chosen(own_addresses, **TWO_HOSTS) == "towards 10.1.2.4"
    assert f"this host's own name, {socket.gethostname()}, is not reached from other hosts" in caplog.text


@pytest.mark.parametrize(
    ("own_addresses", "environment"),
    [
        (["127.0.1.1", "10.1.2.3"], {}),
        (["fd00::7%eth0"], {}),
        (["127.0.1.1"], {"LOCAL_WORLD_SIZE": "2"}),
        (["127.0.1.1"], {network.INTERFACE: "ib0"}),
    ],
    ids=["an address", "an IPv6 address", "one host", "the user's choice"],
)
def test_gloo_is_left_alone_where_its_own_choice_or_the_users_will_do(chosen, own_addresses, environment):
    assert chosen(own_addresses, **TWO_HOSTS | environment) == environment.get(network.INTERFACE)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are told on Linux only")
def test_an_address_of_this_host_leads_to_the_interface_that_has_it():
    addresses = {network._ipv4_address(name): name for _, name in socket.if_nameindex()}

    assert addresses["127.0.0.1"] == "lo"
    for address, name in addresses.items():
        if address not in (None, "127.0.0.1"):
            assert network._interface_towards(address) == name

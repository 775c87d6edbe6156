"""The interface that gloo listens on; `tests-integration/hosts` has ranks on several hosts."""

import os
import socket
import sys

import pytest
from nxd_state import network

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are told on Linux only")

TWO_HOSTS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}
HEADING = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
DOCKER = "docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0"  # 172.17.0.0/16
OF_HOSTS = "eth0 00004D0A 00000000 0001 0 0 0 00FFFFFF 0 0 0"  # 10.77.0.0/24
DEFAULT = "eth1 00000000 FE4D0A0A 0003 0 0 0 00000000 0 0 0"
IPV6 = "fd770000000000000000000000000000 40 {0} 00 {0} 00000100 00000001 00000000 00000001 ib0".format("0" * 32)


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """`chosen(names, routes, **environment)`: the interface that is set, with the addresses of names."""

    def choose(names=None, routes=(OF_HOSTS,), **environment):
        monkeypatch.setenv(network.INTERFACE, "")  # so that it is put back whatever becomes of it
        monkeypatch.delenv(network.INTERFACE)
        for name, value in (TWO_HOSTS | environment).items():
            monkeypatch.setenv(name, value)
        names = {TWO_HOSTS["MASTER_ADDR"]: [TWO_HOSTS["MASTER_ADDR"]], **(names or {})}

        def resolve(host, port, type=0):
            own = names.get("own name", []) if host == socket.gethostname() else names.get(host)
            if not own:
                raise socket.gaierror(f"{host} has no address")
            return [(socket.AF_INET, type, 0, "", (address, 0)) for address in own]

        (tmp_path / "route").write_text("\n".join([HEADING, *routes]))
        (tmp_path / "ipv6_route").write_text(IPV6)
        monkeypatch.setattr(network, "_IPV4_ROUTES", tmp_path / "route")
        monkeypatch.setattr(network, "_IPV6_ROUTES", tmp_path / "ipv6_route")
        monkeypatch.setattr(network.socket, "getaddrinfo", resolve)
        network.choose_interface()
        return os.environ.get(network.INTERFACE)

    return choose


@pytest.mark.parametrize(
    "addresses",
    [[], ["127.0.1.1"], ["127.0.1.1", "10.77.0.2"], ["203.0.113.9"]],
    ids=["no address", "Debian", "loopback first", "an address of another host"],
)
def test_a_name_that_leads_to_the_loopback_makes_gloo_listen_towards_rank_0(chosen, caplog, addresses):
    assert chosen({"own name": addresses}, routes=[DOCKER, DEFAULT, OF_HOSTS]) == "eth0"
    assert f"this host's own name, {socket.gethostname()}, leads to 127.0." in caplog.text
    assert "gloo listens on eth0 instead" in caplog.text


@pytest.mark.parametrize(
    ("names", "routes", "expected"),
    [
        ({"10.77.0.1": ["fd77::1"]}, [OF_HOSTS, DEFAULT], "ib0"),
        ({"10.77.0.1": ["192.0.2.1"]}, [DOCKER, OF_HOSTS, DEFAULT], "eth1"),
        ({"10.77.0.1": ["127.0.1.1"]}, [DOCKER, OF_HOSTS, DEFAULT], "eth1"),
        ({"10.77.0.1": ["127.0.1.1"]}, [OF_HOSTS], "eth0"),
        ({"10.77.0.1": ["127.0.1.1"]}, [DOCKER, OF_HOSTS], None),
    ],
    ids=["IPv6", "default route", "rank 0 itself", "the only one", "unknown"],
)
def test_the_interface_is_that_of_the_route(chosen, caplog, names, routes, expected):
    assert chosen(names, routes=routes) == expected
    assert (f"set {network.INTERFACE} to the interface" in caplog.text) is (expected is None)


@pytest.mark.parametrize(
    "environment",
    [{"LOCAL_WORLD_SIZE": "2"}, {network.INTERFACE: "ib0"}, {"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.1"}],
    ids=["one host", "the user's choice", "localhost", "loopback"],
)
def test_gloo_is_left_alone_on_one_host_and_where_the_user_has_chosen(chosen, caplog, environment):
    assert chosen(**environment) == environment.get(network.INTERFACE)
    assert not caplog.text


def test_gloo_is_left_alone_where_its_own_choice_will_do(chosen, caplog, monkeypatch):
    monkeypatch.setattr(network, "_can_bind", lambda address: True)

    assert chosen({"own name": ["10.77.0.2", "127.0.1.1"]}) is None
    assert not caplog.text


def test_only_the_first_rank_of_a_host_says_so(chosen, caplog):
    assert chosen(LOCAL_RANK="1") == "eth0"
    assert not caplog.text

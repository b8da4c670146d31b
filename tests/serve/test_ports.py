"""Free and taken addresses."""

from __future__ import annotations

import socket

import pytest

from diffusion_backend.serve import PortError
from diffusion_backend.serve.ports import check_distinct, check_port, free_ports


def test_free_ports_are_different_and_free():
    ports = free_ports("127.0.0.1", 5)
    assert len(set(ports)) == 5
    for port in ports:
        check_port("127.0.0.1", port, "HTTP_PORT")


def test_free_ports_of_none_is_empty():
    assert free_ports("127.0.0.1", 0) == []


def test_taken_port_is_refused_and_another_suggested():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"Port {port} at 127\.0\.0\.1 is in use by process .*GRPC_PORT=\d+"):
            check_port("127.0.0.1", port, "GRPC_PORT")


@pytest.mark.parametrize("metrics_host", ["127.0.0.1", "0.0.0.0"])
def test_one_port_for_two_endpoints_is_refused_and_both_are_named(metrics_host):
    (port,) = free_ports("0.0.0.0", 1)
    complaint = rf"HTTP_PORT and METRICS_PORT are both {port}\. .*: METRICS_PORT=\d+$"
    with pytest.raises(PortError, match=complaint) as caught:
        check_distinct(port, ("127.0.0.1", "HTTP_PORT"), (metrics_host, "METRICS_PORT"))
    check_port(metrics_host, int(str(caught.value).rpartition("=")[2]), "METRICS_PORT")


def test_one_port_at_two_addresses_is_allowed():
    (port,) = free_ports("0.0.0.0", 1)
    check_distinct(port, ("127.0.0.1", "HTTP_PORT"), ("127.0.0.2", "METRICS_PORT"))


def test_port_of_closed_connections_can_be_used_again():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # closed here first, so that this end lingers
    check_port("127.0.0.1", port, "HTTP_PORT")


@pytest.mark.parametrize(
    ("host", "complaint"),
    [("192.0.2.1", "is not an address of this machine"), ("no.such.host.invalid", "is not a known name")],
)
def test_wrong_host_is_refused(host, complaint):
    with pytest.raises(PortError, match=rf"HOST '{host}' {complaint}.* Try HOST=127\.0\.0\.1"):
        check_port(host, 8000, "HTTP_PORT")
    with pytest.raises(PortError, match=rf"METRICS_ADDRESS '{host}' {complaint}.* Try METRICS_ADDRESS=127\.0\.0\.1"):
        check_port(host, 8002, "METRICS_PORT", "METRICS_ADDRESS")

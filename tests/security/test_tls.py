"""gRPC over TLS, and mutual TLS: with certificates made here, through the real server, and through the unary twin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from diffusion_backend.serve import ArgumentError, GrpcTls, TritonServer
from tests.security.certificates import Authority, Pair
from tests.security.conftest import READY_S, ask
from tests.support.client import grpc_inputs, tensors


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    """The server's: for a name that is not the address that the twin calls."""
    return authority.issue("server", ["triton.example", "10.1.2.3"])


@pytest.fixture(scope="module")
def encrypted(light_repository: Path, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with TLS for gRPC."""
    tls = GrpcTls(pair.cert_file, pair.key_file)
    log = tmp_path_factory.mktemp("tls") / "log"
    with TritonServer(light_repository, grpc_tls=tls, log_file=log, log_verbose=1) as server:
        server.wait_ready(READY_S, strict=True)
        yield server
        assert server.is_running, server.describe_exit()
    secret = pair.key_file.read_text().splitlines()[1]
    assert secret not in log.read_text()


@pytest.fixture(scope="module")
def mutual(light_repository: Path, authority: Authority, pair: Pair) -> Iterator[TritonServer]:
    """A server that wants a certificate of its clients, too."""
    tls = GrpcTls(pair.cert_file, pair.key_file, authority.cert_file)
    with TritonServer(light_repository, grpc_tls=tls) as server:
        server.wait_ready(READY_S, strict=True)
        yield server
        assert server.is_running, server.describe_exit()


def prompt_through(url: str, *, roots: Path | None, client: Pair | None = None, name: str = "triton.example") -> bytes:
    """Send a prompt to the light model's twin; return what comes back."""
    options: dict[str, object] = {}
    if roots is not None:
        key, chain = (None, None) if client is None else (client.key_file, client.cert_file)
        options["creds"] = grpc.ssl_channel_credentials(
            roots.read_bytes(), *(None if file is None else file.read_bytes() for file in (key, chain))
        )
        options["channel_args"] = [("grpc.ssl_target_name_override", name)]
    with tritonclient.grpc.InferenceServerClient(url, **options) as caller:
        answer = caller.infer("light_unary", grpc_inputs(tensors(prompt="hello")), client_timeout=30)
    (echo,) = answer.as_numpy("encoded").tolist()
    return echo


def test_a_client_that_trusts_the_authority_gets_through(encrypted: TritonServer, authority: Authority) -> None:
    """Over gRPC from outside, and from the twin to its streaming model."""
    assert prompt_through(encrypted.url_grpc, roots=authority.cert_file) == b"hello"


def test_http_still_answers_through_the_twin(encrypted: TritonServer) -> None:
    """HTTP stays without TLS, which a proxy is for; the twin's own call is encrypted."""
    status, text = ask(encrypted.address_http, "POST", "/v2/models/light_unary/generate", {"prompt": "hello"})
    assert (status, "hello" in text) == (200, True), text


def test_a_client_without_tls_is_refused(encrypted: TritonServer) -> None:
    with pytest.raises(InferenceServerException) as caught:
        prompt_through(encrypted.url_grpc, roots=None)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_a_client_is_not_fooled_by_another_authority_or_name(
    encrypted: TritonServer, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    for roots, name in ((other.cert_file, "triton.example"), (authority.cert_file, "evil.example")):
        with pytest.raises(InferenceServerException) as caught:
            prompt_through(encrypted.url_grpc, roots=roots, name=name)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_mutual_tls_lets_known_clients_in_only(mutual: TritonServer, authority: Authority, tmp_path: Path) -> None:
    """Without a certificate, or with one of another authority, no call gets through; the twin's own does."""
    known = authority.issue("client", [])
    assert prompt_through(mutual.url_grpc, roots=authority.cert_file, client=known) == b"hello"
    stranger = Authority(tmp_path, "stranger").issue("stranger", [])
    for client in (None, stranger):
        with pytest.raises(InferenceServerException) as caught:
            prompt_through(mutual.url_grpc, roots=authority.cert_file, client=client)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_options_that_cannot_work_are_refused_at_once(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    """The server itself would start, and fail its first client."""
    assert GrpcTls.from_options(None, None, None) is None
    other = authority.issue("other", ["triton.example"])
    late = authority.issue("late", ["triton.example"], days=-1)
    unnamed = authority.issue("", [])
    nameless = tmp_path / "empty"
    nameless.write_text("nothing")
    cases = [
        ((pair.cert_file, None, None), "needs both --grpc-tls-cert and --grpc-tls-key"),
        ((None, pair.key_file, None), "needs both --grpc-tls-cert and --grpc-tls-key"),
        ((None, None, authority.cert_file), "needs both --grpc-tls-cert and --grpc-tls-key"),
        ((pair.cert_file, tmp_path / "none", None), "--grpc-tls-key .* cannot be read: No such file"),
        ((tmp_path, pair.key_file, None), "--grpc-tls-cert .* cannot be read"),
        ((nameless, pair.key_file, None), "--grpc-tls-cert .* holds no certificate in PEM format"),
        ((pair.cert_file, nameless, None), "is no unencrypted private key in PEM format"),
        ((pair.cert_file, other.key_file, None), "does not belong to the first certificate"),
        ((late.cert_file, late.key_file, None), "expired on .* Renew it"),
        ((unnamed.cert_file, unnamed.key_file, None), "names no host"),
        ((pair.cert_file, pair.key_file, nameless), "--grpc-tls-ca .* holds no certificate"),
    ]
    for files, words in cases:
        with pytest.raises(ArgumentError, match=words):
            GrpcTls.from_options(*files)


@pytest.mark.parametrize(
    ("alternatives", "name"),
    [
        (["a.example", "10.0.0.1"], "a.example"),
        (["10.0.0.1"], "10.0.0.1"),
        ([], "cn"),
        (["*.b.example"], "twin.b.example"),
    ],
)
def test_the_twin_calls_by_a_name_of_the_certificate(authority: Authority, alternatives: list[str], name: str) -> None:
    pair = authority.issue("cn", alternatives)
    assert GrpcTls(pair.cert_file, pair.key_file).environment()["DIFFUSION_GRPC_TLS_NAME"] == name

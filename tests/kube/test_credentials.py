"""Credentials that expire, are refused, change in their files, or can't be had: read by the official client, from
kubeconfigs with exec plugins as clouds have them, against servers that check what they are shown."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tapforge_operator.kube import credentials as module
from tapforge_operator.kube.client import ApiError, Client, NotSent
from tapforge_operator.kube.credentials import Access, Credentials, NoCluster, expiry_of, read, renewal_due

API = "client.authentication.k8s.io/v1"
SOMEWHERE = "http://127.0.0.1:1"


def access(token: str, expires: float | None = None, server: str = SOMEWHERE) -> Access:
    made = Access.of(kopf.ConnectionInfo(server=server, token=token))
    return Access(made.info, made.headers, made.ssl, expires=expires)


class Source:
    """Gives tokens "1", "2" and so on, as often as it is let; times are its own."""

    def __init__(self, life: float | None = None) -> None:
        self.now, self.life, self.reads = 1000.0, life, 0
        self.answer = asyncio.Event()
        self.answer.set()
        self.error = ""
        self.kind: type[Exception] = NoCluster
        self.server = SOMEWHERE
        #: others each time
        self.fresh = True

    async def read(self) -> Access:
        self.reads += 1
        await self.answer.wait()
        if self.error:
            raise self.kind(self.error)
        expires = None if self.life is None else self.now + self.life
        return access(str(self.reads) if self.fresh else "same", expires, self.server)

    async def credentials(self) -> Credentials:
        return Credentials(await self.read(), self.read, lambda: self.now)


def token(held: Access) -> str | None:
    return held.info.token


@pytest.mark.parametrize(
    ("life", "before"), [(None, None), (10.0, 2.0), (300.0, 60.0), (900.0, 120.0), (86400.0, 120.0), (-5.0, 0.0)]
)
def test_a_fifth_of_a_short_life_is_for_the_renewal(life: float | None, before: float | None) -> None:
    due = renewal_due(1000.0, None if life is None else 1000.0 + life)
    assert due == (None if life is None or before is None else 1000.0 + life - before)


def test_a_jwt_says_when_it_ends() -> None:
    body = base64.urlsafe_b64encode(json.dumps({"exp": 1_800_000_000}).encode()).rstrip(b"=").decode()
    assert expiry_of(f"e30.{body}.sig") == 1_800_000_000
    assert [expiry_of(other) for other in ("", "opaque", "a.b.c", "a.e30.c", "k8s-aws-v1.aGk")] == [None] * 5


async def test_they_are_renewed_before_they_expire_and_nobody_waits_for_that() -> None:
    source = Source(life=100.0)
    held = await source.credentials()
    source.now += 79
    assert token(await held.current()) == "1" and source.reads == 1
    source.answer.clear()
    source.now += 2
    assert [token(await held.current()) for _ in range(50)] == ["1"] * 50
    await asyncio.sleep(0)
    assert source.reads == 2
    source.answer.set()
    await asyncio.sleep(0.01)
    assert token(await held.current()) == "2"


async def test_with_expired_ones_requests_wait_for_the_one_read() -> None:
    source = Source(life=100.0)
    held = await source.credentials()
    source.now += 101
    source.answer.clear()
    waiting = [asyncio.create_task(held.current()) for _ in range(50)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    source.answer.set()
    assert {token(one) for one in await asyncio.gather(*waiting)} == {"2"} and source.reads == 2


async def test_while_a_read_takes_long_requests_go_on_with_what_the_server_may_still_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader whose plugin needs longer than its Lease lasts has no reason to resign: the server decides."""
    monkeypatch.setattr(module, "_OVERDUE_SECONDS", 0.05)
    source = Source(life=100.0)
    held = await source.credentials()
    source.now += 101
    source.answer.clear()
    old = await held.current()
    assert token(old) == "1" and source.reads == 2
    refused = asyncio.create_task(held.renewed(old))  # the server takes it no longer
    await asyncio.sleep(0.01)
    assert not refused.done()
    source.answer.set()
    assert await refused and token(await held.current()) == "2" and source.reads == 2


async def test_a_read_that_fails_past_the_end_is_told_to_who_asks() -> None:
    source = Source(life=100.0)
    held = await source.credentials()
    source.now += 101
    source.error = "the plugin says no"
    with pytest.raises(NoCluster, match="the plugin says no"):
        await held.current()


@pytest.mark.parametrize("kind", [NoCluster, RuntimeError])
async def test_a_read_that_fails_is_repeated_after_growing_pauses(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(life=100.0)
    held = await source.credentials()
    source.kind = kind
    source.error = "the exec plugin 'aws': no network"
    times = []
    while source.now < 1099:
        source.now += 0.5
        before = source.reads
        assert token(await held.current()) == "1", "they are good yet"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        times += [source.now] * (source.reads - before)
    pauses = [round(b - a) for a, b in itertools.pairwise(times)]
    assert pauses == [1, 2, 4, 8][: len(pauses)] and len(pauses) >= 3
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    source.now = 1101
    with pytest.raises(NoCluster, match="aws.*no network"):
        await held.current()
    source.error, source.now = "", 1200.0
    assert token(await held.current()) == str(source.reads)


async def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a")
    reads = 0

    async def reader() -> Access:
        nonlocal reads
        reads += 1
        made = access(file.read_text())
        return Access(made.info, made.headers, made.ssl, files={str(file): module.signature(str(file))})

    now = 1000.0
    held = Credentials(await reader(), reader, lambda: now)
    for _ in range(5):
        now += 61
        await held.current()
        await asyncio.sleep(0.01)
    assert reads == 1
    other = tmp_path / "next"
    other.write_text("b")
    other.rename(file)  # as the kubelet does with a projected token
    now += 30
    await held.current()
    now += 31
    await held.current()
    await asyncio.sleep(0.01)
    assert token(await held.current()) == "b" and reads == 2


# --- 401 --------------------------------------------------------------------------------------------------------------


class Server:
    """Knows one token at a time."""

    def __init__(self) -> None:
        self.good, self.refused, self.served = "1", 0, 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.good}":
            self.refused += 1
            return web.json_response({"kind": "Status", "reason": "Unauthorized"}, status=401)
        self.served += 1
        return web.json_response({"metadata": {"name": "a"}})


@asynccontextmanager
async def serving(answer: Any, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_401_renews_once_and_every_call_goes_through() -> None:
    server, source = Server(), Source()
    async with serving(server.answer) as source.server:
        held = await source.credentials()
        async with Client(held) as client, Client(held) as other:
            await client.get("/a")
            server.good = "2"
            await asyncio.gather(*(one.create("/a", {}) for one in (client, other) for _ in range(40)))
    assert source.reads == 2 and server.served == 81


async def test_a_401_that_stays_is_reported_and_reads_no_more_often_than_once_in_ten_seconds() -> None:
    server, source = Server(), Source()
    source.fresh = False
    async with serving(server.answer) as source.server:
        held = await source.credentials()
        async with Client(held) as client:
            for _ in range(3):
                errors = await asyncio.gather(*(client.get("/a") for _ in range(20)), return_exceptions=True)
                assert {error.status for error in errors if isinstance(error, ApiError)} == {401}
            assert source.reads == 2, "once at the beginning, once for all the refusals"
            source.now += 11
            with pytest.raises(ApiError):
                await client.get("/a")
            assert source.reads == 3


async def test_without_credentials_nothing_is_sent_and_the_error_says_why() -> None:
    source = Source(life=100.0)
    held = await source.credentials()
    source.now, source.error = 1101.0, "the exec plugin 'aws' of user 'me': no network"
    async with Client(held, deadline=0.5) as client:
        with pytest.raises(NotSent, match="the exec plugin 'aws' of user 'me': no network"):
            await client.create("/a", {})


# --- the official client's reading ------------------------------------------------------------------------------------


class Kubeconfig:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "config"
        self.plugin = folder / "plugin"
        self.cluster: dict[str, Any] = {"server": "https://127.0.0.1:1"}

    def write(self, **user: Any) -> None:
        context = {"name": "c", "context": {"cluster": "k", "user": "me"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [context]}
        config |= {"clusters": [{"name": "k", "cluster": self.cluster}], "users": [{"name": "me", "user": user}]}
        self.path.write_text(yaml.safe_dump(config))

    def exec(self, script: str) -> None:
        self.plugin.write_text(f"#!/bin/sh\n{script}\n")
        self.plugin.chmod(0o755)
        self.write(exec={"apiVersion": API, "command": str(self.plugin), "args": ["get"], "interactiveMode": "Never"})


def credential(**status: Any) -> str:
    return json.dumps({"apiVersion": API, "kind": "ExecCredential", "status": status})


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubeconfig:
    made = Kubeconfig(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(made.path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return made


async def test_a_plugins_token_and_its_end(kubeconfig: Kubeconfig) -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    said = credential(token="t0ken", expirationTimestamp="2030-01-01T00:00:00Z")
    kubeconfig.exec(f"[ $1 = get ] && [ -n \"$KUBERNETES_EXEC_INFO\" ] && echo '{said}'")
    got = await read()
    assert got.headers == {"Authorization": "Bearer t0ken"} and got.info.server == "https://127.0.0.1:1"
    assert got.expires == end.timestamp() and got.info.expiration == end
    assert list(got.files) == [str(kubeconfig.path)]


async def test_a_token_file_beside_the_kubeconfig_and_the_name_to_check(kubeconfig: Kubeconfig) -> None:
    kubeconfig.cluster |= {"tls-server-name": "kubernetes.default", "proxy-url": "http://proxy:1"}
    (kubeconfig.path.parent / "token").write_text("in-a-file")
    kubeconfig.write(tokenFile="token")
    got = await read()
    assert got.info.token == "in-a-file" and got.server_name == "kubernetes.default"
    assert got.info.proxy_url == "http://proxy:1"
    assert str(kubeconfig.path.parent / "token") in got.files


async def test_a_user_with_a_password(kubeconfig: Kubeconfig) -> None:
    kubeconfig.write(username="me", password="secret")
    got = await read()
    assert got.headers["Authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Unable to locate credentials' >&2; exit 255", "returned 255. Unable to locate credentials"),
        ("echo hello", "failed to decode"),
        (f"echo '{credential()}'", "missing token"),
    ],
)
async def test_an_error_names_the_plugin_and_what_it_said(kubeconfig: Kubeconfig, script: str, words: str) -> None:
    kubeconfig.exec(script)
    with pytest.raises(NoCluster) as caught:
        await read()
    assert f"the exec plugin {str(kubeconfig.plugin)!r} of user 'me'" in str(caught.value)
    assert words in str(caught.value)


async def test_a_plugin_that_is_not_installed_and_a_kubeconfig_that_is_not_there(kubeconfig: Kubeconfig) -> None:
    kubeconfig.write(exec={"apiVersion": API, "command": "no-such-plugin"})
    with pytest.raises(NoCluster, match="'no-such-plugin'.*No such file"):
        await read()
    kubeconfig.path.unlink()
    with pytest.raises(NoCluster, match="set KUBECONFIG"):
        await read()


@pytest.mark.parametrize("line", ["a word to standard output", "{}", "[]", "\udcff", "x" * 200_000])
async def test_a_library_that_prints_to_standard_output(
    kubeconfig: Kubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Python imports a `sitecustomize` before anything else."""
    kubeconfig.write(token="secret")
    (tmp_path / "sitecustomize.py").write_text(f"import os\nos.write(1, {os.fsencode(line)!r} + bytes([10]))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NoCluster) as caught:
        await read()
    assert "secret" not in str(caught.value)


async def test_a_machine_that_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(NoCluster, match="no process can be started.*No such file"):
        await read()


async def test_a_plugin_that_hangs_is_ended_with_all_that_it_started(kubeconfig: Kubeconfig, tmp_path: Path) -> None:
    kubeconfig.exec(f"sleep 1000 & echo $! > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; wait")
    reading = asyncio.create_task(read(10.0))
    while not (tmp_path / "pid").exists():
        assert not reading.done()
        await asyncio.sleep(0.02)
    with pytest.raises(NoCluster, match="the exec plugin .* no answer within 10 s"):
        await reading
    pid = int((tmp_path / "pid").read_text())
    async with asyncio.timeout(30):
        while _lives(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# --- client certificates ----------------------------------------------------------------------------------------------


class Authority:
    """Makes certificates: of servers for 127.0.0.1, of clients by name; whole as Python 3.13 wants them."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        made = made.add_extension(usage, critical=True)
        self.pem = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    def issue(self, name: str, address: str = "") -> tuple[str, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
        if address:
            names = x509.SubjectAlternativeName([x509.DNSName(address)])
            builder = builder.add_extension(names, critical=False)
        pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return pem, key.private_bytes(*form).decode()

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


async def test_a_plugins_next_client_certificate_is_shown_to_the_server(
    kubeconfig: Kubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OVERDUE_SECONDS", 60.0)  # however long the processes take on a busy machine
    authority = Authority()
    certificate, key = authority.issue("server", "kubernetes.default")
    (tmp_path / "server.pem").write_text(certificate + key)
    (tmp_path / "ca.pem").write_text("# the authority\n" + authority.pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "server.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    async def who(request: web.Request) -> web.Response:
        assert request.transport is not None
        shown = dict(pair for (pair,) in request.transport.get_extra_info("peercert")["subject"])
        return web.json_response({"who": shown["commonName"]})

    def sign_in(name: str, seconds: float) -> None:
        certificate, key = authority.issue(name)
        end = datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        said = credential(clientCertificateData=certificate, clientKeyData=key, expirationTimestamp=end)
        (tmp_path / "said").write_text(said)
        kubeconfig.exec(f"cat {tmp_path}/said")

    async with serving(who, context) as url:
        kubeconfig.cluster = {"server": url, "certificate-authority": "ca.pem", "tls-server-name": "kubernetes.default"}
        sign_in("first", 3600)
        now = time.time()
        held = Credentials(await read(), read, lambda: now)
        async with Client(held) as client:
            assert (await client.get("/a"))["who"] == "first"
            sign_in("second", 7200)
            now += 3601
            assert (await client.get("/a"))["who"] == "second"


def test_the_process_that_reads_does_without_kopf() -> None:
    """Which would take it twice the time: it starts with every renewal."""
    code = "import sys, tapforge_operator.kube.credentials; sys.exit('kopf' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_service_account_comes_before_a_kubeconfig_and_says_when_its_token_ends(tmp_path: Path) -> None:
    """In a process as it is in a Pod, but for the folder that the kubelet mounts."""
    body = base64.urlsafe_b64encode(json.dumps({"exp": 1_800_000_000}).encode()).rstrip(b"=").decode()
    (tmp_path / "token").write_text(f"e30.{body}.sig")
    (tmp_path / "ca.crt").write_text(Authority().pem)
    code = f"""
import kubernetes.config.incluster_config as config
config.SERVICE_TOKEN_FILENAME, config.SERVICE_CERT_FILENAME = "{tmp_path}/token", "{tmp_path}/ca.crt"
from tapforge_operator.kube import credentials
credentials._main()
"""
    pod = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443", "KUBECONFIG": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | pod, check=True, timeout=60, capture_output=True, text=True
    )
    source, said = done.stdout.splitlines()
    got = module._access(json.loads(said))
    assert source == "the service account" and got.info.server == "https://[fd00::1]:443"
    assert got.info.token == f"e30.{body}.sig" and got.expires == 1_800_000_000
    assert set(got.files) == {f"{tmp_path}/token", f"{tmp_path}/ca.crt"} and got.info.ca_data

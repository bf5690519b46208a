"""Address and credentials for the API server: a cluster's or a kubeconfig's, read by the official client and renewed.

Promises:
1. Credentials that expire are renewed before they do, where their end is known: an exec plugin's `expirationTimestamp`,
   a JWT's `exp`. They are read again when a file that they came from has changed, which is looked at once a minute, and
   when the API server refuses them.
2. One read at a time, however many requests wait for it. Credentials that were refused are read again at most once in
   `_REFUSED_SECONDS`; a read that failed is repeated after a pause that doubles.
3. Reading does not block the event loop: kubeconfigs, exec plugins and refreshes of OIDC tokens are left to a process
   of its own, which ends, with everything that it started, at the latest after `_READ_SECONDS`.
4. While credentials are still good, requests go on with them; a read that fails then is a warning. Past their end, a
   request waits for the read, `_OVERDUE_SECONDS` at most: servers take tokens for a while longer than these say, and a
   plugin on a busy machine may need longer than a leader can go without a renewal. While a read is under way, the API
   server decides whether they are still good, and a request that it refuses waits for the read to its own deadline.
   Once a read has failed past their end, nothing goes out until the next one.
5. An error says which credentials these are, what the plugin or the client said, and what can be done.

The service account comes before a kubeconfig. Interactive plugins can't ask a person. Times are seconds of the epoch.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    import kopf

log = logging.getLogger(__name__)

#: a cloud's plugin asks a server or two
_READ_SECONDS: Final = 30.0
#: a small part of what a Lease allows its holder (kube/leaderelection.py)
_OVERDUE_SECONDS: Final = 2.0
_FILES_SECONDS: Final = 60.0
_REFUSED_SECONDS: Final = 10.0
_LONGEST_PAUSE: Final = 60.0
#: before the end of what lives long; a fifth of a short life
_MARGIN_SECONDS: Final = 120.0
_MARGIN_SHARE: Final = 0.2


class NoCluster(Exception):
    """There is no cluster to connect to, or no identity to connect with."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a request needs. The same object until the credentials are others."""

    info: kopf.ConnectionInfo
    headers: Mapping[str, str]
    ssl: ssl.SSLContext
    #: name that the API server's certificate is checked for; None: that of its address
    server_name: str | None = None
    expires: float | None = None
    #: the files that all this came from, with what shows that they have changed
    files: Mapping[str, list[int] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, info: kopf.ConnectionInfo) -> Self:
        return cls(info, info.as_http_headers(), info.as_ssl_context())

    def same(self, other: Access) -> bool:
        """Nothing would go out differently."""
        return (self.info, self.server_name) == (other.info, other.server_name)


#: reads everything anew. Raises NoCluster
Reader = Callable[[], Awaitable[Access]]


def renewal_due(read_at: float, expires: float | None) -> float | None:
    """When what was read then should be renewed."""
    if expires is None:
        return None
    return expires - min(_MARGIN_SECONDS, _MARGIN_SHARE * max(0.0, expires - read_at))


class Credentials:
    """One for all clients of the process."""

    def __init__(self, access: Access, reader: Reader | None = None, clock: Callable[[], float] = time.time):
        """Without a `reader` they stay as they are."""
        self._access = access
        self._reader = reader
        self._clock = clock
        now = clock()
        self._due = renewal_due(now, access.expires)
        self._files_checked = now
        self._retry_at = self._refused_until = 0.0
        self._failures = 0
        #: why the last read failed; "" when it didn't
        self._trouble = ""
        self._renewal: asyncio.Task[None] | None = None

    @classmethod
    async def load(cls) -> Self:
        """The cluster that this process runs in, else the kubeconfig's current context. Raises NoCluster."""
        return cls(await read(), read)

    @property
    def server(self) -> str:
        return self._access.info.server.rstrip("/")

    async def current(self) -> Access:
        """Valid ones as far as is known; past their end the last ones, while a read of new ones takes long. Raises
        NoCluster when the last ones have expired and no others can be had."""
        now = self._clock()
        if self._reader is None or not self._outdated(now):
            return self._access
        expired = self._access.expires is not None and now >= self._access.expires
        if self._renewal is None and now >= self._retry_at:
            self._begin()
        if expired:
            await self._ended(_OVERDUE_SECONDS)
            still = self._access.expires is not None and self._clock() >= self._access.expires
            if still and self._renewal is None:
                raise NoCluster(self._trouble or "the credentials that were read have expired already")
        return self._access

    async def renewed(self, refused: Access) -> bool:
        """Whether there are others than those that the API server has just refused."""
        if refused is self._access and self._reader is not None:
            now = self._clock()
            if self._renewal is None and now >= max(self._refused_until, self._retry_at):
                self._refused_until = now + _REFUSED_SECONDS
                log.info("the API server refuses the credentials (401): they are read again")
                self._begin()
            await self._ended()
        return refused is not self._access

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait({self._renewal})

    def _outdated(self, now: float) -> bool:
        if self._due is not None and now >= self._due:
            return True
        if now < self._files_checked + _FILES_SECONDS:
            return False
        if any(signature(path) != then for path, then in self._access.files.items()):
            return True
        self._files_checked = now
        return False

    def _begin(self) -> None:
        assert self._reader is not None
        self._renewal = asyncio.create_task(self._renew(self._reader), name="reading credentials")

    async def _ended(self, seconds: float | None = None) -> None:
        """Of the read that is under way, should there be one; no longer than `seconds`."""
        if self._renewal is not None:
            # What waits may be cancelled by its own deadline; the read is shared.
            await asyncio.wait({self._renewal}, timeout=seconds)

    async def _renew(self, reader: Reader) -> None:
        began = self._clock()
        try:
            access = await reader()
        except Exception as error:  # of any kind: without a pause every request would begin the next read
            self._failures += 1
            pause = min(_LONGEST_PAUSE, 2.0 ** (self._failures - 1))
            known = isinstance(error, NoCluster)
            self._trouble = str(error) if known else f"reading the credentials broke: {error!r}"
            self._retry_at = self._clock() + pause
            what = "credentials can't be renewed, the next attempt is in %.0f s: %s"
            log.warning(what, pause, self._trouble, exc_info=None if known else error)
        else:
            self._failures, self._trouble = 0, ""
            self._files_checked = self._clock()
            self._due = renewal_due(began, access.expires)
            # Credentials that are no newer than before must not be read with every request.
            self._retry_at = began + 1.0
            if access.same(self._access):
                # The object stays: it is what shows that nothing has changed.
                files = dict(access.files)
                self._access = self._access if files == self._access.files else replace(self._access, files=files)
                if self._due is not None and self._clock() >= self._due:
                    self._retry_at = self._clock() + _REFUSED_SECONDS
            else:
                self._access = access
        finally:
            self._renewal = None


def signature(path: str) -> list[int] | None:
    """Of a file's content: another one when the file was written or replaced; None for none."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return [stat.st_mtime_ns, stat.st_ino, stat.st_size]


# --- the process that reads -------------------------------------------------------------------------------------------


async def read(seconds: float = _READ_SECONDS) -> Access:
    """Raises NoCluster."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tapforge_operator.kube.credentials"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that it can be ended with all that it started
        )
    except OSError as error:
        raise NoCluster(f"no process can be started to read the credentials: {error}") from error
    lines: list[bytes] = []
    try:
        async with asyncio.timeout(seconds):
            out, err = await _output(process, lines)
    except TimeoutError as error:
        what = f"{_source(lines)}: no answer within {seconds:g} s"
        raise NoCluster(f"{what}; run it by hand: one that wants to be answered can't be used here") from error
    except ValueError as error:  # a line that is longer than a stream takes
        raise NoCluster(f"{_source(lines)}: {error}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)
        await process.wait()
    if process.returncode != 0 or not out:
        said = err.decode("utf-8", "replace").strip()[-2000:] or f"exit status {process.returncode}"
        raise NoCluster(f"{_source(lines)}: {said}")
    try:
        return _access(json.loads(out))
    except (ValueError, TypeError, KeyError) as error:
        # What it is isn't said: there may be a token in it.
        what = f"the process that reads them printed something else ({type(error).__name__}: {error})"
        raise NoCluster(f"{_source(lines)}: {what}; does a library print to standard output?") from error


def _source(lines: list[bytes]) -> str:
    return lines[0].decode("utf-8", "replace").strip() if lines else "the credentials"


async def _output(process: asyncio.subprocess.Process, lines: list[bytes]) -> tuple[bytes, bytes]:
    """The line after the first one, which is kept in `lines` as soon as it is there, and what it said of errors."""
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        lines.append(await process.stdout.readline())
        out = await process.stdout.read()
        err = await errors
        await process.wait()
        return out, err
    finally:
        errors.cancel()


def _access(said: Mapping[str, Any]) -> Access:
    import kopf  # which the process that reads can do without

    scheme, _, token = said["authorization"].partition(" ")
    expires = said["expires"]
    try:
        info = kopf.ConnectionInfo(
            server=said["server"],
            ca_data=said["ca"] or None,
            insecure=not said["verify"],
            scheme=scheme or None,
            token=token or None,
            certificate_data=said["certificate"] or None,
            private_key_data=said["key"] or None,
            proxy_url=said["proxy"] or None,
            expiration=None if expires is None else datetime.fromtimestamp(expires, UTC),
        )
        access = Access.of(info)
    except (ValueError, OSError) as error:
        raise NoCluster(f"{said['source']}: no certificates that can be used: {error}") from error
    return replace(access, server_name=said["server_name"] or None, expires=expires, files=said["files"])


def expiry_of(token: str) -> float | None:
    """When a JWT ends; None for a token that says nothing of it."""
    parts = token.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (IndexError, ValueError, KeyError, TypeError):
        return None


def _main() -> None:
    """Says on standard output where the credentials come from, then what they are; on standard error what is wrong.
    What the client raises is one line there."""
    client: Any = import_module("kubernetes.client")
    incluster: Any = import_module("kubernetes.config.incluster_config")
    kube_config: Any = import_module("kubernetes.config.kube_config")
    # The client logs what is wrong with a plugin, and goes on without credentials.
    complaints: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    configuration = client.Configuration()
    extra: dict[str, Any] = {"expires": None, "server_name": "", "proxy": ""}
    token, ca = incluster.SERVICE_TOKEN_FILENAME, incluster.SERVICE_CERT_FILENAME
    if os.environ.get(incluster.SERVICE_HOST_ENV_NAME) and Path(token).exists():
        source = "the service account"
        print(source, flush=True)
        extra["files"] = {path: signature(path) for path in (token, ca)}
        incluster.load_incluster_config(client_configuration=configuration)
    else:
        source = _load_kubeconfig(kube_config, configuration, extra)
    if complaints:
        sys.exit("; ".join(complaints))
    authorization = (configuration.api_key.get("BearerToken") or "").strip()
    if extra["expires"] is None:
        extra["expires"] = expiry_of(authorization.partition(" ")[2])
    said = {
        "source": source,
        "server": configuration.host,
        "authorization": authorization,
        "verify": configuration.verify_ssl,
        "ca": _pem(configuration.ssl_ca_cert),
        "certificate": _pem(configuration.cert_file),
        "key": _pem(configuration.key_file),
    }
    print(json.dumps(said | extra))


def _load_kubeconfig(kube_config: Any, configuration: Any, extra: dict[str, Any]) -> str:
    """Returns where the credentials come from."""
    paths = kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    merger = kube_config.KubeConfigMerger(paths)
    if merger.config is None:
        sys.exit(f"no service account is mounted and there is no kubeconfig at {paths}: set KUBECONFIG")

    def persist() -> None:
        """OIDC: the new refresh token, where the old one may not be used again."""
        with suppress(OSError):  # where the file can't be written, the old one has to do
            merger.save_changes()

    loader = kube_config.KubeConfigLoader(merger.config, config_base_path=None, config_persister=persist)
    name = loader.current_context["context"].get("user")
    user = merger.config["users"].get_with_name(name, safe=True) if name else None
    entry = dict(user.value["user"] or {}) if user is not None else {}
    where = f"user {name!r} of the kubeconfig {paths}"
    plugin = (entry.get("exec") or {}).get("command")
    provider = (entry.get("auth-provider") or {}).get("name")
    source = f"the exec plugin {plugin!r} of {where}" if plugin else f"{provider} of {where}" if provider else where
    print(source, flush=True)
    files = [*merger.paths]
    cluster = merger.config["clusters"].get_with_name(loader.current_context["context"]["cluster"])
    keys = ("tokenFile", "client-certificate", "client-key", "certificate-authority")
    for node, kind in ((user, "user"), (cluster, "cluster")):
        if node is not None:
            fields, folder = node.value.get(kind) or {}, Path(node.path).absolute().parent
            files += [str(folder / fields[key]) for key in keys if fields.get(key)]
    extra["files"] = {path: signature(path) for path in files}
    loader.load_and_set(configuration)
    if expiry := getattr(loader, "expiry", None):
        extra["expires"] = expiry.timestamp()
    extra["server_name"] = getattr(loader, "tls_server_name", "")
    extra["proxy"] = getattr(loader, "proxy", "")
    if not hasattr(loader, "host"):
        sys.exit(f"{where}: the cluster of the current context has no server")
    return source


def _pem(path: str | None) -> str:
    if not path:
        return ""
    text = Path(path).read_text()
    return text[max(0, text.find("-----BEGIN ")) :]


if __name__ == "__main__":
    sys.excepthook = lambda kind, error, _: print(f"{kind.__name__}: {error}", file=sys.stderr)
    _main()

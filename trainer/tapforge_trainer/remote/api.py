"""Requests to an API server, with what the official Kubernetes client knows about kubeconfigs and credentials.

1. Credentials are the client's: exec plugins, OIDC, certificates, tokens, a Pod's service account. A token that says
   when it expires is renewed before. What is refused as Unauthorized is sent once more, with credentials that are read
   again.
2. Every request has a deadline. One that changes nothing is tried again for `_TRIES` times where the connection breaks
   or the server is busy; one that changes something is sent once.
3. A refusal is a `ClusterError` with what was asked, what was answered, and what to do.
"""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from tapforge_api.installing import install_extra

Json = dict[str, Any]

#: for a request, seconds
SECONDS: Final = 30.0
_CONNECT: Final = 10.0
#: of a request that changes nothing; pauses between them, seconds
_TRIES: Final = 4
_PAUSE: Final = 1.0
#: names that are listed at most in an error
_NAMES: Final = 8
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_BUSY: Final = (429, 500, 502, 503, 504)
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
#: the writer's name
FIELD_MANAGER: Final = "tapforge"


class ClusterError(Exception):
    """What was asked of a cluster can't be done. `code`: of HTTP; 0: there was no answer. `causes`: what the API server
    says of each field."""

    def __init__(self, message: str, code: int = 0, causes: Sequence[str] = ()):
        super().__init__(message)
        self.code = code
        self.causes = tuple(causes)


class Refused(ClusterError):
    """What was asked for can't be had until it is named otherwise: the caller's to change."""


class NotReached(ClusterError):
    """There was no answer, or one that says: not now."""


class Connection:
    """An API server, as a context of a kubeconfig names it; without a kubeconfig in a Pod the Pod's own."""

    def __init__(self, context: str | None = None, namespace: str | None = None):
        self._context = context
        self._client: Any = None
        self.where = ""
        found = self._load()
        self.namespace = namespace or found or "default"

    # --- credentials --------------------------------------------------------------------------------------------------

    def _load(self) -> str:
        """Reads the credentials; returns the namespace that goes with them."""
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError as error:
            raise ClusterError(
                f"the Kubernetes client is not installed ({error}): {install_extra('cluster')}"
            ) from error
        try:
            if self._context is None and "KUBERNETES_SERVICE_HOST" in os.environ and not _kubeconfig():
                configuration = client.Configuration()
                config.load_incluster_config(client_configuration=configuration)
                self._client, self.where = client.ApiClient(configuration), "the cluster of this Pod"
                return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else ""
            if not _kubeconfig():
                raise Refused(
                    f"there is no kubeconfig at {_places()}: get one from the "
                    "cluster's administrator, or name it by KUBECONFIG"
                )
            known, current = _contexts()
            name = self._context or current
            if not name:
                raise Refused(f"the kubeconfig has no current-context: name one (--context). {nearest('', known)}")
            if name not in known:
                raise Refused(f"the kubeconfig has no context {name}; {nearest(name, known)}")
            self._client = config.new_client_from_config(_places(), context=name)
            self.where = f"the cluster of context {name}"
            return known[name]
        # The client takes it for granted that what it looks for in the files has the right type.
        except (ConfigException, AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(f"the kubeconfig can't be used: {error}") from error

    @property
    def configuration(self) -> Any:
        return self._client.configuration

    def _headers(self) -> dict[str, str]:
        """Renews a token that is about to expire."""
        found = self.configuration.auth_settings().values()
        return {one["key"]: one["value"] for one in found if one["in"] == "header" and one["value"]}

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
        seconds: float = SECONDS,
    ) -> Json:
        """The answer to one request, as JSON. Raises ClusterError."""
        response = self._send(method, path, body, query or {}, kind, seconds, True)
        return json.loads(response.data) if response.data else {}

    def get(self, path: str, **query: str) -> Json:
        return self.request("GET", path, query=query)

    @contextmanager
    def lines(self, path: str, query: Mapping[str, str], seconds: float) -> Iterator[Iterator[bytes]]:
        """The lines of a text, as they come; silence of `seconds` ends them with NotReached."""
        response = self._send("GET", path, None, query, "application/json", seconds, False)

        def read() -> Iterator[bytes]:
            from urllib3.exceptions import HTTPError

            left = b""
            try:
                for part in response.stream(65536):
                    *whole, left = (left + part).split(b"\n")
                    yield from whole
            except (HTTPError, OSError) as error:
                raise NotReached(f"{self.where} ended the answer to GET {path}: {error}") from error
            if left:
                yield left

        try:
            yield read()
        finally:
            response.close()

    def _send(
        self, method: str, path: str, body: Any, query: Mapping[str, str], kind: str, seconds: float, whole: bool
    ) -> Any:
        import urllib3

        url = f"{self.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        text = None if body is None else json.dumps(body).encode()
        renewed = False
        for tries_left in reversed(range(_TRIES if method == "GET" else 1)):
            try:
                response = self._once(method, url, text, kind, seconds, whole)
                if response.status == _UNAUTHORIZED and not renewed:
                    renewed = True
                    self._load()
                    response = self._once(method, url, text, kind, seconds, whole)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                if tries_left:
                    time.sleep(_PAUSE)
                    continue
                raise NotReached(
                    f"{self.where} doesn't answer at {self.configuration.host}: {_why(error)}; is the network or VPN "
                    "up, and the context the right one?"
                ) from error
            if response.status in _BUSY and tries_left:
                time.sleep(_PAUSE)
                continue
            if response.status >= 300:
                raise self._refusal(method, path, response.status, response.data)
            return response
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, url: str, body: bytes | None, kind: str, seconds: float, whole: bool) -> Any:
        import urllib3

        return self._client.rest_client.pool_manager.request(
            method,
            url,
            body=body,
            headers={"accept": "application/json, */*", "content-type": kind, **self._headers()},
            timeout=urllib3.Timeout(connect=min(_CONNECT, seconds), read=seconds),
            preload_content=whole,
            retries=False,
        )

    def _refusal(self, method: str, path: str, code: int, data: bytes) -> ClusterError:
        try:
            said = json.loads(data)
        except ValueError:
            said = {}
        message = str(said.get("message") or data[:500].decode(errors="replace"))
        if code == _UNAUTHORIZED:
            return ClusterError(
                f"{self.where} doesn't accept these credentials ({message}): log in again, as for kubectl", code
            )
        if code == _FORBIDDEN:
            return ClusterError(
                f"{message}. Ask the cluster's administrator for the role `edit` in the namespace", code
            )
        if code in _BUSY:
            return NotReached(f"{self.where} answers {code} to {method} {path}: {message}", code)
        causes = (said.get("details") or {}).get("causes") or ()
        fields = [f"  {one.get('field', '')}: {one.get('message', '')}" for one in causes]
        said_of_fields = [str(one.get("message", "")) for one in causes]
        return ClusterError("\n".join([message, *fields] if len(fields) > 1 else [message]), code, said_of_fields)

    # --- programs in Pods ---------------------------------------------------------------------------------------------

    @contextmanager
    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[Exec]:
        """A program in a container, whose input and output are ours until the block ends."""
        query = [("command", word) for word in command]
        query += [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        opened = self._connected(path, query, f"{namespace}/{pod}")
        try:
            yield Exec(opened.sock, f"{namespace}/{pod}")
        finally:
            opened.close()

    def _connected(self, path: str, query: Sequence[tuple[str, str]], where: str) -> Any:
        """The client's own `stream` turns Ctrl-C and every status into one error without a code: so not by it."""
        import websocket
        from kubernetes.stream import ws_client

        websocket.setdefaulttimeout(SECONDS)
        for last in (False, True):
            url = ws_client.get_websocket_url(f"{self.configuration.host}{path}", query)
            try:
                return ws_client.WSClient(self.configuration, url, self._headers(), False, binary=True)
            except websocket.WebSocketBadStatusException as error:
                if error.status_code == _UNAUTHORIZED and not last:
                    self._load()
                    continue
                if error.status_code == _FORBIDDEN:
                    raise ClusterError(
                        f"commands in Pod {where} are forbidden (pods/exec). Ask the cluster's administrator "
                        "for the role `edit` in the namespace",
                        _FORBIDDEN,
                    ) from error
                refusal = self._refusal("GET", path, error.status_code, error.resp_body or b"")
                if error.status_code == _UNAUTHORIZED:
                    raise refusal from error
                said = f"no command can be run in Pod {where}: {error.status_code} {refusal}"
                raise NotReached(said, error.status_code) from error
            except (websocket.WebSocketException, OSError) as error:
                raise NotReached(f"no command can be run in Pod {where}: {error}") from error
        raise AssertionError("the last try returns or raises")


class Exec:
    """Input and output of a program in a container. A silence of `SECONDS` is an end of the connection."""

    def __init__(self, sock: Any, where: str):
        self._sock = sock
        self._where = where
        self._sock.settimeout(SECONDS)
        self._left = bytearray()
        self._errors = bytearray()
        self._open = True

    def write(self, data: bytes) -> None:
        from websocket import ABNF

        self._sock.send(b"\0" + data, opcode=ABNF.OPCODE_BINARY)

    def readline(self) -> bytes:
        """Without its end. Raises NotReached when there is no whole line any more."""
        while (end := self._left.find(b"\n")) < 0:
            self._receive()
        line = bytes(self._left[:end])
        del self._left[: end + 1]
        return line

    def read(self, size: int) -> bytes:
        """Between 1 and `size` bytes."""
        while not self._left:
            self._receive()
        part = bytes(self._left[:size])
        del self._left[:size]
        return part

    def _receive(self) -> None:
        from websocket import ABNF, WebSocketException

        if not self._open:
            raise self._ended()
        try:
            opcode, frame = self._sock.recv_data_frame(True)
        except (WebSocketException, OSError) as error:
            raise NotReached(f"the connection to Pod {self._where} broke: {error}") from error
        if opcode == ABNF.OPCODE_CLOSE:
            self._open = False
        elif opcode in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
            channel, data = frame.data[0], frame.data[1:]
            if channel == 1:
                self._left += data
            elif channel == 2:
                self._errors += data[:65536]
            elif channel == 3:
                self._open = False
                if b'"Failure"' in data and not self._errors:
                    self._errors += data

    def _ended(self) -> NotReached:
        words = self._errors.decode(errors="replace").strip().splitlines()
        return NotReached(f"the program in Pod {self._where} ended{': ' + words[-1] if words else ''}")


def nearest(name: str, names: Mapping[str, Any] | Sequence[str]) -> str:
    """What was probably meant, and what there is."""
    known = sorted(names)
    if not known:
        return "there is none"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listed = ", ".join(known[:_NAMES]) + (f" and {len(known) - _NAMES} more" if len(known) > _NAMES else "")
    return (f"did you mean {near[0]}? " if near else "") + f"There is: {listed}"


def _places() -> str:
    """Of kubeconfigs, as the environment says now: the client looks at it only when it is imported."""
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def _kubeconfig() -> bool:
    return any(Path(place).expanduser().is_file() for place in _places().split(os.pathsep) if place)


def _contexts() -> tuple[dict[str, str], str]:
    """Their namespaces, and the current one, as kubectl reads several files: the first that says something counts. The
    client's own list needs a current one."""
    import yaml

    known: dict[str, str] = {}
    current = ""
    for place in filter(None, _places().split(os.pathsep)):
        path = Path(place).expanduser()
        if not path.is_file():
            continue
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise Refused(f"the kubeconfig {path} can't be read: {error}") from error
        found = content.get("contexts") or [] if isinstance(content, dict) else None
        if not isinstance(found, list) or not all(isinstance(one, dict) and "name" in one for one in found):
            raise Refused(f"{path} is not a kubeconfig: it has no list of contexts with their names")
        for one in found:
            inner = one.get("context")
            known.setdefault(str(one["name"]), str((inner if isinstance(inner, dict) else {}).get("namespace") or ""))
        current = current or str(content.get("current-context") or "")
    return known, current


def _why(error: BaseException) -> str:
    """urllib3's errors hold what happened at their end."""
    return str(error).rpartition(": ")[2].strip("')\"") or type(error).__name__

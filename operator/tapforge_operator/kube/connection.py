"""Where the API server is and who we are: read by kopf's own logins, in a cluster or from a kubeconfig.

A service account's token is renewed by the kubelet long before it runs out, so the file is read again when it is older
than a minute; a token kept for longer than its life would lock the operator out.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import kopf

_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_TOKEN_SECONDS = 60.0


class NoCluster(Exception):
    """There is no cluster to speak to."""


def connection(settings: kopf.OperatorSettings | None = None) -> kopf.ConnectionInfo:
    """The cluster that this process runs in, else the kubeconfig's current context. Raises NoCluster."""
    settings = settings or kopf.OperatorSettings()
    info = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise NoCluster("no service account is mounted and no kubeconfig is there: set KUBECONFIG or ~/.kube/config")
    return info


class Credentials:
    """The headers of a request, fresh."""

    def __init__(self, info: kopf.ConnectionInfo, token_file: Path = _TOKEN):
        self._headers = info.as_http_headers()
        # Only a token that came from the file may be replaced by the file's next one.
        self._file = token_file if token_file.exists() and token_file.read_text().strip() == info.token else None
        self._read = time.monotonic()

    def headers(self) -> dict[str, str]:
        if self._file is not None and time.monotonic() - self._read > _TOKEN_SECONDS:
            # Should the file be away for a moment, the old token is good for a while: it is asked for with each call.
            with contextlib.suppress(OSError):
                self._headers = {"Authorization": f"Bearer {self._file.read_text().strip()}"}
                self._read = time.monotonic()
        return self._headers

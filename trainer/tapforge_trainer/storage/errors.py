"""What the errors of object storage's libraries mean: the URI, the cause and the remedy. Nothing is imported for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

_EXPIRED: Final = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidToken")
_NAMES: Final = {"s3a": "s3", "gcs": "gs", "local": "file"}


class StorageError(RuntimeError):
    """A store that can't be used. The message names the URI, the cause and the remedy."""


class Conflict(StorageError):
    """The object is not as the caller knew it: nothing was written."""


def scheme_of(uri: str) -> str:
    scheme = urlsplit(uri).scheme
    return _NAMES.get(scheme, scheme)


def explained(error: BaseException, uri: str) -> StorageError:
    """What a library's error means."""
    code, scheme = code_of(error), scheme_of(uri)
    words = " ".join(str(error).split()) or type(error).__name__
    rights = "credentials with the right to list, read, write and delete there"
    if isinstance(error, TimeoutError) or type(error).__name__ in ("FSTimeoutError", "ReadTimeoutError"):
        return StorageError(f"{uri}: no answer in time; see whether the store is up and can be reached from here")
    if code in _EXPIRED or "expired" in words.lower():
        return StorageError(
            f"{uri}: the credentials have expired ({words}); use such as the library renews by itself (a role of the "
            "machine or of the service account), or give new ones"
        )
    if code in ("NoSuchBucket", "404") and scheme in ("s3", "gs"):
        return StorageError(f"{uri}: there is no bucket {urlsplit(uri).netloc} ({words}); make it, or correct the URI")
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"):
        return StorageError(f"{uri}: there are no credentials ({words}); give {rights}")
    if isinstance(error, PermissionError) or code in ("401", "403") or words.startswith("Forbidden"):
        return StorageError(f"{uri}: access is denied ({code or 'no permission'}: {words}); give {rights}")
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{uri} is not there")
    return StorageError(f"{uri} failed: {type(error).__name__}: {words}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def code_of(error: BaseException) -> str:
    """The server's own word for it; "": it gave none."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return str(response["Error"].get("Code", ""))
        if type(one).__name__ == "HttpError":
            return str(getattr(one, "code", None) or "")
    return ""


def refused(error: BaseException) -> bool:
    """Whether the condition of a write did not hold."""
    codes = ("PreconditionFailed", "ConditionalRequestConflict", "412", "NoSuchKey")
    return isinstance(error, FileExistsError) or code_of(error) in codes

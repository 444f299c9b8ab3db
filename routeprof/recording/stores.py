"""Stores and remote file systems: how an address is opened, and what an error of one means."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

from routeprof.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from routeprof.recording.places import RemotePath

CONNECT_SECONDS = 5.0
"""How long S3 may take to accept a connection."""

ATTEMPTS = 3
"""How often a request to S3 is made before it has failed."""

GCS_SECONDS = 20
"""How long requests to Google's store are repeated."""

_S3 = frozenset({"endpoint_override", "region", "scheme", "anonymous"})

_MEANINGS = (
    (
        r"NO_SUCH_BUCKET|Bucket '.*' not found|NoSuchBucket",
        "there is no such bucket; check its name",
    ),
    (
        r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|HTTP status 40[13]|HTTP response code 40[13]"
        r"|Unauthorized|Forbidden|PermissionError|[Cc]redential",
        "the store refuses these credentials; set them in the environment, such as "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (docs/scale.md)",
    ),
    (
        r"NETWORK_CONNECTION|REQUEST_TIMEOUT|curlCode|[Cc]ouldn't connect|resolve host|timed? ?out"
        r"|Cannot connect|Connection refused",
        "the store does not answer; check the address, AWS_ENDPOINT_URL and the network",
    ),
    (
        r"HTTP status (301|400)|PERMANENT_REDIRECT|AUTHORIZATION_HEADER",
        "the store refuses the request; set credentials in the environment, and its region in "
        "AWS_REGION (docs/scale.md)",
    ),
    (r"SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE", "the store is too busy; try again"),
)
"""What parts of a library's message mean, the first that occurs."""


def reason(error: BaseException) -> str:
    """One line on why a store could not be read, and what to do."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, text):
            return meaning
    return f"{text[:300]}; check the address"


def opened(path: RemotePath) -> tuple[Any, str]:
    """The ``pyarrow.fs.FileSystem`` that reads an address, and its key there.

    Raises:
        UsageError: an option that the store does not have.
        UnreachableError: there is no way to read such addresses, or no way there.
    """
    scheme, _, rest = path.address.partition("://")
    if scheme in ("s3", "s3a"):
        return _s3(path.options, rest.partition("/")[0], os.getpid()), rest
    if scheme in ("gs", "gcs"):
        return _gcs(path.options, os.getpid()), rest
    host, _, below = rest.partition("/")
    if scheme == "hdfs" or (scheme in ("abfs", "abfss") and "@" in host):
        system = _by_address(f"{scheme}://{host}", path.options, os.getpid())
        return system, f"/{below}" if scheme == "hdfs" else f"{host.partition('@')[0]}/{below}"
    return _fsspec(path.address, scheme, host, path.options)


@lru_cache(maxsize=32)
def _s3(options: str, bucket: str, process: int) -> Any:
    """The file system of a bucket; a process that was forked opens its own."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem, resolve_s3_region

    found = _options(options)
    if unknown := found.keys() - _S3:
        raise UsageError(
            f"{', '.join(sorted(unknown))} is no option of s3://; there are "
            + ", ".join(sorted(_S3))
        )
    endpoint = found.get("endpoint_override") or _environment(
        "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
    )
    region = found.get("region") or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
    scheme = found.get("scheme") or "https"
    if endpoint and "://" in endpoint:
        scheme, _, endpoint = endpoint.rstrip("/").partition("://")
    if not endpoint and not region:
        region = resolve_s3_region(bucket)
    return S3FileSystem(
        anonymous=found.get("anonymous", "").lower() in ("1", "true", "yes"),
        region=region or None,
        scheme=scheme,
        endpoint_override=endpoint or None,
        connect_timeout=CONNECT_SECONDS,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )


@lru_cache(maxsize=32)
def _gcs(options: str, process: int) -> Any:
    from datetime import timedelta

    from pyarrow.fs import GcsFileSystem

    found = _options(options)
    if unknown := found.keys() - {"anonymous"}:
        raise UsageError(f"{', '.join(sorted(unknown))} is no option of gs://; there is anonymous")
    return GcsFileSystem(
        anonymous=found.get("anonymous", "").lower() in ("1", "true", "yes"),
        retry_time_limit=timedelta(seconds=GCS_SECONDS),
    )


@lru_cache(maxsize=32)
def _by_address(address: str, options: str, process: int) -> Any:
    from pyarrow.fs import FileSystem

    text = quote(address, safe=":/@") + (f"/?{options}" if options else "/")
    return FileSystem.from_uri(text)[0]


def _fsspec(address: str, scheme: str, host: str, options: str) -> tuple[Any, str]:
    import fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise UnreachableError(
            f"{scheme}:// is no kind of address that pyarrow or fsspec reads: name a directory, or "
            "copy the recording here"
        ) from None
    except ImportError as error:
        need = str(error).rstrip(".")
        raise UnreachableError(
            f"{scheme}:// needs a package that is not installed ({need}): install it with pip"
        ) from None
    system, key = fsspec.url_to_fs(address, **_options(options))
    return PyFileSystem(FSSpecHandler(system)), str(key)


def _options(text: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()}


def _environment(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")

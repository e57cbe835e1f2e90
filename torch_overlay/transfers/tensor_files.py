"""The safetensors files of a checkpoint: their names, and the tensors that their headers describe.

A file is eight bytes with the length of its header, the header as JSON, and the bytes of the tensors without gaps. All
of that is checked here, because later reads rely on it: `Checkpoint.read` raises before a byte of a tensor is read.
Start there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
LONGEST = 100_000_000  # bytes of a header, as the format limits it

# By its name in a header. The types of less than a byte (F4, F6) aren't here: torch has none, or packs them otherwise.
TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Entry(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: torch's name of its type, "bfloat16".
        file: the number of its file, in order of the files' names.
        begin: the position of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    begin: int

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


class File(NamedTuple):
    """A file as it was when its header was read.

    Attributes:
        size: its bytes.
        time: when it was last written, in nanoseconds. Not compared between ranks, whose disks may differ in it.
        digest: a hash of the header.
    """

    name: str
    path: str
    size: int
    time: int
    digest: str

    def check(self, now: os.stat_result) -> None:
        """Check that the file is as it was when its header was read."""
        if (now.st_size, now.st_mtime_ns) != (self.size, self.time):
            how = f"has {now.st_size} bytes and had {self.size}" if now.st_size != self.size else "was written again"
            raise RuntimeError(f"{self.path} {how} since its header was read. Make another checkpoint() of the folder")


class Files(NamedTuple):
    """The headers of a checkpoint: its files in order of their names, and the tensors in the order of their bytes."""

    files: list[File]
    entries: list[Entry]

    def changes(self) -> list[str]:
        """Return, for each file that has changed since its header was read, or that can't be found, a sentence that
        says how. Empty if none has."""
        sentences = []
        for file in self.files:
            try:
                file.check(os.stat(file.path))
            except (OSError, RuntimeError) as error:
                sentences.append(str(error))
        return sentences

    def as_data(self, names_for: Callable[[str], Sequence[str]]) -> dict[str, Any]:
        """Return the headers as JSON-compatible data, which all ranks get and compare."""
        rows, seen = [], set[str]()
        for entry in self.entries:
            names = [*names_for(entry.name)]
            for name in names:
                if name in seen:
                    raise ValueError(f"Two tensors of the source are called {name!r}; names maps them to one name.")
                seen.add(name)
            rows.append([*entry, names])
        return {"files": [[file.name, file.size, file.digest] for file in self.files], "tensors": rows}


class Checkpoint:
    """A folder of safetensors files. See `torch_overlay.checkpoint`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._files: Files | None = None

    def __repr__(self) -> str:
        return f"checkpoint({self.folder!r})"

    def read(self) -> Files:
        """Read the headers, and remember them; a later call reads them again only if a file has changed.

        Raises:
            ValueError: the folder, the index or a file is missing or malformed; names the file, and the tensor.
        """
        if self._files is None or self._files.changes():
            self._files = None
            self._files = _read_folder(self.folder)
        return self._files


def _read_folder(folder: str) -> Files:
    """Read the headers of all files of a folder, and compare them with its index."""
    files, entries, where = list[File](), list[Entry](), dict[str, str]()
    names, index = _names(folder)
    for number, name in enumerate(names):
        file, of_file = _read_file(folder, name, number)
        files.append(file)
        for entry in of_file:
            if entry.name in where:
                raise ValueError(f"{folder}: {entry.name!r} is in two files, {where[entry.name]} and {name}.")
            where[entry.name] = name
        entries += of_file
    for key, name in index.items():
        if where.get(key) != name:
            actual = f"it is in {where[key]}" if key in where else "it isn't there"
            raise ValueError(f"{os.path.join(folder, INDEX)} says that {key!r} is in {name}, and {actual}.")
    return Files(files, entries)


def _names(folder: str) -> tuple[list[str], dict[str, str]]:
    """Return the names of a folder's files. If it has an index, also the file of each tensor; else an empty dict."""
    try:
        listed = os.listdir(folder)
    except OSError as error:
        raise ValueError(
            f"checkpoint({folder!r}): {error.strerror}; it needs a folder of safetensors files."
        ) from error
    if INDEX not in listed:
        names = sorted(name for name in listed if name.endswith(SUFFIX))
        if not names:
            raise ValueError(f"checkpoint({folder!r}): the folder has no file that ends in {SUFFIX}.")
        return names, {}
    path = os.path.join(folder, INDEX)
    try:
        with open(path, encoding="utf-8") as stream:
            index = json.load(stream, object_pairs_hook=_unique)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of safetensors files: {_reason(error)}.") from error
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path} is no index of safetensors files: its weight_map names no tensor.")
    for key, name in index.items():
        # Only the name is checked, and links aren't resolved: in Hugging Face's cache the files are links to files
        # outside of the folder.
        if not isinstance(name, str) or os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"{path} says that {key!r} is in {name!r}, which isn't inside the folder.")
        if not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"{path} says that {key!r} is in {name}, and there is no such file.")
    return sorted({*index.values()}), index


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the pairs of a JSON object."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {key!r} twice, with {found[key]!r} and {value!r}")
        found[key] = value
    return found


def _reason(error: Exception) -> str:
    """Return why a file can't be read, for a message: "it has no 'shape'" for a KeyError, else the error's text, or the
    name of its class if it has none."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _read_file(folder: str, name: str, number: int) -> tuple[File, list[Entry]]:
    """Read the header of a file. Returns the file, and its tensors in the order of their bytes."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as stream:
            stat = os.fstat(stream.fileno())
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(LONGEST, stat.st_size - 8):
                raise ValueError(f"it has {stat.st_size} bytes, and its header would have {length}")
            raw = stream.read(length)
            if len(raw) < length:
                raise ValueError("its header is cut short")
        header = json.loads(raw, object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("its header is no dict")
        header.pop("__metadata__", None)
        begin = 8 + length
        entries = [_entry(key, row, number, begin) for key, row in header.items()]
        # Empty tensors first where several begin at one byte: an empty one that came last would look like an overlap.
        entries.sort(key=lambda entry: (entry.begin, entry.elements))
        at = begin
        for entry in entries:
            if entry.begin != at:
                what = "overlaps the tensor before it" if entry.begin < at else "leaves a gap before it"
                raise ValueError(f"{entry.name!r} {what}: it begins at byte {entry.begin - begin}, not {at - begin}")
            at += entry.elements * entry.itemsize
        if at != stat.st_size:
            last = f" with {entries[-1].name!r}" if entries else ""
            raise ValueError(f"its tensors end{last} at byte {at}, and the file at byte {stat.st_size}")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read: {_reason(error)}.") from error
    return File(name, path, stat.st_size, stat.st_mtime_ns, hashlib.sha256(raw).hexdigest()), entries


def _entry(name: str, row: Any, file: int, begin: int) -> Entry:
    """Make an `Entry` of a tensor's row in a header."""
    try:
        kind, shape, (first, last) = row["dtype"], row["shape"], row["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{name!r} isn't described by dtype, shape and data_offsets") from error
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in (*shape, first, last)):
        raise ValueError(f"{name!r} has shape {shape} and data_offsets {[first, last]}, which aren't whole numbers")
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"{name!r} has type {kind!r}, which torch doesn't have")
    if last - first != math.prod(shape) * TYPES[kind].itemsize:
        raise ValueError(f"{name!r} has shape {shape} and type {kind}, and lies in {last - first} bytes")
    return Entry(name, str(TYPES[kind]).removeprefix("torch."), tuple(shape), file, begin + first)

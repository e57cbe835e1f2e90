"""Real text for the demo: the sources of the Python standard library, which are on every machine that can run it."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch


class Text:
    """At most `limit` bytes of the standard library's top-level `*.py`, in sorted order, and random batches of them.

    The same machine gives the same bytes to every rank; `digest` lets the caller check that.
    Raises RuntimeError if fewer than `least` bytes are found.

    >>> text = Text(limit=1000, least=100)
    >>> inputs, targets = text.batch(step=0, rows=4, length=8, seed=0)
    >>> bool((inputs[:, 1:] == targets[:, :-1]).all())  # the target of a byte is the byte that follows it
    True
    """

    def __init__(self, limit: int, least: int, folder: str | None = None) -> None:
        self.folder = Path(folder or sysconfig.get_path("stdlib"))
        self.data = self._read(limit)
        if len(self.data) < least:
            raise RuntimeError(f"needed {least} bytes of Python sources, found {len(self.data)} in {self.folder}")
        self.digest = hashlib.sha256(self.data).hexdigest()
        with torch.device("cpu"):
            self._bytes = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)

    def _read(self, limit: int) -> bytes:
        pieces: list[bytes] = []
        missing = limit
        for path in sorted(self.folder.glob("*.py")):
            if missing <= 0:
                break
            piece = path.read_bytes()[:missing]
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def batch(self, step: int, rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch of a step as (inputs, targets), each (rows, length) int64; equal on every rank,
        and on the default device."""
        generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.data) - length, (rows, 1), generator=generator, device="cpu")
        window = self._bytes[starts + torch.arange(length + 1, device="cpu")].long().to(torch.get_default_device())
        return window[:, :-1], window[:, 1:]

"""What the TCP connections of a process group have carried, so that a `Watch` tells a slow link from one on which
nothing moves. gloo says nothing of a message before all of it has come; the kernel counts bytes.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# struct tcp_info of linux/tcp.h (since 4.1): tcpi_bytes_acked and tcpi_bytes_received follow 120 bytes.
ACKED_AND_RECEIVED = struct.Struct("=120x2Q")


class Connections:
    """TCP connections of a process group, by their numbers: they are never closed here, nor kept open."""

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}  # descriptors by inode: a number is given anew when its socket is closed

    @property
    def carried(self) -> int:
        """Bytes that other processes have acknowledged, and that came from them."""
        total = 0
        for inode, descriptor in self._sockets.items():
            try:
                if os.fstat(descriptor).st_ino == inode:
                    with _same(descriptor) as same:
                        info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED_AND_RECEIVED.size)
                    total += sum(ACKED_AND_RECEIVED.unpack(info))
            except (OSError, struct.error):  # it was closed, or the kernel is an old one
                continue
        return total

    @contextmanager
    def opening(self, count: int) -> Iterator[None]:
        """Take note of the connections that are opened in the block, in whichever thread, to `count` others.

        If there are more or fewer, nothing is known of any: other threads may have opened some, or gloo connects later.
        Connections to where this process is connected already, or to where it listened before, aren't the group's: on
        rank 0, which keeps a store, other ranks connect to it meanwhile. Their questions would count as progress, and a
        rank that was stopped was waited for as long as it took.
        """
        before = _sockets()
        ends = [ends for ends in map(_ends, before.values()) if ends is not None]
        listens, known = {own[1] for own, peer in ends if peer is None}, {peer for _, peer in ends if peer is not None}
        yield
        opened = {}
        for inode, descriptor in _sockets().items():
            found = None if inode in before else _ends(descriptor)
            if found is not None and found[1] is not None and found[0][1] not in listens and found[1] not in known:
                opened[inode] = descriptor
        self._sockets = opened if len(opened) == count else {}


def _same(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _ends(descriptor: int) -> tuple[tuple[str, int], tuple[str, int] | None] | None:
    """The addresses of a TCP socket here and at the other end, None for that of one that listens; None for others."""
    try:
        with _same(descriptor) as same:
            if same.family not in (socket.AF_INET, socket.AF_INET6) or same.type != socket.SOCK_STREAM:
                return None
            own = same.getsockname()[:2]
            try:
                return own, same.getpeername()[:2]
            except OSError:
                return own, None
    except OSError:
        return None


def _sockets() -> dict[int, int]:
    """The descriptors of all sockets of this process, by inode."""
    found = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            try:
                status = os.fstat(int(name))
            except OSError:  # the listing's own descriptor, or one that was closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    except OSError:  # no /proc: nothing is known of any connection
        pass
    return found

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
    """TCP connections of this process, held by number: they are never closed here, nor kept open."""

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}  # descriptors by inode: a number is given anew when its socket is closed

    @property
    def carried(self) -> int:
        """Bytes that other processes have acknowledged, and that came from them."""
        total = 0
        for inode, descriptor in self._sockets.items():
            try:
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, os.dup(descriptor)) as same:
                        info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED_AND_RECEIVED.size)
                    total += sum(ACKED_AND_RECEIVED.unpack(info))
            except (OSError, struct.error):  # it was closed, it is no TCP connection, or the kernel is an old one
                continue
        return total

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Take note of the connections that are opened in the block, in whichever thread: gloo's threads do."""
        before = _sockets()
        yield
        self._sockets |= {inode: number for inode, number in _sockets().items() if inode not in before}


def _sockets() -> dict[int, int]:
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

"""Several hosts on one machine, for tests and benchmarks: network namespaces on a bridge, each behind a link of a rate.

Needs Linux, root, and the programs ip, tc and unshare. What the processes send stays within the namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

NETWORK = "10.77.0"  # the host with number n is NETWORK.(n + 1)


def lacking() -> str:
    """Say what this machine lacks for `Hosts`; "" if it lacks nothing."""
    programs = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if programs:
        return f"hosts need the programs {', '.join(programs)}"
    if os.geteuid():
        return "hosts need root"
    tried = f"overlay{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", tried], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", tried], capture_output=True)
    return f"no network namespace can be made here: {made.stderr.strip()}" if made.returncode else ""


class Hosts:
    """Hosts at `address(0)`, `address(1)`, ..., until the end of a `with`.

    Args:
        count: of hosts.
        rate: of each host's link in both directions, in megabits a second.
    """

    def __init__(self, count: int, rate: int) -> None:
        self._count, self._rate = count, rate
        self._switch = f"overlay{os.getpid()}s"
        self._names = [f"overlay{os.getpid()}h{number}" for number in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host."""
        return f"{NETWORK}.{host + 1}"

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "name", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for number, name in enumerate(self._names):
                port = f"p{number}"
                _ip("netns", "add", name)
                ends = ["name", port, "type", "veth", "peer", "name", "eth0", "netns", name]
                _ip("-n", self._switch, "link", "add", *ends)
                _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
                _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
                for link in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", link, "up")
                for namespace, link in ((name, "eth0"), (self._switch, port)):
                    self._shape(namespace, link, "add", self._rate)
        except BaseException:
            self._remove()
            raise
        return self

    def _shape(self, namespace: str, link: str, action: str, rate: float) -> None:
        limit = ["tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "100ms"]
        subprocess.run(["tc", "-n", namespace, "qdisc", action, "dev", link, "root", *limit], check=True)

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, stdout: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host, under the host's own name. It is killed at the end of the `with`."""
        name = f"host{host}"
        own = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "NCCL_HOSTID": name}
        inside = ["unshare", "-u", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *command]
        words = ["ip", "netns", "exec", self._names[host], *inside]
        process = subprocess.Popen(words, env={**os.environ, **own, **(env or {})}, stdout=stdout)
        self._processes.append(process)
        return process

    def cut(self, host: int, down: bool = True) -> None:
        """Cut the cable of a host, or mend it."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down" if down else "up")

    def slow(self, host: int, rate: float) -> None:
        """Change the rate of a host's link, in megabits a second."""
        for namespace, link in ((self._names[host], "eth0"), (self._switch, f"p{host}")):
            self._shape(namespace, link, "change", rate)

    def deafen(self, host: int) -> None:
        """Let nothing from other hosts reach a host any more, while what it sends still arrives."""
        for number, name in enumerate(self._names):
            if number != host:
                nobody = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
                _ip("-n", name, "neigh", "replace", self.address(host), *nobody)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._remove()

    def _remove(self) -> None:
        for name in [*self._names, self._switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def sent_bytes() -> int:
    """Return the bytes that this process's host has sent over its link."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)

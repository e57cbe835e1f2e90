"""Several vLLM servers of one trainer: one is killed, and comes back by itself; on the stand-in of vLLM."""

import contextlib
import json
import os
import signal
import time
import urllib.request

import pytest

import forks
from torch_overlay.testing.pool import Pool, context
from vllm_fleet import TIMEOUT, Trainer, serve
from way import needs_package
from width import NIGHTLY

pytestmark = [needs_package, pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")]


class Servers:
    def __init__(self, count):
        self.ports, self.processes = [forks.free_port() for _ in range(count)], {}
        for number in range(count):
            self.start(number)

    @property
    def urls(self):
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, number):
        """Start a server, and wait until it answers."""
        self.processes[number] = context(forks.PRELOADED).Process(target=serve, args=(self.ports[number],))
        self.processes[number].start()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                return self.is_right(number, 0)
            time.sleep(0.1)
        raise AssertionError("a server doesn't answer")

    def is_right(self, number, round_):
        """Whether it serves the weights of this round."""
        request = urllib.request.Request(f"{self.urls[number]}/is_right", json.dumps({"number": round_}).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.join(10)


def test_a_server_that_was_restarted_comes_back(tmp_path):
    with contextlib.closing(Servers(2)) as servers:
        trainers = Pool(
            2, Trainer, f"tcp://127.0.0.1:{forks.free_port()}", str(tmp_path), servers.urls, preload=forks.PRELOADED
        )
        with contextlib.closing(trainers):
            assert trainers.ask("send", 1) == [(["server 0", "server 1"], [])] * 2
            assert servers.is_right(0, 1) and servers.is_right(1, 1)
            assert trainers.ask("verify") == [{}] * 2
            servers.processes[1].kill()
            assert trainers.ask("send", 2) == [([], ["server 1"])] * 2
            assert servers.is_right(0, 2)
            servers.start(1)
            assert trainers.ask("send", 3) == [(["server 1"], [])] * 2
            assert servers.is_right(0, 3) and servers.is_right(1, 3)
            if not NIGHTLY:
                return
            os.kill(servers.processes[0].pid, signal.SIGSTOP)
            begun = time.monotonic()
            assert trainers.ask("send", 4) == [([], ["server 0"])] * 2
            assert time.monotonic() - begun < 2 * TIMEOUT + 5
            os.kill(servers.processes[0].pid, signal.SIGCONT)
            assert not servers.is_right(0, 4) and servers.is_right(1, 4)
            # A round waits a second for a server that comes back, and this one first leaves what it was in.
            rounds = (number for number in range(5, 9) if trainers.ask("send", number) == [(["server 0"], [])] * 2)
            number = next(rounds)
            assert servers.is_right(0, number) and servers.is_right(1, number)

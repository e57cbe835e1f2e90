"""The pool of processes: what it says of ranks that fail, and that none outlives it."""

import os
import signal
import sys
import time

import pytest

from torch_overlay.testing.pool import Pool, RankError


class Worker:
    def __init__(self, rank, word):
        self.rank, self.word = rank, word

    def says(self, number):
        return self.word, self.rank, number, os.environ["OF_THE_RANKS"]

    def works(self, fails, how):
        """One rank fails, in this way; the others wait for ever."""
        while self.rank != fails or how == "hangs":
            time.sleep(0.1)
        print("its last words", file=sys.stderr, flush=True)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("not so")


def pool(**how):
    return Pool(3, Worker, "hello", environment={"OF_THE_RANKS": "yes"}, **how)


def test_answers_come_by_rank_and_an_order_may_go_to_some():
    with pool() as ranks:
        assert ranks.ask("says", 5) == [("hello", rank, 5, "yes") for rank in range(3)]
        assert ranks.ask("says", 6, ranks=(2, 0)) == [("hello", rank, 6, "yes") for rank in (2, 0)]
    assert "OF_THE_RANKS" not in os.environ
    assert [process.exitcode for process in ranks.processes] == [0] * 3


@pytest.mark.parametrize(
    "how, said",
    [
        ("dies", r"weights: rank 1 ended \(exit code -9\) during 'works'\nits last words"),
        ("raises", r"(?s)weights: rank 1 failed during 'works'\nTraceback.*ValueError: not so"),
        ("hangs", r"(?s)weights: rank [012] no answer to 'works' in \d s\n.*in works"),
    ],
)
def test_who_fails_is_named_with_what_it_said_and_none_is_left(monkeypatch, how, said):
    monkeypatch.setattr("torch_overlay.testing.pool.GRACE", 0.1)
    ranks = pool(name="weights")
    ranks.ask("says", 1)
    ranks.timeout = 2 if how == "hangs" else 60
    with pytest.raises(RankError, match=said):
        ranks.ask("works", 1, how)
    assert not any(process.is_alive() for process in ranks.processes)


def test_a_rank_that_does_not_come_up_says_why():
    with pytest.raises(RankError, match=r"(?s)rank 0 failed during 'says'.*takes 3 positional arguments"):
        Pool(1, Worker, "hello", "one too many").ask("says", 1)

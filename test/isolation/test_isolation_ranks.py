"""The processes that run the cases: each way to fail is told, and the next case has good ones."""

import os
import time

import pytest
import torch.distributed as dist

from isolation_ranks import Ranks


def right(rank, size):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)


def wrong_on_one_rank(rank, size):
    assert rank != 2, "not this number"


def hangs_on_one_rank(rank, size):
    if rank == 1:
        time.sleep(600)


def dies_on_one_rank(rank, size):
    if rank == 3:
        time.sleep(1)
        os._exit(7)
    raise ConnectionError("what the others see, and say first")


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(seconds=12)
    yield ranks
    ranks.close()


FAILURES = {wrong_on_one_rank: "not this number", hangs_on_one_rank: "in hangs_on_one_rank", dies_on_one_rank: "code 7"}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_told_and_the_next_case_runs(ranks, case):
    assert FAILURES[case] in ranks.ask(case, 4, {})
    assert ranks.ask(right, 8, {}) == ranks.ask(right, 4, {}) == ""

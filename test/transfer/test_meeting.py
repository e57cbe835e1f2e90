"""What the ranks of a meeting ask of the store; one rank runs, and the words of the others are there."""

import collections
import datetime
import hashlib
import pickle
import zlib

import pytest
import torch.distributed as dist

from torch_overlay.transfers.meeting import Meeting
from way import needs_package

pytestmark = needs_package


class Counting(dist.HashStore):
    """Counts the requests of each kind."""

    def __init__(self, extended):
        super().__init__()
        self.counts, self.extended = collections.Counter(), extended

    def has_extended_api(self):
        return self.extended


for name in ("set", "get", "multi_get", "wait", "check", "add", "compare_set", "delete_key"):

    def counted(self, *given, name=name):
        self.counts[name] += 1
        return getattr(dist.HashStore, name)(self, *given)

    setattr(Counting, name, counted)


def requests(ranks, extended=True):
    """Of a rank, in a meeting of so many who say two things; and what it hears."""
    meeting, store = Meeting.__new__(Meeting), Counting(extended)
    meeting.ranks, meeting.rank, meeting.store = range(ranks), 0, store
    meeting.timeout, meeting.purpose = datetime.timedelta(seconds=5), "A test"
    for rank in range(1, ranks):
        said = zlib.compress(pickle.dumps(f"word {rank % 2}"))
        store.set(hashlib.sha256(said).hexdigest(), said)
        store.set(f"rank {rank}", hashlib.sha256(said).hexdigest())
    store.counts.clear()
    heard = meeting.say("word 0")
    assert heard == {rank: f"word {rank % 2}" for rank in range(ranks)}
    return store.counts


def test_requests_of_a_rank_do_not_grow_with_the_ranks():
    assert requests(8) == requests(4096) and requests(8).total() <= 10


@pytest.mark.parametrize("ranks", [2, 9])
def test_a_store_that_gives_one_word_at_a_time(ranks):
    assert requests(ranks, extended=False)["get"] == ranks + 2

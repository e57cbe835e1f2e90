"""Nobody hangs in silence: whatever happens to one rank, all others are told in time which one it was."""

import signal

import pytest

from silence import KINDS, PLACES, Job, Programs, check, random_job
from width import NIGHTLY

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signal")
SLACK = 4  # seconds that a loaded machine may take longer
# Each kind and each place once or twice; the nightly switch has all of them and random ones.
JOBS = [
    Job("killed", "packing", 1),
    Job("killed", "last exchange", 3, is_met=True),
    Job("stopped", "before the word", 2, is_met=True),
    Job("stopped", "first exchange", 0),
    Job("asleep", "first exchange", 3),
    Job("asleep", "after", 1, is_met=True),
    Job("raises", "packing", 2),
    Job("killed", "first exchange", 2, backend="nccl_stand_in"),
    Job("killed", "packing", 3, is_met=True, relay=True),
]
ALL = [
    Job(kind, place, victim, 4, 4, is_met)
    for is_met in (False, True)
    for kind in KINDS
    for place in (PLACES if kind != "raises" else PLACES[1:2])
    for victim in (1, 6)
]


@pytest.fixture(scope="module")
def programs():
    found = Programs(JOBS)
    yield found
    found.kill()


@pytest.mark.parametrize("number", range(len(JOBS)), ids=lambda number: " ".join(map(str, JOBS[number])))
def test_who_is_missing_is_named(programs, number):
    check(JOBS[number], programs.told(number), SLACK)


@pytest.mark.skipif(not NIGHTLY, reason="a long search: TORCH_OVERLAY_NIGHTLY=1")
@pytest.mark.timeout(7200)
def test_random_faults():
    jobs = [*ALL, *map(random_job, range(200))]
    for at in range(0, len(jobs), 4):
        programs = Programs(jobs[at : at + 4])
        try:
            for number, job in enumerate(programs.jobs):
                check(job, programs.told(number), SLACK)
        finally:
            programs.kill()

"""Users of different meshes stay apart as on stock, whatever is shared and merged within one: cases on real ranks
under all options."""

import itertools

import pytest

import isolation_cases as cases
import isolation_saves as saves
from isolation_ranks import Ranks
from torch_overlay import versions
from way import STOCK, needs_overlay
from width import NIGHTLY

SHARE_GROUPS = ("names", "ranks", "off")
FLATTEN = ("whole", "existing")
OPTIONS = [{"share_groups": share, "flatten": flatten} for share, flatten in itertools.product(SHARE_GROUPS, FLATTEN)]
if STOCK:
    OPTIONS = [{}]

# Each with the size of its world. The first take well under a second, the others have the defaults unless it is night.
SHORT = {
    cases.metric_beside_redistribution: 4,
    cases.two_meshes_two_axes: 4,
    cases.two_private_meshes: 4,
    cases.views_of_a_private_mesh: 8,
    cases.a_view_made_in_a_private_block: 4,
    cases.one_replica_gathers: 8,
    cases.an_empty_last_batch: 8,
    cases.one_owner_destroys_its_groups: 4,
    cases.groups_of_size_1_are_destroyed: 4,
    cases.one_pair_destroys_its_group: 4,
}
# On stock these are wrong.
EQUAL = {cases.equal_meshes_in_two_threads: 4, cases.meshes_rebuilt_after_their_groups_were_destroyed: 4}


def named(value):
    return value.__name__ if callable(value) else "-".join(map(str, value.values())) or "stock"


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(seconds=900) if NIGHTLY else Ranks()  # 240 rounds take minutes
    yield ranks
    ranks.stop()


def chosen(cases):
    """Each case with the defaults, with every value of each option, and over the cases with every pair of values; at
    night each case with every pair."""
    for number, case in enumerate(cases):
        for place, options in enumerate(OPTIONS):
            if NIGHTLY or place == 0 or sum(divmod(place, len(FLATTEN))) % len(FLATTEN) == number % len(FLATTEN):
                yield pytest.param(case, options, id=f"{named(case)}-{named(options)}")


@pytest.mark.parametrize("case, options", list(chosen(SHORT)))
def test_users_of_the_same_ranks_stay_apart(ranks, case, options):
    ranks.ask(case, SHORT[case], options)


@needs_overlay
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("options", OPTIONS[:1], ids=named)
@pytest.mark.parametrize("case", EQUAL, ids=named)
def test_equal_meshes_stay_apart(ranks, case, options):
    if case is cases.meshes_rebuilt_after_their_groups_were_destroyed and versions.running().number < (2, 13):
        pytest.skip("up to 2.12 torch frees no mesh that its cache of sharding results held")
    ranks.ask(case, EQUAL[case], options)


@pytest.mark.parametrize("options", OPTIONS[:: 1 if NIGHTLY else len(FLATTEN)], ids=named)
def test_ranks_agree_where_all_of_them_make_each_group(ranks, options):
    """Ranks of other copies can't know that a group is gone, and take part in making it."""
    for case in (cases.one_pair_destroys_its_group, cases.one_owner_destroys_its_groups):
        ranks.ask(case, 4, options if STOCK else options | {"create": "world"})


@pytest.mark.parametrize("options", OPTIONS if NIGHTLY else OPTIONS[:1], ids=named)
def test_checkpoints_and_training_stay_apart(ranks, options):
    ranks.ask(saves.training_beside_saves, 4, options)

"""Options of a backend: each group has its own, for c10d writes the group's name and ranks into them."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from mesh_harness import fake_world
from way import needs_overlay, overlay

pytestmark = needs_overlay


class Chosen:
    """What a user says of a backend, and what is written into it, as c10d does it with NCCL's."""

    def __init__(self):
        self.speed, self.group_name, self._timeout = 3, "", timedelta(seconds=60)


@pytest.fixture
def given_to_groups(monkeypatch):
    """The options that each group was made with, in order; a backend "written" that takes any."""
    given = []

    def make(how, options):
        options.group_name = how.group_id
        given.append(options)
        return FakeProcessGroup._create_internal(how.group_rank, how.group_size, FakeProcessGroup.Options())

    for name in ("backend_list", "default_device_backend_map", "backend_capability", "backend_type_map", "_plugins"):
        held = getattr(dist.Backend, name)
        monkeypatch.setattr(dist.Backend, name, type(held)(held))
    dist.Backend.register_backend("written", make, extended_api=True, devices=["cpu"])
    yield given
    del dist.Backend.WRITTEN


def mesh_with(options):
    return init_device_mesh(
        "cpu",
        (2, 4),
        mesh_dim_names=("a", "b"),
        backend_override={"a": ("written", options), "b": ("written", options)},
    )


class ByDeepcopy(Chosen):
    """As NCCL's, which c10d's own split copies."""

    def __copy__(self):
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("kind", [Chosen, ByDeepcopy])
@pytest.mark.parametrize("create", ["members", "world"])
def test_each_group_has_options_of_its_own(create, kind, given_to_groups):
    options = kind()
    with fake_world(5, 8), overlay(create=create):
        mesh_with(options)
    assert len({id(each) for each in given_to_groups}) == len(given_to_groups) >= 2
    assert {each.speed for each in given_to_groups} == {3}
    assert len({each.group_name for each in given_to_groups}) == len(given_to_groups)
    assert options.group_name == "", "the user's own are as they were"


def test_options_that_cant_be_copied_are_given_as_they_are(given_to_groups):
    class Locked(Chosen):
        def __reduce_ex__(self, protocol):
            raise TypeError("cannot be copied")

    options = Locked()
    with fake_world(5, 8), overlay():
        mesh_with(options)
    assert given_to_groups and all(each is options for each in given_to_groups)

"""The backend of a mesh's group, and its options: each has its own, for c10d writes its name and ranks into them."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from mesh_harness import fake_world, open_groups
from torch_overlay.distributed._mesh.arguments import normalize_overrides
from way import needs_overlay, needs_package, overlay

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


@pytest.mark.parametrize("given", ["fake", ("fake", None), pytest.param(["fake", None], marks=needs_package)])
def test_a_backend_may_be_given_in_a_tuple_or_a_list(given):
    with fake_world(0, 8), overlay():
        mesh = init_device_mesh("cpu", (2, 4), backend_override={1: given})
        assert dist.get_backend(mesh.get_group(1)) == "fake"


NO_BACKENDS = [5, ("gloo",), ("gloo", None, None), object(), (3, 4), [None, "gloo"], ("gloo", "nccl")]


@pytest.mark.parametrize("wrong", NO_BACKENDS)
@needs_package  # upstream takes them as they come
def test_what_is_no_backend_is_refused_before_anything_is_made(wrong):
    with fake_world(0, 8), overlay():
        made = len(open_groups())
        with pytest.raises(TypeError, match=r"is the name of a backend|a pair of both"):
            init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), backend_override={"tp": wrong})
        assert len(open_groups()) == made


@needs_package
def test_options_may_be_of_any_class():
    """As those of a backend that is registered from Python are."""
    options = object()
    assert normalize_overrides({0: ("mine", options)}, 1, None) == (("mine", options),)


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


@needs_package
@pytest.mark.parametrize(("kind", "splits"), [("cuda", True), ("cpu", False)])
def test_what_the_mesh_is_for_decides_whether_its_groups_are_split(kind, splits, monkeypatch):
    """In a world that isn't bound, as of torchcomms; not what this host has, which may differ from host to host."""
    from torch_overlay.distributed._mesh import groups as groups

    monkeypatch.setattr(groups, "makes_communicators", lambda world: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: torch.device("meta"), raising=False)
    asked = []
    world = SimpleNamespace(
        bound_device_id=None,
        _get_backend=lambda device: asked.append(device) or SimpleNamespace(supports_splitting=True),
    )
    request = SimpleNamespace(device_type=kind, override=(None, None))
    assert groups._can_split(world, request, [[0, 1]]) == splits
    assert asked == [torch.device("cuda")][:splits]


@needs_package
@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="a build of torch without NCCL")
def test_all_classes_of_nccl_are_torchs_own_and_their_options_are_copied_and_compared():
    """Those of 2.15, nccl2 and nccl-lazy, too. No GPU is needed to look at them."""
    from torch_overlay.distributed._mesh.groups import _own
    from torch_overlay.distributed._mesh.universe import Kind

    names = [name for name in dir(dist.distributed_c10d) if name.startswith("ProcessGroupNCCL")]
    assert all(getattr(dist.distributed_c10d, name).__module__.startswith("torch.") for name in names)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=5)
    copied = _own(options)
    assert copied is not options and copied._timeout == options._timeout
    with fake_world():
        assert Kind.of(("nccl", copied)) == Kind.of(("nccl", options))
        copied._timeout = timedelta(seconds=6)
        assert Kind.of(("nccl", copied)) != Kind.of(("nccl", options))

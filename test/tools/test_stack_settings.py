"""Upstream the choices stand in torch.distributed.config, which takes any value: what is no choice is an error."""

import importlib.util
import types

import pytest

import stack_trees  # noqa: F401  puts tools/ on the path

# isort: split
from stack.message import PATCHES

CHOICES = dict(
    mesh_share_groups="names",
    mesh_create_groups="members",
    mesh_joint_groups="whole",
    mesh_check=False,
    redistribute_cost="steps",
    mesh_topology=None,
    plan_redistribution=True,
)


@pytest.fixture
def read(monkeypatch):
    """Settings as the rendered tree reads them, from these choices."""
    spec = importlib.util.spec_from_file_location("rendered_settings", PATCHES / "instead" / "_settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def read(**changes):
        monkeypatch.setattr(module, "config", types.SimpleNamespace(**{**CHOICES, **changes}))
        return module.get_settings()

    return read


def test_a_topology_is_one_value_however_it_is_written(read):
    assert read().topology is None
    assert read(mesh_topology=[["tp", 450e9, 2e-6]]) == read(mesh_topology=(("tp", 450e9, 2e-6),))
    hash(read(mesh_topology=[["tp", 450e9, 2e-6]]))  # plans are kept by it


@pytest.mark.parametrize("wrong", [{"tp": 4}, [("tp", 0, 0)], [("tp", 1, -1)], [(0, 1, 1)], [("tp", "fast", 0)], 3])
def test_what_is_no_topology_is_refused(read, wrong):
    with pytest.raises(ValueError, match=r"mesh_topology is .*bytes per second, seconds of latency"):
        read(mesh_topology=wrong)


@pytest.mark.parametrize("name", ["mesh_share_groups", "mesh_create_groups", "mesh_joint_groups", "redistribute_cost"])
def test_what_is_no_choice_is_refused(read, name):
    with pytest.raises(ValueError, match=f"{name} is one of .*, got 'nothing'"):
        read(**{name: "nothing"})

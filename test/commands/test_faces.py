"""What a user finds in `torch_overlay` by dir(), help() and a type checker; the checker's own verdict is
``test/typing/checked_calls.py``, which lint reads."""

import ast
import dataclasses
import inspect
import pathlib
import re
import typing

import pytest

import torch_overlay
from torch_overlay import choices, series
from torch_overlay import typing as ours
from torch_overlay.choices import DEFAULT
from torch_overlay.errors import OptionError
from torch_overlay.patching.patch import Kind

OPTIONS = [field.name for field in dataclasses.fields(DEFAULT)]


def words_of(option):
    """The words that an option takes, out of what it says of another; none where it takes no words."""
    with pytest.raises(OptionError) as caught:
        choices.choose(DEFAULT, {option: "~"})
    return re.findall(r"'(\w+)'", str(caught.value)) if " is one of " in str(caught.value) else []


@pytest.mark.parametrize("option", OPTIONS)
def test_the_docstring_of_enable_names_each_option_its_words_and_its_default_first(option):
    (line,) = re.findall(rf"^ +{option}: (.+?): ", torch_overlay.enable.__doc__, re.MULTILINE)
    default = getattr(DEFAULT, option)
    assert line.startswith(f'"{default}"' if isinstance(default, str) else str(default))
    assert re.findall(r'"(\w+)"', line.partition("``")[0]) == words_of(option)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_have_the_types_that_are_read(option):
    assert list(ours.Options.__annotations__) == OPTIONS
    hint = typing.get_type_hints(ours.Options)[option]
    parts = [part for kind in [hint, *typing.get_args(hint)] for part in typing.get_args(kind) or [kind]]
    texts = [part for part in parts if isinstance(part, str)]
    for text in texts:
        choices.choose(DEFAULT, {option: text})
    if words_of(option):
        assert list(dict.fromkeys(texts)) == words_of(option)


def test_a_mesh_is_typed_as_it_is():
    device_mesh = pytest.importorskip("torch_overlay.distributed.device_mesh")
    tree = ast.parse(pathlib.Path(ours.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "OverlayMesh"]
    methods = {node.name: node.args for node in typed.body if isinstance(node, ast.FunctionDef)}
    added = [row for row in series.PATCHES if row.owner == "DeviceMesh" and row.kind is Kind.ADD and not row.releases]
    gained = {row.name for row in added if not row.name.startswith("_")} | {"abort"}
    assert gained <= set(methods)
    for name in gained:
        arguments = inspect.signature(getattr(device_mesh._DeviceMesh, name)).parameters
        assert [argument.arg for argument in methods[name].args] == list(arguments), name


def test_an_overlay_mesh_is_a_mesh():
    pytest.importorskip("torch")
    from torch.distributed.device_mesh import DeviceMesh

    assert ours.OverlayMesh is DeviceMesh
    with pytest.raises(AttributeError, match="has no attribute 'Mesh'"):
        _ = ours.Mesh

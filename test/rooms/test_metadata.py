"""What pip is told: which releases of torch, which extras the commands of the README name, where links lead."""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from torch_overlay import versions

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "torch_overlay"
# Of torch, around those that are supported.
RELEASED = ("2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module, and what it hands to setuptools."""
    setuptools = pytest.importorskip("setuptools")
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **what: given.update(what))
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.given = given
    return module


def test_pip_lets_in_the_releases_that_are_recognised_and_no_other(setup):
    packaging = pytest.importorskip("packaging.requirements")
    (torch,) = map(packaging.Requirement, setup.given["install_requires"])
    assert torch.name == "torch"
    taken = [release for release in RELEASED if release in torch.specifier]
    assert taken == [release for release in RELEASED if versions.parse(release).supported] == [*RELEASED[2:]]
    assert {*versions.SUPPORTED} < {*taken}
    assert "2.13.0+cpu" in torch.specifier and "2.15.1" in torch.specifier and "2.16.0" not in torch.specifier


def test_a_wheel_has_the_files_that_are_no_python(setup):
    folder = ROOT / PACKAGE
    others = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    others = {path for path in others if not path.endswith((".py", ".pyc"))} - {"distributed/ruff.toml"}
    assert others == {"py.typed", "fingerprints.json"} == {*setup.given["package_data"][PACKAGE]}


def test_extras_that_are_named_exist(setup):
    named = set()
    for name in ("README.md", "noxfile.py", ".lintrunner.toml", "CONTRIBUTING.md"):
        path = ROOT / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        named |= {extra for extras in re.findall(r"\.\[([\w,]+)\]", text) for extra in extras.split(",")}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        named |= set(re.findall(r"torch-overlay\[(\w+)\]", path.read_text(encoding="utf-8")))
    assert {"demo", "plot", "test", "dev"} <= named <= set(setup.given["extras_require"])


def test_a_zip_of_the_package_has_its_data(tmp_path):
    """As Spark and others bring code to their hosts."""
    made = shutil.make_archive(str(tmp_path / "made"), "zip", ROOT, PACKAGE)
    code = "from torch_overlay import versions; print(versions.__file__, *versions.fingerprints())"
    told = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": made}, cwd=tmp_path, capture_output=True, text=True
    )
    assert told.stdout.startswith(made) and "2.13.0" in told.stdout, told.stderr

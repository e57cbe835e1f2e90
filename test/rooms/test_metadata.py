"""What pip is told: which releases of torch, which extras the commands of the README name, where links lead."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

import house
from torch_overlay import versions

# Of torch, around those that are supported.
RELEASED = ("2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module, and what it hands to setuptools."""
    setuptools = pytest.importorskip("setuptools")
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **what: given.update(what))
    spec = importlib.util.spec_from_file_location("setup_py", house.ROOT / "setup.py")
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
    folder = house.ROOT / house.PACKAGE
    others = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    others = {path for path in others if not path.endswith((".py", ".pyc"))}
    assert others == {"py.typed", "fingerprints.json"} == {*setup.given["package_data"][house.PACKAGE]}


def test_extras_that_are_named_exist(setup):
    named = set()
    for name in ("README.md", "noxfile.py", ".lintrunner.toml", "CONTRIBUTING.md"):
        path = house.ROOT / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        named |= {extra for extras in re.findall(r"\.\[([\w,]+)\]", text) for extra in extras.split(",")}
    for source in house.sources(house.PACKAGE):
        named |= set(re.findall(r"torch-overlay\[(\w+)\]", source.text))
    assert {"demo", "plot", "test", "dev"} <= named <= set(setup.given["extras_require"])


def test_the_demo_needs_torch_and_rich(setup):
    assert setup.given["extras_require"]["demo"] == ["rich"]


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://example.org/someone/torch_overlay.git", "https://example.org/someone/torch_overlay"),
        ("https://user:secret@example.org/someone/x/", "https://example.org/someone/x"),
        ("git@example.org:someone/x.git", "https://example.org/someone/x"),
        ("ssh://git@example.org/someone/x", "https://example.org/someone/x"),
        ("/a/folder", ""),
        ("file:///a/folder", ""),
        (None, ""),
    ],
)
def test_home_is_where_the_clone_came_from(setup, remote, url, tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if remote:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    monkeypatch.setattr(setup, "HERE", tmp_path)
    assert setup.home() == url
    (tmp_path / ".git").rename(tmp_path / "other")
    assert setup.home() == ""


def test_links_are_absolute_where_there_is_a_home(setup, tmp_path, monkeypatch):
    text = "[a](docs/a.md#b) ![p](p.png) [![q](q.png)](q.md) [w](https://x.y/z) [here](#here)"
    (tmp_path / "README.md").write_text(text)
    monkeypatch.setattr(setup, "HERE", tmp_path)
    assert setup.description("") == text
    blob, raw = "https://h/o/n/blob/HEAD/", "https://h/o/n/raw/HEAD/"
    links = re.findall(r"\]\((.+?)\)", setup.description("https://h/o/n"))
    assert links == [f"{blob}docs/a.md#b", f"{raw}p.png", f"{raw}q.png", f"{blob}q.md", "https://x.y/z", "#here"]


def test_a_zip_of_the_package_has_its_data(tmp_path):
    """As Spark and others bring code to their hosts."""
    made = shutil.make_archive(str(tmp_path / "made"), "zip", house.ROOT, house.PACKAGE)
    code = "from torch_overlay import versions; print(versions.__file__, *versions.fingerprints())"
    told = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": made}, cwd=tmp_path, capture_output=True, text=True
    )
    assert told.stdout.startswith(made) and "2.13.0" in told.stdout, told.stderr

"""The site builds without a warning, and has every page: links between pages, headings, docstrings, the index."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from width import NIGHTLY

ROOT = pathlib.Path(__file__).parents[2]
NEEDED = ("sphinx", "myst_parser", "furo")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

# The gate sets CI and installs the extra, so that there a missing builder is a failure.
needs_sphinx = pytest.mark.skipif(
    bool(MISSING) and not os.environ.get("CI"), reason=f"pip install -e '.[docs]' for {', '.join(MISSING)}"
)


def build(pages: pathlib.Path, site: pathlib.Path) -> subprocess.CompletedProcess:
    """Sphinx in a process of its own: it changes what autodoc imports."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", f"{site}-trees"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([*command, pages, site], capture_output=True, text=True, timeout=240, env=environment)


@needs_sphinx
@pytest.mark.skipif(not NIGHTLY, reason="eight seconds of sphinx: only at night")
def test_the_site_builds_without_a_warning(tmp_path):
    done = build(ROOT / "docs", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    site = tmp_path / "site"
    assert pages <= {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    api = (tmp_path / "site" / "developers" / "docstrings.html").read_text(encoding="utf-8")
    for name in ("enable", "disable", "enabled", "is_enabled", "status", "options", "private_groups", "prepare"):
        assert f'id="torch_overlay.{name}"' in api, f"the page of docstrings has no {name}"

"""The pictures of the pages are made by the package, and the one of a Transfer has an arrow for each message."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "docs" / "pictures"))

import make_pictures

PICTURES = pathlib.Path(make_pictures.__file__).parent


def test_all_pictures_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    arrows = []
    draw = make_pictures._arrow
    monkeypatch.setattr(make_pictures, "_arrow", lambda *where: arrows.append(where) or draw(*where))
    make_pictures.make(tmp_path)
    assert (
        len(arrows) == 8
    )  # each half of a trainer's rows overlaps two of the three servers' thirds, twice over columns
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"weights.png", "mesh.png", "run_2x2x2.png"} <= {path.name for path in PICTURES.iterdir()}

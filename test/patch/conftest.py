"""The fake library as a fixture."""

import sys

import pytest

import fake_tree


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """`fakelib` on the path, as the torch of the overlay; forgotten afterwards, and the overlay off."""
    from torch_overlay import overlay

    monkeypatch.setattr(overlay, "TORCH", "fakelib")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield fake_tree.Tree(tmp_path, monkeypatch)
    overlay.disable(force=True)
    fake_tree.forget()

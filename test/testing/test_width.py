"""How widely the tests look stays as it was set."""

import importlib

from hypothesis import settings

from width import NIGHTLY


def test_torchs_helpers_for_tests_change_no_profile():
    """They load one of 10 or 50 examples when they are imported; so did most of our tests, at night as well."""
    importlib.import_module("torch.testing._internal.common_utils")
    settings.load_profile("default")
    assert settings.default.max_examples == (1000 if NIGHTLY else 50)

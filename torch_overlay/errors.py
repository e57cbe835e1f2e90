"""What can go wrong with the overlay itself: one base class and few kinds, each saying whose move it is."""

from .patching.errors import ChangedTarget, ForeignPatch, OverlayError, PatchError

__all__ = ["ChangedTarget", "ForeignPatch", "OptionError", "OverlayError", "PatchError", "UnknownRelease"]


class UnknownRelease(OverlayError):
    """The running torch isn't a release that the overlay has fingerprints for."""


class OptionError(OverlayError, ValueError):
    """An option has an unknown name or a value that it doesn't take."""

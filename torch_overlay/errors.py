"""The errors that the overlay raises about itself. Each class says who has to act."""

from .patching.patch import ChangedTarget, ForeignPatch, OverlayError, PatchError

__all__ = ["ChangedTarget", "ForeignPatch", "OptionError", "OverlayError", "PatchError", "UnknownRelease"]


class UnknownRelease(OverlayError):
    """The running torch isn't a release that the overlay has fingerprints for."""


class OptionError(OverlayError, ValueError):
    """An option has an unknown name or a value that it doesn't take."""

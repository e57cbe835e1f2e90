"""What can go wrong with patching: one base class and few kinds, each saying whose move it is.

Users know them by `torch_overlay.errors`.
"""


class OverlayError(RuntimeError):
    """Base of every error that the overlay raises about itself. torch is as it was before the call that raised it."""


class ChangedTarget(OverlayError):
    """Something to be patched isn't what its fingerprint says: another build of torch, or somebody's own patch."""


class ForeignPatch(OverlayError):
    """Somebody patched a target after the overlay did, so taking the overlay away would tear theirs apart."""


class PatchError(OverlayError, ValueError):
    """A row of the series contradicts itself or its body: a mistake in the overlay, found before torch is touched."""

"""The overlay's own errors: those about itself, each of which says who has to act, and that of a failed transfer."""

from .patching.patch import ChangedTarget, ForeignPatch, OverlayError, PatchError

__all__ = [
    "ChangedTarget",
    "ForeignPatch",
    "OptionError",
    "OverlayError",
    "PatchError",
    "TransferFailed",
    "UnknownRelease",
]


class UnknownRelease(OverlayError):
    """The running torch isn't a release that the overlay has fingerprints for."""


class OptionError(OverlayError, ValueError):
    """An option has an unknown name or a value that it doesn't take."""


class TransferFailed(RuntimeError):
    """A `Transfer` can't be made, or run any more, since a rank failed or didn't come within the timeout. Close it, and
    make another one.

    Attributes:
        gone: the ranks whose programs ended or don't answer any more, ascending; to be given to the next one as
            ``gone=``. Empty if all ranks are there.
        is_written: True if targets of this rank were written: some, and others not, or half so; or all of them, and
            what came after that failed. False if none was written.
        failed: the rank whose own error ended it, if there was one.
    """

    def __init__(
        self, message: str, gone: tuple[int, ...] = (), is_written: bool = False, failed: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.gone, self.is_written, self.failed = gone, is_written, failed

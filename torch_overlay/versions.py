"""Torch's releases: which are supported, which one is running, and whether a target is what a release has there.

To add a release, add it to `SUPPORTED`, run ``tools/fingerprint.py`` with it, and add the rows in which it differs.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import pkgutil
import re
import sys
from typing import Any

from .errors import PatchError, UnknownRelease
from .patching import recognise
from .patching.patch import Kind, Patch

# Oldest first; setup.py reads this line and the next as text. A release with the same minor number as one of these is
# compared with that one, and recognised as far as its code is the same.
SUPPORTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
REQUIRED = ">=2.11.0,<2.16"
_SUPPORTS = f"torch_overlay supports torch {', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]}"
_FINAL = re.compile(r"\d+\.\d+(\.\d+)?(\.post\d+)?(\+.*)?")
_VERSION = re.compile(r"""^__version__[^=\n]*=\s*['"]([^'"]+)""", re.MULTILINE)  # in torch's own files


@dataclasses.dataclass(frozen=True)
class Release:
    """A torch release: its number, and the version text from which it was parsed."""

    number: tuple[int, int, int]
    text: str

    @property
    def name(self) -> str:
        """``2.13.0``, also for ``2.13.0+cpu``."""
        return ".".join(map(str, self.number))

    @property
    def compared_with(self) -> str | None:
        """The supported release whose code this one is expected to have: the one with the same minor number. None for a
        pre-release, whose code changes from night to night under one number, and if there is no such release."""
        if not re.fullmatch(_FINAL, self.text):
            return None
        return next((name for name in SUPPORTED if parse(name).number[:2] == self.number[:2]), None)

    @property
    def described(self) -> str:
        """The release as text for people, with the release whose code it is compared with, if that is another one."""
        return (
            self.text
            if self.compared_with in (None, self.name)
            else f"{self.text}, recognised by the code of {self.compared_with}"
        )

    @property
    def supported(self) -> bool:
        """True if its text, which alone is looked at, names a release whose code we know, or another patch release of
        one. Never for a pre-release."""
        return self.compared_with is not None

    def in_range(self, patch: Patch) -> bool:
        """Return whether a row of the series is for this release."""
        return patch.is_for(self.number)


def parse(text: str) -> Release:
    """Parse a version text.

    >>> parse("2.15.0a0+git1234").number, parse("2.13").name, parse("2.13.0+cpu").supported
    ((2, 15, 0), '2.13.0', True)
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise UnknownRelease(f"A torch release looks like 2.13.0, not {text!r}")
    major, minor, micro = (int(part or 0) for part in match.groups())
    return Release((major, minor, micro), text)


def running() -> Release:
    """Return the release of the torch that is imported, or that would be. Imports nothing."""
    release = installed()
    if release is None:
        raise UnknownRelease("torch isn't installed for this Python, so there is nothing to overlay")
    return release


def installed() -> Release | None:
    """Return the release of the torch that is imported, or that would be; None if torch isn't installed. Imports
    nothing."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return parse(str(torch.__version__))  # type: ignore[attr-defined]
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:  # a folder named torch, such as that of torch's sources, has no origin
        return None
    # The file that would be imported says the version. pip may know another torch, which comes later on the path.
    for name in ("version.py", "__init__.py"):
        file = pathlib.Path(spec.origin).with_name(name)
        text = re.search(_VERSION, file.read_text(encoding="utf-8")) if file.exists() else None
        if text is not None:
            return parse(text[1])
    from importlib import metadata

    try:
        return parse(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None


def refusal(needed: bool) -> str:
    """Return one line that says why a command can't run with this torch; empty if it can."""
    release = installed()
    if release is None:
        return f"torch isn't installed for this Python; {_SUPPORTS}" if needed else ""
    return "" if release.supported else unsupported(release)


def unsupported(release: Release) -> str:
    """Return one line that says that a release isn't supported, and which are."""
    return f"torch {release.text} isn't supported; {_SUPPORTS}"


@functools.cache
def fingerprints() -> dict[str, dict[str, dict[str, str]]]:
    """Return for each release and module the digest of the module's file, under "file", and the fingerprint of each
    target in it. Read once: don't change it."""
    data = pkgutil.get_data(__package__, "fingerprints.json")  # from a zip, too
    if data is None:
        raise PatchError("torch_overlay was imported by a loader that gives no data: fingerprints.json isn't read")
    return json.loads(data)


def require_supported(release: Release) -> None:
    """Check that there are fingerprints for the release."""
    if not release.supported:
        raise UnknownRelease(
            f"torch {release.text} isn't one of the releases that torch_overlay knows ({', '.join(SUPPORTED)}), so "
            "torch is left as it is. Install one of these, or call enable(strict=False) to apply the patches whose "
            "targets are recognised."
        )


def unrecognised(patch: Patch, release: Release, source: recognise.Source, live: Any = None) -> str | None:
    """Return None if the target is what the row was written for, or if the row adds it. Else what is there instead, in
    words.

    On a release without fingerprints (`enable(strict=False)`), a target is recognised if it equals that of any
    supported release for which the row is.
    """
    if not patch.qualname or patch.kind is Kind.ADD:
        return None
    names = (
        [release.compared_with]
        if release.compared_with is not None
        else [name for name in SUPPORTED if parse(name).in_range(patch)]
    )
    known = [fingerprints().get(name, {}).get(patch.module, {}) for name in names]
    if source.text is None:
        return f"{patch.module} has no source file to compare with (looked at {source.path})"
    # If the whole file is known, which is the usual case, nothing is parsed.
    if source.digest not in [module.get("file") for module in known]:
        if not any(patch.qualname in module for module in known):
            raise PatchError(f"{patch.target} has no fingerprint for torch {release.text}: run tools/fingerprint.py")
        fingerprint = source.fingerprint(patch.qualname)
        if fingerprint is None:
            return f"{source.path} defines no {patch.qualname}"
        if fingerprint not in [module.get(patch.qualname) for module in known]:
            return f"{source.path} defines {patch.qualname} with another body ({fingerprint})"
    # The file says what torch shipped. Somebody may have replaced the object since, in this process.
    if live is not None:
        other = recognise.stranger(source, patch.qualname, live)
        if other is not None:
            return f"somebody replaced it by {other}"
    return None

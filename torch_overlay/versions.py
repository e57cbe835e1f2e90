"""The only room that looks at torch's release: which are supported, which is running, which targets are recognised.

Adding a release is adding it here, running ``tools/fingerprint.py`` with it, and adding the rows in which it differs.
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

# Read by setup.py as text, oldest first; and what pip is told. Another release of the same minor number is taken for
# this one, and recognised as far as its code is the same.
SUPPORTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
REQUIRED = ">=2.11.0,<2.16"
_SUPPORTS = f"torch_overlay supports torch {', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]}"
_FINAL = re.compile(r"\d+\.\d+(\.\d+)?(\.post\d+)?(\+.*)?")
_VERSION = re.compile(r"""^__version__[^=\n]*=\s*['"]([^'"]+)""", re.MULTILINE)  # in torch's own files


@dataclasses.dataclass(frozen=True)
class Release:
    """A torch release: its number, and the whole version text that it came from."""

    number: tuple[int, int, int]
    text: str

    @property
    def name(self) -> str:
        """``2.13.0``, whatever was built for (``2.13.0+cpu``)."""
        return ".".join(map(str, self.number))

    @property
    def alike(self) -> str | None:
        """The supported release whose code this one is expected to have: its own number, or its minor number. A
        pre-release has none: its bodies change from night to night."""
        if not re.fullmatch(_FINAL, self.text):
            return None
        return next((name for name in SUPPORTED if parse(name).number[:2] == self.number[:2]), None)

    @property
    def said(self) -> str:
        """The release for people, with the one that it is taken for."""
        return self.text if self.alike in (None, self.name) else f"{self.text}, recognised by the code of {self.alike}"

    @property
    def supported(self) -> bool:
        """Whether there are fingerprints to recognise it by."""
        return self.alike is not None

    def in_range(self, patch: Patch) -> bool:
        """Whether the row is for this release."""
        return patch.is_for(self.number)


def parse(text: str) -> Release:
    """A release from its version text; UnknownRelease if that has no number.

    >>> parse("2.15.0a0+git1234").number, parse("2.13").name, parse("2.13.0+cpu").supported
    ((2, 15, 0), '2.13.0', True)
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise UnknownRelease(f"A torch release looks like 2.13.0, not {text!r}")
    major, minor, micro = (int(part or 0) for part in match.groups())
    return Release((major, minor, micro), text)


def running() -> Release:
    """The release of the torch in this process, or of the one that would be imported if none is yet."""
    release = found()
    if release is None:
        raise UnknownRelease("torch isn't installed for this Python, so there is nothing to overlay")
    return release


def found() -> Release | None:
    """The same, or None without a torch; imports nothing."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return parse(str(torch.__version__))  # type: ignore[attr-defined]
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:  # none, or a folder of that name, such as torch's sources
        return None
    for name in (
        "version.py",
        "__init__.py",
    ):  # what was built or installed is the first on the path, whatever pip knows
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
    """Why a command line can't go on with this torch, in one line; empty if it can.

    Args:
        needed: whether there must be one.
    """
    release = found()
    if release is None:
        return f"torch isn't installed for this Python; {_SUPPORTS}" if needed else ""
    return "" if release.supported else unsupported(release)


def unsupported(release: Release) -> str:
    """That a release isn't supported, and which are, in one line."""
    return f"torch {release.text} isn't supported; {_SUPPORTS}"


@functools.cache
def fingerprints() -> dict[str, dict[str, dict[str, str]]]:
    """By release and module, the digest of the module's file and the fingerprint of each target in it."""
    data = pkgutil.get_data(__package__, "fingerprints.json")  # from a zip, too
    if data is None:
        raise PatchError("torch_overlay was imported by a loader that gives no data: fingerprints.json isn't read")
    return json.loads(data)


def require_supported(release: Release) -> None:
    """UnknownRelease unless the release is one that has fingerprints."""
    if not release.supported:
        raise UnknownRelease(
            f"torch {release.text} isn't one of the releases that torch_overlay knows ({', '.join(SUPPORTED)}), so "
            "torch is left as it is. Install one of these, or call enable(strict=False) to apply the patches whose "
            "targets are recognised."
        )


def unrecognised(patch: Patch, release: Release, source: recognise.Source, live: Any = None) -> str | None:
    """None if the target is what the row was written for, else what came instead, in words that end a sentence.

    On a release without fingerprints of its own, a target is recognised if any release in the row's range had it so.
    ``live`` is the target's raw value where its module is imported.
    """
    if not patch.qualname or patch.kind is Kind.ADD:
        return None
    names = (
        [release.alike] if release.alike is not None else [name for name in SUPPORTED if parse(name).in_range(patch)]
    )
    known = [fingerprints().get(name, {}).get(patch.module, {}) for name in names]
    if source.text is None:
        return f"{patch.module} has no source file to compare with (looked at {source.path})"
    if source.digest not in [module.get("file") for module in known]:
        if not any(patch.qualname in module for module in known):
            raise PatchError(f"{patch.target} has no fingerprint for torch {release.text}: run tools/fingerprint.py")
        found = source.fingerprint(patch.qualname)
        if found is None:
            return f"{source.path} defines no {patch.qualname}"
        if found not in [module.get(patch.qualname) for module in known]:
            return f"{source.path} defines {patch.qualname} with another body ({found})"
    if live is not None:
        other = recognise.stranger(source, patch.qualname, live)
        if other is not None:
            return f"somebody replaced it by {other}"
    return None

"""Write torch_overlay/fingerprints.json: what each row's target looks like in a torch release, read from its files.

    python tools/fingerprint.py                     the torch of this Python
    python tools/fingerprint.py --torch DIR ...     other torch packages (a folder with torch's __init__.py), any Python
    python tools/fingerprint.py --check             write nothing; exit 1 if something would change

Run it when a row is added to the series or a release to versions.SUPPORTED. Entries of releases that aren't read stay.
No torch is imported.
"""

import argparse
import importlib.util
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch_overlay import series, versions  # noqa: E402
from torch_overlay.patching import recognise  # noqa: E402
from torch_overlay.patching.patch import Kind  # noqa: E402

FILE = ROOT / "torch_overlay" / "fingerprints.json"
# Known as files even without a row in them: most targets lie there, so a new row works before its fingerprint does.
ALWAYS = ("torch.distributed.device_mesh", "torch.distributed.tensor._redistribute")


def installed() -> pathlib.Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("fingerprint: this Python has no torch; name one with --torch DIR")
    return pathlib.Path(spec.submodule_search_locations[0])


def release_of(torch: pathlib.Path) -> versions.Release:
    """From the package's own version.py, without running it."""
    match = re.search(r"^__version__ = ['\"](.+)['\"]$", (torch / "version.py").read_text(), re.MULTILINE)
    if match is None:
        sys.exit(f"fingerprint: {torch / 'version.py'} has no __version__")
    return versions.parse(match[1])


def path_of(torch: pathlib.Path, module: str) -> pathlib.Path:
    base = torch.parent.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def read(torch: pathlib.Path, release: versions.Release) -> dict[str, dict[str, str]]:
    """{module: {"file": digest, target: fingerprint}} for every row of the series that is for this release."""
    patches = [p for p in series.PATCHES if p.qualname and release.in_range(p)]
    fingerprints: dict[str, dict[str, str]] = {}
    for module in sorted({*ALWAYS, *(p.module for p in patches)}):
        source = recognise.Source(module, str(path_of(torch, module)))
        if source.digest is None:
            sys.exit(f"fingerprint: torch {release.text} has no {source.path}; limit its rows' releases")
        fingerprints[module] = {"file": source.digest}
        for name in sorted({p.qualname for p in patches if p.module == module and p.kind is not Kind.ADD}):
            fingerprint = source.fingerprint(name)
            if fingerprint is None:
                sys.exit(f"fingerprint: torch {release.text} defines no {module}:{name}; limit its row's releases")
            fingerprints[module][name] = fingerprint
    return fingerprints


def render(table: dict[str, dict[str, dict[str, str]]]) -> str:
    table = dict(sorted(table.items(), key=lambda item: versions.parse(item[0]).number))
    return json.dumps(table, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", type=pathlib.Path, metavar="DIR", help="torch packages to read")
    parser.add_argument("--check", action="store_true", help="exit 1 if the file isn't up to date")
    arguments = parser.parse_args()
    known = versions.fingerprints()
    table = {release: known[release] for release in known if release in versions.SUPPORTED}
    for torch in arguments.torch or [installed()]:
        release = release_of(torch)
        if release.name not in versions.SUPPORTED or not release.supported:
            sys.exit(f"fingerprint: torch {release.text} isn't in versions.SUPPORTED {versions.SUPPORTED}")
        table[release.name] = read(torch, release)
        print(f"fingerprint: torch {release.text}: {sum(map(len, table[release.name].values()))} digests")
    text = render(table)
    if text == FILE.read_text():
        return 0
    if arguments.check:
        print(f"fingerprint: {FILE.relative_to(ROOT)} is out of date; run tools/fingerprint.py with each release")
        return 1
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

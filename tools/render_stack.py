"""Render the upstream stack: the overlay's code as commits on a PyTorch source tree.

    python tools/render_stack.py --onto ~/pytorch --commit         one commit a patch, ready for ghstack
    python tools/render_stack.py --onto ~/pytorch --out out/       files for `git am --keep-non-patch`
    python tools/render_stack.py --copy /tmp/patched               a copy of the installed torch, to render onto
    python tools/render_stack.py --onto /tmp/patched               the files in place, no commits
    python tools/render_stack.py --table                           what each patch changes
    python tools/render_stack.py --types                           what upstream's type checker finds after each patch
    python tools/render_stack.py --check                           render, import, run our suites, compare

What doesn't apply is named, with the file, the function and the reason, and then nothing is written.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Collection

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

try:
    from stack.copied import copy_torch, installed_torch
    from stack.history import Repository, text_of
    from stack.mail import mail
    from stack.message import PatchMessage, StackError, read_series
    from stack.render import Prefix, missing_files, new_files, no_collection
    from stack.rules import breaches, numbers, refuse, unused
    from stack.table import table
    from stack.tree import Tree, write
    from stack.typing_errors import check_types
except ModuleNotFoundError as missing:
    if missing.name != "libcst":
        raise
    sys.exit("render_stack reads syntax trees with libcst, which isn't there: pip install -e '.[dev]'")

from torch_overlay.errors import UnknownRelease  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onto", metavar="PATH", help="a PyTorch checkout, or a folder with a copy of torch")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--commit", action="store_true", help="one commit a patch on the checkout's branch")
    how.add_argument("--out", metavar="DIR", help="one file a patch, for `git am`")
    how.add_argument("--table", action="store_true", help="print what each patch changes, and write nothing")
    how.add_argument("--types", action="store_true", help="check the types after each patch, and write nothing")
    parser.add_argument(
        "--only",
        metavar="N",
        type=int,
        help="the first N patches; with --check: after these alone",
    )
    parser.add_argument("--copy", metavar="DIR", help="copy the installed torch's Python files to DIR/torch first")
    parser.add_argument(
        "--check", action="store_true", help="run our suites on a patched copy, compare with the overlay's"
    )
    parser.add_argument("--suites", metavar="PATH", nargs="+", help="with --check: what to run, all of it unless said")
    asked = parser.parse_args(arguments)
    if not (asked.onto or asked.copy or asked.check or asked.table or asked.types):
        parser.error("say --onto PATH, --copy DIR, --table, --types or --check")
    try:
        return run(asked)
    except (StackError, UnknownRelease) as error:
        print(f"render_stack: {error}", file=sys.stderr)
        return 1


def run(asked: argparse.Namespace) -> int:
    messages = read_series()
    if left := missing_files(messages):
        raise StackError(f"No patch brings {', '.join(sorted(left))}: name them in the 'Files:' of one")
    if asked.only is not None and not 1 <= asked.only <= len(messages):
        raise StackError(f"--only takes 1 to {len(messages)}, got {asked.only}")
    if asked.check:
        from stack.check import SUITES, check, tops

        return check(messages, [asked.only] if asked.only else tops(messages), asked.suites or SUITES)
    if asked.copy:
        copy_torch(installed_torch(), pathlib.Path(asked.copy))
    if asked.table:
        tree = Tree.at(asked.onto or installed_torch().parent)
        count = asked.only or len(messages)
        print(table(messages[:count], states(tree, messages, count)), end="")
        return 0
    if asked.types:
        shown = messages[: asked.only or len(messages)]
        tree = Tree.at(installed_torch().parent)  # pyrefly needs the rest of torch, too
        return check_types([message.name for message in shown], states(tree, messages, len(shown)))
    if asked.onto is None:
        return 0
    if asked.commit:
        return commit(pathlib.Path(asked.onto), messages, asked.only or len(messages))
    tree = Tree.at(asked.onto)
    if asked.out:
        return mails(tree, messages, pathlib.Path(asked.out), asked.only or len(messages))
    count = asked.only or len(messages)
    release = tree.release.name
    files = rendered(tree, messages, count)
    write(tree.root, dict(files))
    print(f"{count} of {len(messages)} patches, {len(files)} files, torch {release}")
    return 0


def rendered(tree: Tree, messages: list[PatchMessage], count: int) -> dict[str, str]:
    """The files after the first ``count`` patches."""
    return Prefix(tree, messages[:count]).files()


def states(tree: Tree, messages: list[PatchMessage], count: int) -> list[dict[str, str | None]]:
    """The files before the first patch and after each; every path in every state, None where it isn't there.

    Raises StackError for patches that break upstream's rules.
    """
    with no_collection():
        after = [rendered(tree, messages, number) for number in range(1, count + 1)]
    paths = {path for files in after for path in files}
    found: list[dict[str, str | None]] = [{path: tree.read(path) if tree.exists(path) else None for path in paths}]
    for files in after:
        found.append({path: files.get(path, found[0][path]) for path in paths})
    new = {f"torch/distributed/{file}" for file in new_files()}
    wrong = [breach for each in zip(messages, found, found[1:], strict=False) for breach in breaches(*each, new)]
    if count == len(messages):
        wrong += unused(found[0], found[-1])
    refuse(wrong)
    return found


def mails(tree: Tree, messages: list[PatchMessage], folder: pathlib.Path, count: int) -> int:
    """The first ``count`` patches as files in the folder, with a line about each."""
    names = [f"{number:04}-{message.name}.patch" for number, message in enumerate(messages[:count], 1)]
    _require_folder(folder, names)
    author = Repository(tree.root).author()
    all_states = states(tree, messages, count)
    files = {}
    for number, name in enumerate(names, 1):
        before, after = all_states[number - 1 : number + 1]
        there = {path: text for path, text in after.items() if text is not None}
        files[name] = mail(messages[number - 1], author, number, count, before, there)
        print(f"{folder / name} ({numbers(before, after)})")
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, dict(files))
    return 0


def _require_folder(folder: pathlib.Path, names: Collection[str]) -> None:
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise StackError(f"--out takes a folder to put files into, and {path} is a file")
    others = sorted(path.name for path in folder.glob("*.patch") if path.name not in names)
    if others:
        raise StackError(
            f"{folder} has {', '.join(others)} of another rendering, which git am {folder}/*.patch would take, too. "
            "Remove them, or give another folder."
        )


def commit(root: pathlib.Path, messages: list[PatchMessage], count: int) -> int:
    repository = Repository(root.resolve())
    repository.require_clean()
    base, trailers = repository.rendered(messages)
    if len(trailers) > count:
        raise StackError(
            f"The branch has {len(trailers)} commits of the stack, and --only {count} would drop the others with their "
            "trailers; render all of them, or reset the branch to where you want to begin."
        )
    all_states = states(Tree.at(root, base), messages, count)
    head = base
    for message, before, after in zip(messages, all_states, all_states[1:], strict=False):
        changed = {path: text for path, text in after.items() if text != before[path]}
        head = repository.commit(head, changed, text_of(message, trailers.get(message.title, "")))
        print(f"{head[:12]} {message.title} ({numbers(before, after)})")
    repository.move_to(head)
    return 0


if __name__ == "__main__":
    sys.exit(main())

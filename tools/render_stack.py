"""Render the upstream stack: the overlay's code as commits on a PyTorch source tree.

    python tools/render_stack.py --onto ~/pytorch --commit         one commit a patch, ready for ghstack
    python tools/render_stack.py --copy /tmp/patched               a copy of the installed torch, to render onto
    python tools/render_stack.py --onto /tmp/patched               the files in place, no commits
    python tools/render_stack.py --table                           what each patch changes
    python tools/render_stack.py --check                           render, import, run our suites, compare

What doesn't apply is named, with the file, the function and the reason, and then nothing is written.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from stack.history import Repository, text_of  # noqa: E402
from stack.message import PatchMessage, StackError, read_series  # noqa: E402
from stack.render import State, missing_files, new_files  # noqa: E402
from stack.render import states as rendered_states  # noqa: E402
from stack.rules import breaches, numbers, refuse, table, unused, unused_in_fixes  # noqa: E402
from stack.tree import Tree, copy_torch, installed_torch, write  # noqa: E402

from torch_overlay.errors import UnknownRelease  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onto", metavar="PATH", help="a PyTorch checkout, or a folder with a copy of torch")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--commit", action="store_true", help="one commit a patch on the checkout's branch")
    how.add_argument("--table", action="store_true", help="print what each patch changes, and write nothing")
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
    if not (asked.onto or asked.copy or asked.check or asked.table):
        parser.error("say --onto PATH, --copy DIR, --table or --check")
    if asked.commit and not asked.onto:
        parser.error("--commit needs --onto PATH, a checkout")
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
    messages = messages[: asked.only or len(messages)]
    if asked.table:
        print(table(messages, states(Tree.at(asked.onto or installed_torch().parent), messages)), end="")
    elif asked.commit:
        return commit(pathlib.Path(asked.onto), messages)
    elif asked.onto:
        tree = Tree.at(asked.onto)
        before, *_, after = rendered_states(tree, messages)
        files = {path: text for path, text in after.items() if text != before[path]}
        write(tree.root, files)
        print(f"{len(messages)} patches, {len(files)} files, torch {tree.release.name}")
    return 0


def states(tree: Tree, messages: list[PatchMessage]) -> list[State]:
    """The files before the first patch and after each. Raises StackError for patches that break upstream's rules."""
    rendered = rendered_states(tree, messages)
    new = {f"torch/distributed/{file}" for file in new_files()}
    refused = [
        breach for step in zip(messages, rendered, rendered[1:], strict=False) for breach in breaches(*step, new)
    ]
    refused += unused_in_fixes(messages, rendered)
    refuse([*refused, *(unused(rendered[0], rendered[-1]) if not missing_files(messages) else ())])
    return rendered


def commit(root: pathlib.Path, messages: list[PatchMessage]) -> int:
    """Those of an earlier rendering are replaced."""
    repository = Repository(root.resolve())
    repository.require_clean()
    repository.git("var", "GIT_COMMITTER_IDENT")  # if git knows no name, raise before minutes of rendering
    base, trailers = repository.rendered(read_series())
    if len(trailers) > len(messages):
        raise StackError(
            f"The branch has {len(trailers)} commits of the stack, and --only {len(messages)} would drop the others "
            "with their trailers; render all of them, or reset the branch to where you want to begin."
        )
    # Git refuses where that would lose something.
    repository.git("reset", "--quiet", "--keep", commits(repository, base, messages, trailers))
    return 0


def commits(repository: Repository, base: str, messages: list[PatchMessage], trailers: Mapping[str, str]) -> str:
    """Make the commits, without moving a branch, and print a line about each; the last of them."""
    rendered = states(Tree.at(repository.root, base), messages)
    for message, before, after in zip(messages, rendered, rendered[1:], strict=False):
        changed = {path: text for path, text in after.items() if text != before[path]}
        base = repository.commit(base, changed, text_of(message, trailers.get(message.title, "")))
        print(f"{base[:12]} {message.title} ({numbers(before, after)})")
    return base


if __name__ == "__main__":
    sys.exit(main())

"""The stack as commits: made without touching the work tree until all are there, trailers of earlier ones kept."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .message import PatchMessage, StackError

# What ghstack writes to the end of a commit's message, and knows its pull request by.
TRAILER = re.compile(r"^(ghstack-[a-z-]+:|Pull[ -]Request(?:[ -]resolved)?:|stack-info:|Differential Revision:)", re.I)


@dataclass(frozen=True)
class Repository:
    root: pathlib.Path

    def git(self, *command: str, text: str | None = None, env: Mapping[str, str] | None = None) -> str:
        ended = subprocess.run(
            ["git", "-C", str(self.root), *command],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(env or {})},
        )
        if ended.returncode:
            raise StackError(f"git {' '.join(command[:2])} failed in {self.root}: {ended.stderr.strip()}")
        return ended.stdout.strip()

    def require_clean(self) -> None:
        changed = self.git("status", "--porcelain", "--untracked-files=no")
        if changed:
            raise StackError(f"{self.root} has changes that aren't committed; commit or stash them first:\n{changed}")

    def rendered(self, messages: Sequence[PatchMessage]) -> tuple[str, dict[str, str]]:
        """The commit that the stack stands on, and the trailers of its commits by title where HEAD has them already."""
        titles = {message.title for message in messages}
        trailers: dict[str, str] = {}
        commit = self.git("rev-parse", "HEAD")
        while True:
            title, _, body = self.git("log", "-1", "--format=%B", commit).partition("\n")
            if title.strip() not in titles:
                return commit, trailers
            trailers[title.strip()] = "\n".join(line for line in body.splitlines() if TRAILER.match(line))
            commit = self.git("rev-parse", f"{commit}^")

    def commit(self, parent: str, files: Mapping[str, str | None], message: str) -> str:
        """A commit with these files changed (None: gone), as a value; no branch or work tree moves."""
        index = {"GIT_INDEX_FILE": str(pathlib.Path(self.git("rev-parse", "--absolute-git-dir")) / "stack-index")}
        try:
            self.git("read-tree", parent, env=index)
            for path, text in sorted(files.items()):
                if text is None:
                    self.git("update-index", "--force-remove", path, env=index)
                    continue
                blob = self.git("hash-object", "-w", "--stdin", text=text)
                self.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", env=index)
            tree = self.git("write-tree", env=index)
        finally:
            pathlib.Path(index["GIT_INDEX_FILE"]).unlink(missing_ok=True)
        # One date for the same content on the same parent: bytes are stable.
        date = self.git("log", "-1", "--format=%cI", parent)
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        return self.git("commit-tree", tree, "-p", parent, text=message, env=dates)


def text_of(message: PatchMessage, trailers: str = "") -> str:
    return f"{message.title}\n\n{message.body}" + (f"\n{trailers}\n" if trailers else "")

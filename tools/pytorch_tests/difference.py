"""What differs between the two sides, case by case, and what an expectation says of it. Knows no pytest."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping, Sequence

from torch_overlay import versions
from torch_overlay.patching.patch import BOUND

from .runner import GOOD, SKIPPED, Case, Results


class Verdict(enum.Enum):
    SAME = "same"
    FAILING = "still failing"
    FIXED = "fixed"
    BROKEN = "broken"
    SKIPPED = "skipped on one side"


def verdict(stock: str | None, other: str | None) -> Verdict:
    """Of two outcomes; None is a case that this side doesn't have.

    >>> verdict("passed", "timeout"), verdict("skipped", "skipped"), verdict("error", "failed")
    (<Verdict.BROKEN: 'broken'>, <Verdict.SAME: 'same'>, <Verdict.FAILING: 'still failing'>)
    """
    kinds = [_kind(stock), _kind(other)]
    if kinds[0] == kinds[1]:
        return Verdict.FAILING if kinds[0] == "bad" else Verdict.SAME
    if kinds[1] == "bad" or kinds == ["good", "none"]:
        return Verdict.BROKEN
    if kinds[1] == "good" and kinds[0] != "skipped":
        return Verdict.FIXED
    return Verdict.SKIPPED


def _kind(outcome: str | None) -> str:
    if outcome is None:
        return "none"
    return "good" if outcome in GOOD else "skipped" if outcome in SKIPPED else "bad"


@dataclasses.dataclass(frozen=True)
class Difference:
    name: str  # file::Class::test
    stock: Case | None
    other: Case | None

    @property
    def verdict(self) -> Verdict:
        return verdict(*(case.outcome if case else None for case in (self.stock, self.other)))

    @property
    def differs(self) -> bool:
        return self.verdict not in (Verdict.SAME, Verdict.FAILING)

    @property
    def is_loss(self) -> bool:
        """Whether stock is better: broken, or a test that passed there and isn't run any more."""
        passed = self.stock is not None and self.stock.outcome in GOOD
        return self.verdict is Verdict.BROKEN or (self.verdict is Verdict.SKIPPED and passed)

    @property
    def skipped_on_both(self) -> bool:
        return all(case is not None and case.outcome in SKIPPED for case in (self.stock, self.other))


def compare(file: str, stock: Results, other: Results) -> list[Difference]:
    names = dict.fromkeys([*stock.collected, *other.collected, *stock.cases, *other.cases])
    return [Difference(f"{file}::{name}", stock.cases.get(name), other.cases.get(name)) for name in names]


@dataclasses.dataclass(frozen=True)
class Expected:
    """A difference that is meant; the run fails when it is gone. ``pattern`` is a name with ``*`` and ``?``,
    ``releases`` a condition on torch (``">=2.13.0,<2.15.0"``), outside of which the entry says nothing."""

    pattern: str
    reason: str
    releases: str = ""
    verdict: Verdict = Verdict.BROKEN
    side: str = "overlay"

    def matches(self, name: str) -> bool:
        text = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in self.pattern)
        return re.fullmatch(text, name, re.DOTALL) is not None

    def in_force(self, side: str, release: tuple[int, ...]) -> bool:
        bounds = [(sign, versions.parse(number).number) for sign, number in BOUND.findall(self.releases)]
        return side == self.side and all(release >= n if sign == ">=" else release < n for sign, n in bounds)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the run comes to: losses that nobody expected, and entries that no longer hold, each with a sentence."""

    unexpected: tuple[Difference, ...]
    explained: Mapping[str, Expected]
    stale: tuple[tuple[Expected, str], ...]

    @property
    def passed(self) -> bool:
        return not self.unexpected and not self.stale


def judge(differences: Sequence[Difference], entries: Iterable[Expected], whole: Iterable[str] = ()) -> Judgement:
    """Compare with the entries in force. ``whole`` names the files that ran with all their cases."""
    explained: dict[str, Expected] = {}
    stale = []
    for entry in entries:
        ran = [case for case in differences if entry.matches(case.name)]
        hits = [case for case in ran if case.verdict is entry.verdict]
        explained |= {case.name: entry for case in hits}
        if hits:
            continue
        judged = [case for case in ran if not case.skipped_on_both]
        if judged:
            now = ", ".join(sorted({case.verdict.value for case in judged}))
            stale.append((entry, f"isn't {entry.verdict.value} any more, but {now}"))
        elif not ran and entry.pattern.partition("::")[0] in whole:
            stale.append((entry, "matches no test case of its file any more"))
    losses = tuple(case for case in differences if case.is_loss and case.name not in explained)
    return Judgement(losses, explained, tuple(stale))

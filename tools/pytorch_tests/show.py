"""What people see: the table, each difference with its last words, and the verdict."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from torch_overlay.show.words import aligned

from .difference import Difference, Judgement, Verdict
from .runner import Results

SHORT = {Verdict.FAILING: "failing", Verdict.SKIPPED: "skipped"}  # above the columns of the table


def table(differences: Sequence[Difference], results: Mapping[tuple[str, str], Results], other: str) -> list[str]:
    """A row a file: how its cases compare, and how long each side took. Verdicts that no case has are left out."""
    counts: dict[str, collections.Counter[Verdict]] = collections.defaultdict(collections.Counter)
    for difference in differences:
        counts[difference.name.partition("::")[0]][difference.verdict] += 1
    total = sum(counts.values(), collections.Counter())
    verdicts = [each for each in Verdict if each is Verdict.SAME or total[each]]
    rows = [("file", *(SHORT.get(verdict, verdict.value) for verdict in verdicts), "stock", other)]
    for file, count in counts.items():
        seconds = [f"{results[side, file].seconds:.0f} s" for side in ("stock", other)]
        rows.append((file, *(str(count[verdict] or "") for verdict in verdicts), *seconds))
    if len(counts) > 1:
        rows.append(("sum", *(str(total[verdict]) for verdict in verdicts), "", ""))
    return aligned(rows, right=range(1, len(rows[0])))


def differences(cases: Sequence[Difference], judgement: Judgement) -> Iterator[str]:
    for verdict in (Verdict.FIXED, Verdict.SKIPPED, Verdict.BROKEN):
        some = [difference for difference in cases if difference.verdict is verdict]
        yield from [f"\n{verdict.value}"] if some else []
        for difference in some:
            ends = [case.outcome if case else "not there" for case in (difference.stock, difference.other)]
            yield f"  {difference.name}: {ends[0]} -> {ends[1]}"
            entry = judgement.explained.get(difference.name)
            lines = (
                f"expected: {entry.reason}" if entry else difference.other.why if difference.other else ""
            ).splitlines()
            shown = [*lines[:-5][:1], *lines[-5:]] if difference.is_loss or entry else []
            yield from (f"      {line}" for line in shown)


def verdict(judgement: Judgement) -> Iterator[str]:
    for entry, why in judgement.stale:
        yield f"expectation {entry.pattern} {why}. Its reason was: {entry.reason}"
    if judgement.unexpected:
        yield f"{len(judgement.unexpected)} test cases are worse than on stock, and nobody expected it. To see whether"
        yield "they are so again, run these alone: --select FILE::CLASS::TEST"
    if judgement.passed:
        expected = f"; {len(judgement.explained)} are expected" if judgement.explained else ""
        yield f"nothing is worse than on stock{expected}"

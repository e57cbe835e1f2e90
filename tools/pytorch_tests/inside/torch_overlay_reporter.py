"""A pytest plugin that runs inside the tested process: writes a line as each case begins and ends.

So a run that hangs or is killed has told what it finished. The folder holds nothing else, since it is on the path of
the tests. The job is a JSON file named by PYTORCH_TESTS_JOB: where to write, what to leave out, what to take.
"""

import json
import os
import re
import sys

import pytest

# What torch's MultiProcContinuousTest says of the cases after a failed one: they weren't run, so nothing is known.
NOT_RUN = "Previous test failed, skipping"


def case_of(nodeid):
    return nodeid.partition("::")[2] or nodeid


def glob(pattern):
    """A pattern in which only ``*`` and ``?`` are special, so that parameters in brackets stay themselves."""
    return re.compile("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern), re.DOTALL)


class Reporter:
    def __init__(self, job):
        self.report = job["report"]
        self.done, self.only, self.fork = set(job["done"]), job["only"], job["fork"]
        self.name = job["name"]
        self.outcomes = {}

    def write(self, **line):
        with open(self.report, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def taken(self, case):
        wanted = not self.only or any(glob(pattern).fullmatch(f"{self.name}::{case}") for pattern in self.only)
        return wanted and case not in self.done

    def pytest_collection_modifyitems(self, config, items):
        left = [item for item in items if not self.taken(case_of(item.nodeid))]
        if left:
            items[:] = [item for item in items if self.taken(case_of(item.nodeid))]
            config.hook.pytest_deselected(items=left)

    def pytest_collection_finish(self, session):
        self.write(collected=[case_of(item.nodeid) for item in session.items])
        if self.fork:
            fork_ranks()

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(case="(collection)", outcome="error", why=last_words(report.longreprtext))

    def pytest_runtest_logstart(self, nodeid):
        self.outcomes[nodeid] = "passed", ""
        self.write(case=case_of(nodeid), began=True)

    def pytest_runtest_logreport(self, report):
        outcome, why = self.outcomes.get(report.nodeid, ("passed", ""))
        if report.failed and outcome not in ("failed", "error"):
            outcome, why = "failed" if report.when == "call" else "error", last_words(report.longreprtext)
        elif report.skipped and outcome == "passed":
            outcome, why = "skipped", report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if hasattr(report, "wasxfail"):
                outcome, why = "xfailed", report.wasxfail
        elif report.passed and hasattr(report, "wasxfail") and report.when == "call":
            outcome, why = "xpassed", report.wasxfail
        self.outcomes[report.nodeid] = outcome, why

    def pytest_runtest_logfinish(self, nodeid):
        outcome, why = self.outcomes.pop(nodeid)
        if outcome == "skipped" and NOT_RUN in why:
            outcome = "not run"
        self.write(case=case_of(nodeid), outcome=outcome, why=why)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus):
        self.write(ended=int(exitstatus))


def last_words(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-12:])[-2000:]


def fork_ranks():
    """Ranks are forked from here, with torch already imported, instead of spawned."""
    distributed = sys.modules.get("torch.testing._internal.common_distributed")
    if distributed is None:
        return
    import torch.multiprocessing

    torch.multiprocessing.set_start_method("fork", force=True)
    process = torch.multiprocessing.get_context("fork").Process
    distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(process)


def pytest_configure(config):
    with open(os.environ["PYTORCH_TESTS_JOB"], encoding="utf-8") as job:
        config.pluginmanager.register(Reporter(json.load(job)))

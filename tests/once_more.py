"""A pytest plugin that runs a failed test marked `launch` or `train` once more, alone, after all others.

So it does with one whose process of pytest-xdist was killed.

Real processes and signals may have unexpected races. If the second run passes, so does the session; the first failure
is shown in full under FLAKY, and counted in the summary. (pytest-rerunfailures repeats a test at once, while others
run, and does not show the first failure.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded_commands import patience

_DEADLINE_S = 600
# Set in the second run. Not DDPSHIM_…: the library would refuse it as an unknown option.
_AGAIN = "TESTS_ONCE_MORE"
_MARKS = {"launch", "train"}
_NEVER = {"unit", "ranks"}  # a folder is a keyword too, as tests/launch is
_MAX_RERUN = 3  # if more tests fail at once, the cause is not a race


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out the files that a process that ended had not finished; pytest-xdist 3.8 hands out those it had, too.

    A process that is given such a file waits for a test of it for ever.
    """
    from xdist.scheduler import LoadFileScheduling

    class Unfinished(LoadFileScheduling):
        def remove_node(self, node: Any) -> Any:
            files = self.assigned_work[node].items()
            self.assigned_work[node] = {file: tests for file, tests in files if not all(tests.values())}
            return super().remove_node(node)

    return Unfinished(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Say how a process of tests ended that should not have."""
    if error:
        print(f"\n{node.gateway.id} ended: exit code {node.gateway._io.popen.wait(10)}", flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Run failed tests once more, in the process that shows the summary, before the summary."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or _AGAIN in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    failed = reporter.stats.get("failed", [])
    marks = [(one, {*one.keywords}) for one in failed]  # none: its process ended in the middle of it
    again = [one for one, theirs in marks if not theirs or (_MARKS & theirs and not _NEVER & theirs)]
    if not 0 < len(again) <= _MAX_RERUN:
        return
    for report in again:
        reporter.write_sep("-", f"once more, alone: {report.nodeid}")
        if _passes(report.nodeid, session.config):
            failed.remove(report)
            reporter.stats.setdefault("flaky", []).append(report)
            session.testsfailed -= 1
    if not failed:
        del reporter.stats["failed"]
        if not reporter.stats.get("error") and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    yield  # to be below pytest's own summary, which has a line for each skipped test: there nobody reads on
    for report in terminalreporter.stats.get("flaky", []):
        terminalreporter.write_sep("=", f"FLAKY {report.nodeid}: failed, then passed alone", yellow=True)
        terminalreporter.write_line(report.longreprtext)
        for name, content in report.sections:
            terminalreporter.write_sep("-", name)
            terminalreporter.write_line(content)


def _passes(nodeid: str, config: pytest.Config) -> bool:
    root = Path(config.rootpath)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", nodeid]
    try:
        environ, limit_s = {**os.environ, _AGAIN: "1"}, patience(_DEADLINE_S)
        ran = subprocess.run(command, cwd=root, env=environ, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0

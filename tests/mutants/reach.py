"""Record which functions of ampkit a test reaches: each in a line, the test and the file and first line of the function.

A copy of the project has this file as sitecustomize.py, which Python imports first: so the processes that a test starts record too.
"""

import os
import sys
import threading

RECORD, FOLDER = "AMPKIT_REACH", "AMPKIT_REACH_OF"


def start():
    """Look at every call in this process from now on; returns a function that begins a test's record anew."""
    record = os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    prefix = os.environ[FOLDER] + "/"
    kept = {}  # by id, for as long as the code lives: a hash of code is slow
    seen = set()

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and id(code) not in seen:
            seen.add(id(code))
            kept[id(code)] = code
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
            if test and code.co_filename.startswith(prefix + "ampkit/"):
                os.write(record, f"{test}\t{code.co_filename.removeprefix(prefix)}:{code.co_firstlineno}\n".encode())

    sys.setprofile(look)
    threading.setprofile(look)
    return seen.clear


if RECORD in os.environ:
    begin_anew = start()


class Plugin:
    """A plugin of pytest: it begins a new record for each test, and writes the test's seconds in a line of their own."""

    def __init__(self):
        self.begin_anew = start()
        self.seconds = {}
        self.fixture = None  # while it is set up: the test that it is set up for

    def pytest_runtest_logstart(self, nodeid):
        self.begin_anew()
        self.fixture = None

    def pytest_fixture_setup(self, fixturedef, request):
        """Record the reach of a shared fixture under the fixture's name, and that name in a line for each of its tests."""
        test = os.environ["PYTEST_CURRENT_TEST"] if self.fixture is None else self.fixture
        self.fixture = None
        if fixturedef.scope != "function":
            self.fixture, name = test, f"fixture:{fixturedef.baseid}::{fixturedef.argname}"
            known = [(item.nodeid, item._fixtureinfo.name2fixturedefs) for item in request.session.items]
            sharing = {nodeid for nodeid, fixtures in known if fixturedef in fixtures.get(fixturedef.argname, ())}
            with open(os.environ[RECORD], "a") as record:
                record.writelines(f"{nodeid}\t{name}\n" for nodeid in sharing | {test.rpartition(" (")[0]})
            test = f"{name} (setup)"
        os.environ["PYTEST_CURRENT_TEST"] = test
        self.begin_anew()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.seconds[report.nodeid] = -1e9
        if report.when == "teardown" and self.seconds[report.nodeid] >= 0:
            with open(os.environ[RECORD], "a") as record:
                record.write(f"{report.nodeid}\tseconds:{self.seconds[report.nodeid]:.3f}\n")

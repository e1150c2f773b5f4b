"""Tests of the drop-in run with it installed, and take it away again."""

import pytest

import ampkit
import ampkit.apex
from ampkit.casting import engine


@pytest.fixture(autouse=True)
def apex_installed():
    ampkit.apex.install()
    from apex.amp import _amp_state

    before, registered = dict(vars(_amp_state)), dict(engine._registered)
    yield
    ampkit.close()
    for handle in list(_amp_state._opened_by_init):
        handle._deactivate()
    vars(_amp_state).update(before)
    engine._registered.clear()
    engine._registered.update(registered)
    ampkit.apex.uninstall()


@pytest.fixture
def amp(apex_installed):
    from apex import amp

    return amp

"""Tests of the drop-in run with it installed, and take it away again."""

import pytest

import ampkit
import ampkit.apex


@pytest.fixture(autouse=True)
def apex_installed():
    ampkit.apex.install()
    from apex.amp import _amp_state

    before = dict(vars(_amp_state))
    yield
    ampkit.close()
    for handle in list(_amp_state._opened_by_init):
        handle._deactivate()
    vars(_amp_state).update(before)
    ampkit.apex.uninstall()


@pytest.fixture
def amp(apex_installed):
    from apex import amp

    return amp

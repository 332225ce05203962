"""What the tests of every chapter's exercises share."""

import pytest
from exercise_tools import load


@pytest.fixture(scope="module")
def solutions(request):
    """What the solved notebook defines. The test module's NAME says which one."""
    return load("solutions", request.module.NAME)


@pytest.fixture(scope="module")
def stubs(request):
    """What the unsolved notebook defines."""
    return load("exercises", request.module.NAME)

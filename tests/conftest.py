"""What the tests of every chapter's exercises share.

exercise_tools is imported where it is used: it needs nbformat, and the GPU tests must run where there is no Jupyter.
"""

import pytest


@pytest.fixture(scope="module")
def solutions(request):
    """What the solved notebook defines. The test module's NAME says which one."""
    from exercise_tools import load

    return load("solutions", request.module.NAME)


@pytest.fixture(scope="module")
def stubs(request):
    """What the unsolved notebook defines."""
    from exercise_tools import load

    return load("exercises", request.module.NAME)

"""What the tests of every chapter's exercises share.

exercise_tools is imported where it is used: it needs nbformat, and the GPU tests must run where there is no Jupyter.
"""

import pytest


@pytest.fixture(scope="module")
def solutions(request):
    """What the solved notebook defines. The test module's NAME, or its TestExercises' name, says which one."""
    from exercise_tools import load

    return load("solutions", _name(request.module))


@pytest.fixture(scope="module")
def stubs(request):
    """What the unsolved notebook defines."""
    from exercise_tools import load

    return load("exercises", _name(request.module))


def _name(module):
    return module.TestExercises.name if hasattr(module, "TestExercises") else module.NAME


def pytest_generate_tests(metafunc):
    """Spread the tests of an ExerciseContract over its exercises, and over their wrong answers."""
    contract = metafunc.cls
    if not hasattr(contract, "wrong"):
        return
    if "mistake" in metafunc.fixturenames:
        pairs = [(number, mistake) for number, mistakes in contract.wrong.items() for mistake in mistakes]
        metafunc.parametrize("number, mistake", pairs)
    elif "number" in metafunc.fixturenames:
        metafunc.parametrize("number", list(contract.answers))
    elif "made_from" in metafunc.fixturenames:
        metafunc.parametrize("made_from", list(contract.right))

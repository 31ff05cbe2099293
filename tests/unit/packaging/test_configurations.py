# SPDX-License-Identifier: Apache-2.0
"""``docs/configurations.md`` is up to date, complete, and names tests that exist and run when it says."""

import importlib
from collections.abc import Iterator

import pytest

from tests.unit.packaging.configurations import PAGE, names, page, shown


def test_page_is_up_to_date() -> None:
    assert page() == PAGE.read_text(), "run python -m tests.unit.packaging.configurations"


def test_every_example_has_a_real_run() -> None:
    assert sorted(shown()) == names()


@pytest.mark.parametrize("name", names())
def test_its_tests_exist_and_run_when_the_page_says(name: str) -> None:
    one = shown()[name]
    for test in {one.run, one.scored}:
        assert ("long" in set(marks(test))) == (not one.in_ci), test


def marks(test: str) -> Iterator[str]:
    """Names of the marks that pytest gives a test: those of its module, its function and its parameters."""
    file, _, call = test.partition("::")
    function, _, parameter = call.rstrip("]").partition("[")
    module = importlib.import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}")
    own = getattr(module, "pytestmark", [])
    found = [*(own if isinstance(own, list) else [own]), *getattr(getattr(module, function), "pytestmark", [])]
    yield from (mark.name for mark in found)
    if parameter:
        (parameters,) = (mark.args[1] for mark in found if mark.name == "parametrize")
        (chosen,) = (one for one in parameters if one.id == parameter)
        yield from (mark.name for mark in chosen.marks)

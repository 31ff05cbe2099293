# SPDX-License-Identifier: Apache-2.0
"""The documentation lists every check and shows the messages that it really gives."""

import pytest

from rlinf_phyai.validation import ANY_BACKEND, FILES, PHYAI_ONLY
from rlinf_phyai.validation.options import UNSUPPORTED
from tests.unit.validation.cases import ERRORS, WARNINGS
from tests.unit.validation.conftest import MakeConfig
from tests.unit.validation.page import PAGE, depends_on_the_installation, page

HOW = "the page is out of date: run python -m tests.unit.validation.page"


@pytest.fixture(scope="module")
def written() -> str:
    return PAGE.read_text()


def test_page_lists_every_check(written: str) -> None:
    for check in ANY_BACKEND + PHYAI_ONLY + FILES:
        assert check.__doc__, f"{check.__name__} has no docstring"
        assert f"\n### {check.__name__}\n" in written, HOW
    for option in UNSUPPORTED:
        assert option.reason in written, HOW


def test_page_shows_the_real_messages(written: str, config: MakeConfig) -> None:
    assert page(config).rstrip() + "\n" == written, HOW
    assert sum(not depends_on_the_installation(case) for case in ERRORS + WARNINGS) > 100

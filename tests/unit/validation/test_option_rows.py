# SPDX-License-Identifier: Apache-2.0
"""``docs/options.md`` is up to date, complete, and names tests that exist."""

import re

import pytest

from rlinf_phyai.validation.model import OPENPI_OPTIONS
from tests.unit.validation.conftest import MakeConfig
from tests.unit.validation.option_rows import NOT_CHOSEN, PAGE, ROWS, TESTS, Row, judgement, page


def test_page_is_up_to_date(config: MakeConfig) -> None:
    assert page(config).rstrip() + "\n" == PAGE.read_text(), "run python -m tests.unit.validation.option_rows"


def test_every_option_has_a_row() -> None:
    named = {name for row in ROWS for name in row.options}
    assert named | set(NOT_CHOSEN) == OPENPI_OPTIONS
    assert not named & set(NOT_CHOSEN)


def test_every_pi05_data_config_of_rlinf_has_a_row() -> None:
    from rlinf.models.embodiment.openpi.dataconfig import _CONFIGS

    rows = {value for row in ROWS for key, value in row.changes.items() if key.endswith(".config_name")}
    assert {config.name for config in _CONFIGS if config.name.startswith("pi05_")} <= rows


@pytest.mark.parametrize("entry", ROWS, ids=lambda entry: f"{'+'.join(entry.options)}-{entry.value}")
def test_supported_rows_name_tests_that_exist(entry: Row, config: MakeConfig) -> None:
    """And refused ones give a reason."""
    verdict = judgement(entry, config)
    assert bool(entry.tests) == (verdict == "supported"), verdict
    for test in entry.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (TESTS / "unit" / file).read_text(), re.MULTILINE), test

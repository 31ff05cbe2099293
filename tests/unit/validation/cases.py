# SPDX-License-Identifier: Apache-2.0
"""All tables of refusals and warnings, in the order of the checks."""

from tests.unit.validation.cases_engine import ENGINE_ERRORS
from tests.unit.validation.cases_model import MODEL_ERRORS
from tests.unit.validation.cases_resources import RESOURCES
from tests.unit.validation.cases_run import RUN
from tests.unit.validation.cases_warnings import WARNINGS

__all__ = ["ERRORS", "WARNINGS"]

ERRORS = [*RUN, *MODEL_ERRORS, *RESOURCES, *ENGINE_ERRORS]

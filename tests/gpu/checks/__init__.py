"""List all checks, in the order in which they run: what tells most about a machine comes first."""

from tests.gpu.check import Check
from tests.gpu.checks.environment import ENVIRONMENT
from tests.gpu.checks.one_rank import ONE_RANK
from tests.gpu.checks.parity_tests import PARITY_TESTS
from tests.gpu.checks.several_ranks import ON_ONE_DEVICE, ON_SEVERAL_DEVICES

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (*ENVIRONMENT, *ONE_RANK, *ON_SEVERAL_DEVICES, *ON_ONE_DEVICE, *PARITY_TESTS)

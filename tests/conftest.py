"""Settings all tests share. `B` numbers in tests are listed in FIELD_REPORTS.md."""

import pytest
from hypothesis import HealthCheck, settings

# Time limits belong in benchmarks: a busy machine must not turn a test red.
settings.register_profile(
    "dgemma", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dgemma")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An address in a test's name differs from process to process, and xdist then refuses all."""
    named = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if named:
        raise pytest.UsageError(f"give this parameter an id of its own: {named[0]}")

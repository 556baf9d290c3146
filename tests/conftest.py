"""Settings all tests share. `B` numbers in tests are listed in FIELD_REPORTS.md."""

from hypothesis import HealthCheck, settings

# Time limits belong in benchmarks: a busy machine must not turn a test red.
settings.register_profile(
    "dgemma", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dgemma")

"""Hypothesis profiles: `default`, and `ci` (chosen with `--hypothesis-profile ci`)."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    max_examples=200,
    stateful_step_count=30,
    deadline=None,  # timings on a shared machine say nothing about the code
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")

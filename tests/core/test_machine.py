"""Requests come, go and fail in any order on tiny caches: the books balance, every plan can be carried out, all end."""

from hypothesis import HealthCheck, settings
from support.comings import RequestChurn

TestComings = RequestChurn.TestCase
TestComings.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

"""Every kernel at every instruction set of this machine (CASES 38) against scalar arithmetic (native/selftest.cpp)."""

import pytest

from twostep.kernels import _native
from twostep.kernels.native import usable_isas


@pytest.mark.parametrize("isa", usable_isas())
def test_kernels_agree_with_scalar_arithmetic(isa: str) -> None:
    checks = _native.selftest(isa)
    assert len(checks) > 20
    failed = {name: check for name, check in checks.items() if not check[0] <= check[1]}
    assert not failed


def test_portable_kernels_run_everywhere() -> None:
    assert "portable" in usable_isas()

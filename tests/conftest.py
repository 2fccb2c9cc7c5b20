"""Settings shared by all tests."""

from __future__ import annotations

import contextlib
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up the name of whoever connects to its store; a lost answer costs 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

import pytest
import torch

# Forked ranks hang if their parent ever started an OpenMP team.
torch.set_num_threads(1)

with contextlib.suppress(ImportError):  # absent where only a GPU is tested
    from hypothesis import HealthCheck, settings

    # The same examples every time, and none is wrong for being slow.
    settings.register_profile(
        "steady",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("steady")

# In the background of a shell, interrupts are ignored, by the programs under test as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--network", action="store_true", help="run tests that download something")


def pytest_collection_modifyitems(config, items):
    no_network = pytest.mark.skip(reason="downloads something; opt in with --network")
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    cuda = torch.cuda.is_available()
    for item in items:
        # Not `item.keywords`: folders are among them, and a checkout may be called gpu.
        if item.get_closest_marker("network") and not config.getoption("--network"):
            item.add_marker(no_network)
        if item.get_closest_marker("gpu") and not cuda:
            item.add_marker(no_gpu)

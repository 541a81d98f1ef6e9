"""What every test may rely on."""

import os

import pytest
from hypothesis import settings

from .support.s3_servers import moto_server, s3_credentials, s3_server, s3_url, seaweed

__all__ = ["moto_server", "s3_credentials", "s3_server", "s3_url", "seaweed"]

# No deadline: machines that run tests are shared, and a slow example is not a failing one.
settings.register_profile("laptop", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "laptop")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"

"""One server per test file: contexts of earlier tests are there, as they are for any user."""

from collections.abc import Iterator

import pytest

from ...support.api_server import ApiServer, api_server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def api(shared_server: ApiServer) -> Iterator[ApiServer]:
    yield shared_server
    shared_server.release_builds()

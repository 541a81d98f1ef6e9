"""When the server keeps copies on a disk of its own, and where."""

from pathlib import Path

import pytest

from kvkeep_service.config import Settings
from kvkeep_service.start_errors import SettingsInvalid
from kvkeep_service.stores import open_stores

from ...support.s3_servers import S3Server, fresh_prefix

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("s3_credentials")]


@pytest.fixture
def url(moto_server: S3Server) -> str:
    return moto_server.url(fresh_prefix())


@pytest.mark.s3
async def test_a_remote_store_gets_a_disk_tier_in_the_data_directory_unless_told_otherwise(
    url: str, tmp_path: Path
) -> None:
    async with open_stores(Settings(data=tmp_path / "data", store=url)) as stores:
        assert stores.disk is not None
        assert stores.source is stores.disk
        assert stores.disk.stats().budget_bytes == 20 * 2**30
    assert [path.name for path in (tmp_path / "data" / "disk-cache").iterdir()] == ["usage"]
    elsewhere = Settings(
        data=tmp_path / "data", store=url, disk_cache=tmp_path / "disk", disk_cache_bytes=7
    )
    async with open_stores(elsewhere) as stores:
        assert stores.disk is not None
        assert stores.disk.stats().budget_bytes == 7
    assert (tmp_path / "disk" / "usage").is_file()


@pytest.mark.s3
async def test_a_budget_of_nothing_is_no_disk_tier(url: str, tmp_path: Path) -> None:
    async with open_stores(Settings(data=tmp_path, store=url, disk_cache_bytes=0)) as stores:
        assert stores.disk is None
    assert not (tmp_path / "disk-cache").exists()


@pytest.mark.s3
async def test_a_disk_cache_that_cannot_be_a_directory_stops_the_start(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    settings = Settings(data=tmp_path / "data", store=url, disk_cache=tmp_path / "file")
    said = f"KVKEEP_DISK_CACHE = '{tmp_path / 'file'}': "
    with pytest.raises(SettingsInvalid, match=said):
        async with open_stores(settings):
            pass


async def test_a_local_store_needs_no_disk_tier(tmp_path: Path) -> None:
    async with open_stores(Settings(data=tmp_path, disk_cache=tmp_path / "disk")) as stores:
        assert stores.disk is None
        assert stores.source is not None
    assert not (tmp_path / "disk").exists()

"""The real server with its objects in a bucket."""

from pathlib import Path

import obstore
import pytest

from ..support.documents import contract
from ..support.s3_servers import Seaweed, fresh_prefix
from ..support.server import EAGER_SWEEPS, Server, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.s3, pytest.mark.usefixtures("s3_credentials")]

QUESTION = "How many days does the carrier have in matters of payment?"


def test_answers_from_a_bucket_are_those_from_memory_and_what_is_deleted_leaves_it(
    seaweed: Seaweed, tmp_path: Path, tiny_model: Path
) -> None:
    prefix = fresh_prefix()
    bucket = seaweed.server.store(prefix)

    def stored() -> list[str]:
        return sorted(meta["path"] for page in obstore.list(bucket) for meta in page)

    settings = {"store": seaweed.server.url(prefix), "threads": 1, **EAGER_SWEEPS}
    with Server(tmp_path / "data", model=tiny_model, **settings) as server:
        context = server.create(contract("Carriage of goods by road", 30))["id"]
        _, before = (server.ask(context, QUESTION) for _ in range(2))
        assert before["timings"]["source"] == "resident"
        server.kill()
        server.start()
        after = server.ask(context, QUESTION)
        assert after["timings"]["source"] == "store"
        assert after["token_ids"] == before["token_ids"]
        assert any(path.endswith("manifest.json") for path in stored())
        server.http.delete(f"/contexts/{context}").raise_for_status()
        eventually(lambda: stored() == ["store.json"])
    assert not list((tmp_path / "data").rglob("*.safetensors"))

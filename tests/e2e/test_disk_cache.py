"""A real server on a real S3 server: what its disk keeps, and what a deletion leaves of it."""

from pathlib import Path

import pytest

from ..support.disk_tiers import copies
from ..support.documents import contract
from ..support.s3_servers import S3Server, fresh_prefix
from ..support.server import Server, eventually
from .test_cold_start import shown

pytestmark = [pytest.mark.e2e, pytest.mark.s3, pytest.mark.usefixtures("s3_credentials")]

QUESTION = "Who insures the goods, and for how long?"


def test_a_remote_cache_is_asked_of_the_disk_the_second_time_and_leaves_it_with_its_context(
    tmp_path: Path, tiny_model: Path, moto_server: S3Server
) -> None:
    # With no memory to stay in, each question brings its cache anew.
    settings = {"store": moto_server.url(fresh_prefix()), "resident_bytes": 0, "threads": 1}
    with Server(tmp_path / "data", model=tiny_model, **settings) as server:
        kept = tmp_path / "data" / "disk-cache"
        context_id = server.create(contract("Lease", 20))["id"]
        answers = [server.ask(context_id, QUESTION, ratio=ratio) for ratio in (0.15, 0.15, 0.3)]
        assert [answer["timings"]["source"] for answer in answers[:2]] == ["store", "disk"]
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        eventually(lambda: shown(server, "kvkeep_disk_filling") == 0)
        again = server.ask(context_id, QUESTION, ratio=0.3)
        assert again["timings"]["source"] == "disk"
        assert again["token_ids"] == answers[2]["token_ids"]
        assert shown(server, "kvkeep_disk_bytes") == sum(p.stat().st_size for p in copies(kept)) > 0
        # A damaged disk changes no answer, and costs no rebuild.
        for path in copies(kept):
            path.write_bytes(b"\0" * path.stat().st_size)
        damaged = server.ask(context_id, QUESTION, ratio=0.3)
        assert damaged["token_ids"] == again["token_ids"]
        assert server.context(context_id)["status"] == "ready"
        assert shown(server, "kvkeep_disk_forgotten_total") >= 1
        other_id = server.create(contract("Loan", 20))["id"]
        server.ask(other_id, QUESTION)
        eventually(lambda: len(copies(kept)) > 0 and shown(server, "kvkeep_disk_filling") == 0)
        assert server.http.delete(f"/contexts/{other_id}").status_code == 204
        eventually(lambda: copies(kept) == [])

"""A server that has just started, and holds nothing: prefetched, asked at less, and watched."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep_client import KVKeep

from ..support.documents import contract
from ..support.server import Server, eventually

pytestmark = pytest.mark.e2e

QUESTION = "Who insures the goods, and for how long?"


def shown(server: Server, name: str, **labels: str) -> float:
    """One sample of what the server shows Prometheus; 0 before it is there."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return sum(s.value for s in samples if s.name == name and s.labels == labels)


def test_field_20_what_was_stored_is_read_back_after_a_restart_and_metrics_say_so(
    tmp_path: Path, tiny_model: Path
) -> None:
    with Server(tmp_path / "data", model=tiny_model, threads=1) as server:
        first, second = (server.create(contract(title, 20))["id"] for title in ("Lease", "Loan"))
        warm = {ratio: server.ask(first, QUESTION, ratio=ratio) for ratio in (0.15, 0.3)}
        warm_second = server.ask(second, QUESTION)
        server.terminate()
        server.start()
        assert shown(server, "kvkeep_resident_caches") == 0

        with KVKeep(server.url) as kv:
            kv.contexts.get(first).prefetch()
            eventually(lambda: shown(server, "kvkeep_resident_caches") == 1)
            answer = kv.contexts.get(first).query(QUESTION, max_tokens=16, return_token_ids=True)
            assert answer.timings.source == "resident"
            assert list(answer.token_ids or ()) == warm[0.3]["token_ids"]

        hasty = server.ask(second, QUESTION, min_ratio=0.15)
        assert hasty["timings"]["source"] == "store"
        assert hasty["ratio"] == 0.15
        eventually(lambda: shown(server, "kvkeep_running_loads") == 0)
        later = server.ask(second, QUESTION, min_ratio=0.15)
        assert (later["ratio"], later["timings"]["source"]) == (0.3, "resident")
        assert later["token_ids"] == warm_second["token_ids"]

        assert shown(server, "kvkeep_loads_total", source="store") == 2
        assert shown(server, "kvkeep_load_bytes_total", source="store") > 0
        assert shown(server, "kvkeep_cache_hits_total") == 2
        assert shown(server, "kvkeep_cache_misses_total", reason="absent") == 1
        assert shown(server, "kvkeep_resident_bytes") > 0
        # At idle nothing is held: no pin, no load, no question.
        for name in ("pinned_caches", "running_loads", "running_queries", "waiting_queries"):
            assert shown(server, f"kvkeep_{name}") == 0

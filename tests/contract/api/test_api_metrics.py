"""``GET /metrics``: read by Prometheus' own parser, from a real server."""

import re
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep_service.api.errors import CATALOGUE

from ...support.api_server import ApiServer, api_server

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(client: httpx2.Client) -> dict[Sample, float]:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_what_the_worker_counts_is_shown(api: ApiServer) -> None:
    shown = scrape(api.client)
    assert shown["kvkeep_engine_alive", ()] == 1
    assert shown["kvkeep_pinned_caches", ()] == 0
    assert shown["kvkeep_kernels_healthy", (("backend", "torch"),)] == 1
    assert shown["kvkeep_builds_total", (("outcome", "committed"),)] == 4
    assert shown["kvkeep_builds_total", (("outcome", "max_loss_unreachable"),)] == 1
    assert shown["kvkeep_build_seconds_total", (("phase", "prefill"),)] == 6.0
    assert shown["kvkeep_build_loss_nats_bucket", (("le", "0.01"),)] == 0
    assert shown["kvkeep_build_loss_nats_bucket", (("le", "0.02"),)] == 1
    assert shown["kvkeep_build_loss_nats_bucket", (("le", "0.1"),)] == 2
    assert shown["kvkeep_build_loss_nats_bucket", (("le", "1.0"),)] == 2
    assert shown["kvkeep_build_loss_nats_count", ()] == 3
    assert shown["kvkeep_build_loss_nats_sum", ()] == pytest.approx(2.115)
    assert shown["kvkeep_cache_hits_total", ()] == 3
    assert shown["kvkeep_cache_misses_total", (("reason", "ratio"),)] == 1
    assert shown["kvkeep_loads_total", (("source", "store"),)] == 2
    assert shown["kvkeep_load_seconds_total", (("source", "store"),)] == 0.5
    assert shown["kvkeep_load_bytes_total", (("source", "store"),)] == 4096
    assert shown["kvkeep_swept_total", (("what", "expired"),)] == 2
    assert shown["kvkeep_swept_bytes_total", ()] == 300
    assert shown["kvkeep_load_failures_total", (("code", "storage_unavailable"),)] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_is_counted_once(api: ApiServer, stream: bool) -> None:
    context = api.create()
    before = scrape(api.client)
    body = {"question": "when?", "stream": stream}
    assert api.client.post(f"/contexts/{context['id']}/query", json=body).status_code == 200
    after = scrape(api.client)
    grown = {
        key: value - before.get(key, 0.0)
        for key, value in after.items()
        if value != before.get(key, 0.0) and not key[0].endswith(("_created", "_bucket"))
    }
    source = (("source", "resident"),)
    assert grown == {
        ("kvkeep_answers_total", source): 1,
        ("kvkeep_first_token_seconds_count", source): 1,
        ("kvkeep_first_token_seconds_sum", source): pytest.approx(0.006),
        ("kvkeep_tokens_total", (("kind", "cached"),)): 40,
        ("kvkeep_tokens_total", (("kind", "question"),)): 8,
        ("kvkeep_tokens_total", (("kind", "generated"),)): 5,
    }


def test_errors_are_counted_by_their_code_before_and_after_the_first_token(api: ApiServer) -> None:
    context = api.create()
    key = ("kvkeep_problems_total", (("code", "storage_unavailable"),))
    before = scrape(api.client).get(key, 0.0)
    body = {"question": "is lost on the way", "stream": True}
    assert "event: error" in api.client.post(f"/contexts/{context['id']}/query", json=body).text
    assert api.client.post(f"/contexts/{context['id']}/query", json=body | {"stream": False})
    assert scrape(api.client)[key] == before + 2


def test_no_label_names_what_belongs_to_a_tenant(api: ApiServer) -> None:
    context = api.create()
    api.client.get("/contexts/ctx_00000000000000000000000000")
    api.client.post(f"/contexts/{context['id']}/query", json={"question": "when?"})
    allowed = {"backend", "code", "kind", "le", "origin", "outcome", "phase", "reason", "source"}
    allowed |= {"what", "work"}
    for _, labels in scrape(api.client):
        assert {name for name, _ in labels} <= allowed
        assert dict(labels).get("code", "internal") in CATALOGUE
    assert context["id"] not in api.client.get("/metrics").text


def test_the_key_is_asked_for(tmp_path: Path) -> None:
    with api_server(tmp_path, api_key="a-long-enough-key") as server:
        assert server.client.get("/metrics").status_code == 401
        headers = {"Authorization": "Bearer a-long-enough-key"}
        assert server.client.get("/metrics", headers=headers).status_code == 200


def test_every_metric_is_documented_and_no_other(api: ApiServer) -> None:
    text = api.client.get("/metrics").text
    shown = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    rows = re.findall(r"^\| `(kvkeep_\w+)", DOCUMENT.read_text(), re.M)
    assert len(rows) == len(set(rows))
    # There is no disk cache in front of a local store.
    near = {name for name in rows if not name.startswith("kvkeep_disk_")}
    assert near == {name for name in shown if not name.endswith("_created")}
    assert {name for name in rows if name.startswith("kvkeep_disk_")}

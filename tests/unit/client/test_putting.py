"""``kvkeep put``: what is sent, what is printed and when, and what a wait that fails leaves."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvkeep_client.calls import CreateOptions
from kvkeep_client.commands import app

from .conftest import Run, Served
from .stand_in import StandIn, problem


def test_put_prints_the_id_and_nothing_else(server: StandIn, run: Run, lease: Path) -> None:
    options = (
        "--scoring",
        "local",
        "--neighbours",
        "2",
        "--quantization",
        "fp8",
        "--system",
        "Be brief.",
    )
    done = run("put", str(lease), "--ratio", "0.2", *options)
    assert done.exit_code == 0
    [context] = server.contexts.values()
    assert done.stdout == f"{context['id']}\n"
    assert "lease.txt: scoring" in done.stderr
    assert "ready: 10 tokens" in done.stderr
    assert server.seen[0].body == {
        "document": "The lease ends on 31 March 2029.",
        "name": "lease.txt",
        "system": "Be brief.",
        "instructions": None,
        "metadata": {},
        "protect": [],
        "compression": {
            "ratio": 0.2,
            "max_loss": None,
            "tokens": None,
            "policy": "kvzip",
            "scoring": "local",
            "neighbours": 2,
            "allow_lossy": False,
            "quantization": "fp8",
            "normalization": "none",
            "remainder": True,
        },
    }


def test_put_need_not_wait(server: StandIn, run: Run, lease: Path) -> None:
    done = run("put", str(lease), "--no-wait", "--name", "Lease")
    assert done.exit_code == 0
    assert [context["status"] for context in server.contexts.values()] == ["queued"]
    assert [context["name"] for context in server.contexts.values()] == ["Lease"]
    assert "queued" in done.stderr


def test_put_as_json_prints_what_the_server_said(server: StandIn, run: Run, lease: Path) -> None:
    done = run("put", str(lease), "--json")
    assert json.loads(done.stdout) == next(iter(server.contexts.values()))
    assert done.stderr == ""


def test_put_of_a_failing_build_exits_with_one(server: StandIn, run: Run, lease: Path) -> None:
    server.ends_as = "failed"
    done = run("put", str(lease))
    assert done.exit_code == 1
    [context_id] = server.contexts
    assert done.stdout == f"{context_id}\n"
    assert "the worker died three times" in done.stderr
    assert f"kvkeep rebuild {context_id}" in done.stderr
    assert json.loads(run("put", str(lease), "--json").stderr)["context_id"] in server.contexts
    server.ends_as = "ready"
    built = run("rebuild", context_id)
    assert (built.exit_code, built.stdout) == (0, "")
    assert "ready: 10 tokens" in built.stderr
    again = run("rebuild", context_id)
    assert (again.exit_code, again.stdout) == (0, "")
    assert "answers from the cache it has until the new one is there" in again.stderr
    assert f"kvkeep show {context_id} says how far" in again.stderr
    assert "ready: 10 tokens" not in again.stderr


def test_put_of_a_server_that_dies_has_told_the_id_and_says_how_to_go_on(
    server: StandIn, run: Run, lease: Path
) -> None:
    # The build breaks off, and then nobody knows the way any more.
    server.ends_as = "building"
    server.planned_after = {"events": [problem(503, "worker_unavailable") for _ in range(3)]}
    done = run("put", str(lease))
    [context_id] = server.contexts
    assert (done.exit_code, done.stdout) == (1, f"{context_id}\n")
    assert "about worker_unavailable" in done.stderr
    assert f"kvkeep show {context_id} says how far it is" in done.stderr
    assert f"kvkeep ask {context_id} QUESTION waits for it" in done.stderr
    server.planned_after = {"events": [problem(503, "worker_unavailable") for _ in range(3)]}
    told = json.loads(run("put", str(lease), "--json").stderr)
    assert told["code"] == "worker_unavailable"
    assert told["context_id"] in server.contexts


def test_a_wait_that_is_interrupted_says_that_the_build_goes_on(
    server: StandIn, served: Served, lease: Path
) -> None:
    server.ends_as = "forever"
    kvkeep = str(Path(sys.executable).parent / "kvkeep")
    command = [kvkeep, "put", str(lease), "--url", served.url]
    for form in ([], ["--json"]):
        with subprocess.Popen(
            [*command, *form], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as putting:
            assert server.is_building.wait(timeout=60)
            server.is_building.clear()
            putting.send_signal(signal.SIGINT)
            out, said = putting.communicate(timeout=60)
        context_id = list(server.contexts)[-1]
        assert putting.returncode == 130
        assert "Traceback" not in said
        if form:
            assert json.loads(said)["context_id"] == context_id
        else:
            assert out == f"{context_id}\n"
            assert f"ask {context_id} QUESTION waits for it" in said


def test_put_offers_what_the_api_takes(server: StandIn, run: Run, lease: Path) -> None:
    done = run(
        *("put", str(lease), "--protect", "0:5", "--protect", "10:12", "--instructions", "Read:"),
        *("--normalization", "kvzip_plus", "--metadata", "matter=22=91", "--metadata", "a="),
        "--no-remainder",
        *("--expires-after", "60"),
    )
    assert done.exit_code == 0
    body = server.seen[0].body or {}
    assert body["protect"] == [{"start": 0, "end": 5}, {"start": 10, "end": 12}]
    assert body["instructions"] == "Read:"
    assert body["metadata"] == {"matter": "22=91", "a": ""}
    assert body["compression"]["normalization"] == "kvzip_plus"
    assert body["compression"]["remainder"] is False
    assert body["expires_after"] == {"anchor": "last_used_at", "seconds": 60}
    assert run("put", str(lease), "--expires-after", "0").exit_code == 0
    assert (server.calls("POST")[-1].body or {})["expires_after"] is None
    known = {name.removeprefix("--") for name in put_options()}
    assert {name.replace("_", "-") for name in CreateOptions.__annotations__} <= known


def put_options() -> set[str]:
    command = typer.main.get_command(app)
    put = command.commands["put"]  # type: ignore[attr-defined]  # it is a group
    return {name for option in put.params for name in option.opts}


@pytest.mark.parametrize(
    "wrong",
    [
        *(("--protect", span) for span in ("5", "5:", ":5", "9:5", "5:5", "-1:5", "a:b", "1:2:3")),
        *(("--metadata", pair) for pair in ("key", "=value")),
        ("--metadata", "a=1", "--metadata", "a=2"),
        ("--expires-after", "-1"),
        ("--normalization", "most"),
    ],
    ids=" ".join,
)
def test_an_option_of_put_that_cannot_be_read_is_wrong_usage(
    server: StandIn, run: Run, lease: Path, wrong: tuple[str, ...]
) -> None:
    done = run("put", str(lease), *wrong)
    assert done.exit_code == 2
    assert wrong[0] in done.stderr
    assert server.seen == []


def test_put_of_a_missing_file_is_wrong_usage(server: StandIn, run: Run, tmp_path: Path) -> None:
    done = run("put", str(tmp_path / "nothing.txt"))
    assert done.exit_code == 2
    assert server.seen == []


def test_put_of_a_file_that_is_not_text_is_wrong_usage(
    server: StandIn, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "scan.pdf").write_bytes(b"\xff\xfe")
    done = run("put", str(tmp_path / "scan.pdf"))
    assert done.exit_code == 2
    assert "scan.pdf is not UTF-8 text" in done.stderr
    assert server.seen == []


def test_a_policy_and_a_budget_of_tokens_can_be_asked_for(
    server: StandIn, run: Run, lease: Path
) -> None:
    assert run("put", str(lease), "--policy", "snapkv", "--tokens", "500").exit_code == 0
    body = server.calls("POST")[-1].body or {}
    asked = body["compression"]
    assert (asked["policy"], asked["tokens"], asked["ratio"]) == ("snapkv", 500, None)
    for wrong in (("--policy", "kvpop"), ("--tokens", "0")):
        assert run("put", str(lease), *wrong).exit_code == 2


def test_a_lossy_ratio_can_be_asked_for(server: StandIn, run: Run, lease: Path) -> None:
    put = run("put", str(lease), "--ratio", "0.1", "--allow-lossy")
    assert put.exit_code == 0
    body = server.calls("POST")[-1].body or {}
    assert body["compression"]["ratio"] == 0.1
    assert body["compression"]["allow_lossy"] is True
    for form in ([], ["--json"]):
        arguments = ["ask", put.stdout.strip(), "When?", "--ratio", "0.1", "--allow-lossy", *form]
        assert run(*arguments).exit_code == 0
        body = server.calls("POST")[-1].body or {}
        assert (body["ratio"], body["allow_lossy"]) == (0.1, True)


def test_put_takes_a_loss_instead_of_a_ratio(server: StandIn, run: Run, lease: Path) -> None:
    done = run("put", str(lease), "--ratio", "auto", "--max-loss", "0.1")
    assert done.exit_code == 0
    compression = server.seen[0].body["compression"]
    assert (compression["ratio"], compression["max_loss"]) == ("auto", 0.1)
    assert run("put", str(lease), "--ratio", "most").exit_code == 2

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvkeep_client import KVKeep
from kvkeep_client.calls import CreateOptions
from kvkeep_client.commands import app

from ...support.servers import unused_url
from .conftest import Served
from .stand_in import StandIn, problem

Run = Callable[..., Result]


@pytest.fixture
def run(served: Served) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments, env={"KVKEEP_URL": served.url})

    return call


@pytest.fixture
def lease(tmp_path: Path) -> Path:
    path = tmp_path / "lease.txt"
    path.write_text("The lease ends on 31 March 2029.", encoding="utf-8")
    return path


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
        *("--expires-after", "60"),
    )
    assert done.exit_code == 0
    body = server.seen[0].body or {}
    assert body["protect"] == [{"start": 0, "end": 5}, {"start": 10, "end": 12}]
    assert body["instructions"] == "Read:"
    assert body["metadata"] == {"matter": "22=91", "a": ""}
    assert body["compression"]["normalization"] == "kvzip_plus"
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


def test_ask_prints_the_answer(server: StandIn, run: Run, kv: KVKeep) -> None:
    context = kv.contexts.create("some words").wait()
    done = run("ask", context.id, "When?", "--max-tokens", "16")
    assert done.exit_code == 0
    assert done.stdout == "On 31 March 2029.\n"
    assert done.stderr == ""
    body = server.calls("POST")[-1].body
    assert body == {
        "question": "When?",
        "stream": True,
        "max_tokens": 16,
        "ratio": None,
        "min_ratio": None,
        "allow_lossy": False,
    }


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


def test_ask_waits_for_a_context_that_is_not_ready(run: Run, kv: KVKeep) -> None:
    context = kv.contexts.create("some words", name="Lease")
    done = run("ask", context.id, "When?")
    assert done.stdout == "On 31 March 2029.\n"
    assert "Lease: scoring" in done.stderr


def test_ask_as_json_prints_the_answer_object(run: Run, kv: KVKeep) -> None:
    context = kv.contexts.create("some words").wait()
    done = run("ask", context.id, "When?", "--json")
    answer = json.loads(done.stdout)
    assert (answer["answer"], answer["object"]) == ("On 31 March 2029.", "answer")


def test_ask_with_several_questions_prints_each_with_its_answer(
    server: StandIn, run: Run, kv: KVKeep
) -> None:
    context = kv.contexts.create("some words").wait()
    done = run("ask", context.id, "When?", "Who?")
    answer = "".join(server.pieces)
    assert done.stdout == f"When?\n{answer}\n\nWho?\n{answer}\n\n"
    told = json.loads(run("ask", context.id, "When?", "Who?", "--json").stdout)
    assert [one["answer"] for one in told] == [answer, answer]


def test_chat_asks_a_question_a_line_in_one_conversation(
    server: StandIn, served: Served, kv: KVKeep
) -> None:
    context = kv.contexts.create("some words").wait()
    arguments = ["chat", context.id, "--ratio", "0.2"]
    environment = {"KVKEEP_URL": served.url}
    lines = "When?\n\n  Who?  \nWhy?"
    done = CliRunner().invoke(app, arguments, input=lines, env=environment)
    assert done.exit_code == 0
    assert done.stdout == ("".join(server.pieces) + "\n") * 3
    bodies = [seen.body or {} for seen in server.calls("POST") if seen.path.endswith("/query")]
    assert [body["question"] for body in bodies] == ["When?", "Who?", "Why?"]
    assert [body.get("session") for body in bodies] == [None, *server.kept_ever[:2]]
    assert [body.get("ratio") for body in bodies] == [0.2, None, None]


def test_chat_says_when_the_conversation_is_gone(
    server: StandIn, served: Served, kv: KVKeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = kv.contexts.create("some words").wait()
    monkeypatch.setattr(server, "kept", type("Forgetful", (set,), {"add": lambda *_: None})())
    environment = {"KVKEEP_URL": served.url}
    done = CliRunner().invoke(app, ["chat", context.id], input="When?\nWho?", env=environment)
    assert done.exit_code == 1
    assert "session_gone" in done.stderr


def test_ask_never_hides_that_an_answer_broke_off(server: StandIn, run: Run, kv: KVKeep) -> None:
    context = kv.contexts.create("some words").wait()
    server.stream_ends_with = "error"
    done = run("ask", context.id, "When?")
    assert done.exit_code == 1
    assert done.stdout == "On 31 March 2029.\n"
    assert "about worker_unavailable" in done.stderr
    assert done.output.startswith("On 31 March 2029.\nkvkeep: ")


def test_ask_prints_nothing_when_no_answer_began(server: StandIn, run: Run, kv: KVKeep) -> None:
    context = kv.contexts.create("some words").wait()
    server.pieces, server.stream_ends_with = [], "error"
    done = run("ask", context.id, "When?")
    assert (done.exit_code, done.stdout) == (1, "")


def test_ls_prints_one_line_per_context_newest_first(run: Run, kv: KVKeep) -> None:
    older = kv.contexts.create("some words", name="A [very] " + "long " * 40 + "name").wait()
    newer = kv.contexts.create("more words")
    lines = run("ls").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["CONTEXT", newer.id, older.id]
    assert str(older.name) in lines[2]
    assert "ready" in lines[2]
    assert "30%" in lines[2]


def test_ls_as_json_is_an_array(server: StandIn, run: Run, kv: KVKeep) -> None:
    kv.contexts.create("some words")
    assert json.loads(run("ls", "--json").stdout) == list(server.contexts.values())
    assert json.loads(run("ls", "--json", "--status", "ready").stdout) == []


def test_show_prints_what_is_known(run: Run, kv: KVKeep) -> None:
    context = kv.contexts.create("some words", name="Lease", metadata={"matter": "1"}).wait()
    shown = run("show", context.id).stdout
    assert f"context   {context.id}" in shown
    assert "5 (3 protected)" in shown
    assert "2.0 KiB of 20.0 KiB" in shown
    assert "matter=1" in shown


def test_show_says_why_a_build_failed(server: StandIn, run: Run, kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    server.finish(context.id, "failed")
    assert "internal: the worker died three times" in run("show", context.id).stdout


def test_show_of_an_unknown_context_says_where_to_look(run: Run) -> None:
    done = run("show", "ctx_1")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "kvkeep ls" in done.stderr


def test_rm_deletes_all_that_are_named(server: StandIn, run: Run, kv: KVKeep) -> None:
    one, two = kv.contexts.create("one"), kv.contexts.create("two")
    done = run("rm", one.id, two.id, "ctx_gone", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"deleted": [one.id, two.id, "ctx_gone"]}
    assert server.contexts == {}


def test_an_error_as_json_has_all_its_facts(server: StandIn, run: Run) -> None:
    server.planned = [problem(413, "document_too_long", tokens=9000, max_tokens=7936)]
    done = run("show", "ctx_1", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stderr) == {
        "code": "document_too_long",
        "detail": "about document_too_long",
        "status": 413,
        "request_id": "req_of_the_body",
        "tokens": 9000,
        "max_tokens": 7936,
    }


def test_a_fault_of_the_server_names_the_request(server: StandIn, run: Run) -> None:
    server.planned = [problem(500, "internal")]
    done = run("ls")
    assert "req_of_the_body" in done.stderr


def test_a_missing_key_is_said_to_be_one(server: StandIn, run: Run) -> None:
    server.api_key = "secret-1"
    assert "KVKEEP_API_KEY" in run("ls").stderr
    assert run("ls", "--api-key", "secret-1").exit_code == 0


def test_it_says_which_version_it_is(run: Run) -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"kvkeep {version('kvkeep-client')}\n")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/docs"])
def test_a_url_with_a_path_that_leads_nowhere_gets_a_hint(
    served: Served, run: Run, path: str
) -> None:
    done = run("ls", "--url", f"{served.url}{path}")
    assert done.exit_code == 1
    assert f"is {path.rstrip('/')} part of the server's URL, or to be left out" in done.stderr


def test_a_bad_url_is_wrong_usage(run: Run) -> None:
    done = run("ls", "--url", "localhost:8000", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stderr)["code"] == "usage"


def test_an_unreachable_server_has_its_own_exit_code_and_says_how_to_start_one() -> None:
    url = unused_url()
    command = [str(Path(sys.executable).parent / "kvkeep"), "ls", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    assert f"no kvkeep server answers at {url}" in done.stderr
    # As it can be typed here, whether or not a shell finds it by its name.
    start = done.stderr.partition("Start one with: ")[2].partition(" serve")[0]
    assert shutil.which(start) is not None
    assert "Traceback" not in done.stderr


def test_without_its_extra_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None\nfrom kvkeep_client.cli import main\nmain()"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "The kvkeep command needs one more install: pip install 'kvkeep-client[cli]'\n"
    )


@pytest.mark.parametrize("command", ["ls --json", "ask CTX When?"], ids=["ls", "ask"])
def test_output_that_nobody_reads_any_more_ends_the_command(
    served: Served, kv: KVKeep, command: str
) -> None:
    for number in range(50):
        context = kv.contexts.create(f"document {number}", name="long " * 400)
    context.wait()
    served.server.stream_ends_with = "forever"
    kvkeep = Path(sys.executable).parent / "kvkeep"
    piped = f"{kvkeep} {command.replace('CTX', context.id)} --url {served.url} | head -c 1"
    done = subprocess.run(piped, shell=True, capture_output=True, text=True, check=False)
    assert len(done.stdout) == 1
    assert done.stderr == ""


def test_put_takes_a_loss_instead_of_a_ratio(server: StandIn, run: Run, lease: Path) -> None:
    done = run("put", str(lease), "--ratio", "auto", "--max-loss", "0.1")
    assert done.exit_code == 0
    compression = server.seen[0].body["compression"]
    assert (compression["ratio"], compression["max_loss"]) == ("auto", 0.1)
    assert run("put", str(lease), "--ratio", "most").exit_code == 2


def test_ls_shows_what_a_context_keeps_beside_what_its_shared_cache_holds(
    server: StandIn, run: Run, kv: KVKeep
) -> None:
    own = kv.contexts.create("some words", ratio=0.3).wait()
    sharing = kv.contexts.create("some words", ratio=0.15).wait()
    whole = kv.contexts.create("some words").wait()
    server.contexts[whole.id]["compression"] |= {"policy_applied": "none", "ratio_achieved": 1.0}
    cells = {line.split()[0]: " ".join(line.split()[3:]) for line in run("ls").stdout.splitlines()}
    assert cells[own.id] == "30% 2.0 KiB 0"
    assert cells[sharing.id] == "15% 2.0 KiB at 30% 0"
    assert cells[whole.id] == "100% 2.0 KiB 0"
    assert "2.0 KiB at 30% of 20.0 KiB" in run("show", sharing.id).stdout

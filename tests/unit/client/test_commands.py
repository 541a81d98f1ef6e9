import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvkeep_client import KVKeep
from kvkeep_client.commands import app

from ...support.servers import unused_url
from .conftest import Run, Served
from .stand_in import StandIn, problem


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


def test_ls_shows_what_a_context_keeps_beside_what_its_shared_cache_holds(
    server: StandIn, run: Run, kv: KVKeep
) -> None:
    own = kv.contexts.create("some words", ratio=0.3).wait()
    sharing = kv.contexts.create("some words", ratio=0.15).wait()
    cells = {line.split()[0]: " ".join(line.split()[3:]) for line in run("ls").stdout.splitlines()}
    assert cells[own.id] == "30% 2.0 KiB 0"
    assert cells[sharing.id] == "15% 2.0 KiB (30%) 0"
    assert "2.0 KiB (30%) of 20.0 KiB" in run("show", sharing.id).stdout

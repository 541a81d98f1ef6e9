"""The server's command: what it says, with which exit code, and that it says so at once."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from kvkeep_service import cli, command_line, serving
from kvkeep_service.config import Settings
from kvkeep_service.start_errors import ModelUnavailable
from kvkeep_storage.embedded import EmbeddedStore


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"KVKEEP_{name.upper()}", raising=False)
    # Loggers keep the stream they first wrote to, and that of a test's runner ends with it.
    monkeypatch.setattr(command_line, "set_up_logging", lambda: None)
    yield
    structlog.reset_defaults()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def test_without_a_command_it_shows_the_commands() -> None:
    result = run()
    assert "serve" in result.output
    assert "admin" in result.output


def test_it_says_which_version_it_is() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"kvkeep-server {version('kvkeep')}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "70000"), "KVKEEP_PORT = 70000"),
        (("--device", "tpu"), "KVKEEP_DEVICE = 'tpu'"),
        (("--dtype", "int8"), "KVKEEP_DTYPE = 'int8'"),
        (("--host", "0.0.0.0"), "KVKEEP_HOST = '0.0.0.0'"),
        (("--chat-template", "/no/such.jinja"), "KVKEEP_CHAT_TEMPLATE = '/no/such.jinja'"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_sentence_that_names_it(
    arguments: tuple[str, ...], said: str
) -> None:
    result = run("serve", "--port", "0", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.splitlines()[-1].startswith("kvkeep-server: ")
    assert "Traceback" not in result.output


def test_a_misspelled_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_MODLE", "bundled")
    result = run("serve")
    assert result.exit_code == 2
    assert "KVKEEP_MODLE: there is no such setting" in result.stderr


def test_a_wrong_flag_is_told_without_loading_torch() -> None:
    code = (
        "import sys; from kvkeep_service import cli\n"
        "try: cli.app(['serve', '--port', '70000'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_flags_reach_the_server_and_it_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Settings] = []

    async def serve(
        settings: Settings, listeners: Sequence[socket.socket], announce: serving.Announcements
    ) -> None:
        assert [listener.getsockname()[0] for listener in listeners] == ["127.0.0.2"]
        served.append(settings)
        announce.loading()
        announce.ready("http://127.0.0.1:1234")

    monkeypatch.setattr(serving, "serve", serve)
    template = tmp_path / "template.jinja"
    result = run(
        *("serve", "--model", "some/model", "--data", str(tmp_path), "--port", "0"),
        *("--redis-url", "redis://r", "--store", "file:///s", "--device", "cpu"),
        *("--dtype", "bfloat16", "--chat-template", str(template), "--host", "127.0.0.2"),
        *("--head-scores", str(tmp_path / "heads.json")),
    )
    assert result.exit_code == 0
    assert result.stdout == "kvkeep is ready at http://127.0.0.1:1234\n"
    assert "loading model some/model by its hub id …" in result.stderr
    (settings,) = served
    assert settings == Settings(
        model="some/model",
        data=tmp_path,
        port=0,
        host="127.0.0.2",
        redis_url="redis://r",
        store="file:///s",
        device="cpu",
        dtype="bfloat16",
        chat_template=template,
        head_scores=tmp_path / "heads.json",
    )


def refusals(starts: Sequence[Sequence[str]]) -> list[str]:
    """What each start says before it ends with 2; none imports torch or says that it loads."""
    # In one process, which is a second of imports.
    program = (
        "import sys; from kvkeep_service import cli\n"
        f"for flags in {[list(flags) for flags in starts]!r}:\n"
        "    try: cli.app(['serve', '--port', '0', *flags])\n"
        "    except SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("kvkeep-server: ") for line in lines), lines
    return [line.removeprefix("kvkeep-server: ") for line in lines]


def test_a_port_that_is_taken_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (said,) = refusals([("--data", str(tmp_path), "--port", port)])
    assert said == f"KVKEEP_HOST = '127.0.0.1', KVKEEP_PORT = {port}: Address already in use"


def test_what_is_wrong_with_the_stores_is_told_before_torch_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    held, new, file = tmp_path / "held", tmp_path / "new", tmp_path / "file"
    file.touch()
    starts = {
        f"KVKEEP_DATA = '{file}': cannot be made as a directory: File exists": ("--data", file),
        f"KVKEEP_DATA = '{held}': in use by another process (process ": ("--data", held),
        "KVKEEP_REDIS_URL: scheme 'http' is not one of redis, ": ("--redis-url", "http://redis"),
        "KVKEEP_REDIS_URL: after host and port only the number of a database may stand": (
            *("--redis-url", "redis://127.0.0.1:1/records"),
        ),
        "KVKEEP_REDIS_URL: redis PING: Error 111": ("--redis-url", "redis://127.0.0.1:1"),
        f"KVKEEP_STORE: open: {file.as_uri()}: File exists": ("--store", file.as_uri()),
        "KVKEEP_STORE: a store is written file:///directory": ("--store", "/srv/store"),
    }
    store = EmbeddedStore(held)
    store.start()
    try:
        flags = [("--data", str(new), *map(str, given)) for given in starts.values()]
        said = refusals(flags)
    finally:
        store.stop()
    for line, expected in zip(said, starts, strict=True):
        assert line.startswith(expected)
    assert not new.exists()


def test_a_model_or_a_file_that_is_not_there_is_told_before_torch_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    new, texts, quantised = tmp_path / "new", tmp_path / "texts", tmp_path / "quantised"
    texts.mkdir()
    quantised.mkdir()
    gguf = quantised / "model.gguf"
    gguf.touch()
    file = tmp_path / "notes.txt"
    file.touch()
    starts = {
        f"model '{texts}' cannot be loaded: the directory has no config.json, so no model": texts,
        f"model '{quantised}' cannot be loaded: the directory has no config.json; to take the GGUF"
        f" file in it, name that: {gguf}": quantised,
        f"model '{tmp_path}/no' cannot be loaded: there is no such directory": tmp_path / "no",
        f"model '{tmp_path}/no.gguf' cannot be loaded: there is no such file": tmp_path / "no.gguf",
        f"model '{file}' cannot be loaded: it is a file; a model is a hub id, a dir": file,
    }
    flags = [("--data", str(new), "--model", str(given)) for given in starts.values()]
    flags += [("--data", str(new), "--chat-template", str(texts))]
    flags += [("--data", str(new), "--head-scores", str(texts / "none.json"))]
    said = refusals(flags)
    assert len(said) == len(flags)
    for line, expected in zip(said, starts, strict=False):
        assert line.startswith(expected)
    assert said[-2].startswith(f"KVKEEP_CHAT_TEMPLATE = '{texts}': cannot be read: ")
    assert said[-1] == f"KVKEEP_HEAD_SCORES = '{texts}/none.json': No such file or directory"
    assert not new.exists()


def test_a_start_that_is_refused_later_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*_: object) -> None:
        raise ModelUnavailable("some/model", "there is no such file")

    monkeypatch.setattr(serving, "serve", serve)
    result = run("serve", "--model", "some/model", "--port", "0")
    assert result.exit_code == 2
    assert "'some/model' cannot be loaded: there is no such file" in result.stderr
    assert "Traceback" not in result.output


def test_reindex_of_an_empty_directory_restores_nothing_and_ends_its_valkey(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    result = run("admin", "reindex", "--data", str(tmp_path / "data"))
    assert result.exit_code == 0, result.output
    assert result.stdout == "missing and restored: 0 contexts, 0 caches\n"
    # The directory is free again.
    store = EmbeddedStore(tmp_path / "data")
    store.start()
    store.stop()


def test_reindex_names_what_is_damaged_and_fails(tmp_path: Path) -> None:
    damaged = tmp_path / "data" / "objects" / "documents" / "acme" / "ctx_01"
    damaged.mkdir(parents=True)
    for name in ("document.json", "context.json"):
        (damaged / name).write_text("{}")
    result = run("admin", "reindex", "--data", str(tmp_path / "data"))
    assert result.exit_code == 1
    assert "0 contexts" in result.stdout
    assert "damaged: " in result.stderr
    assert "ctx_01" in result.stderr


def test_reindex_beside_a_running_server_is_refused(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "data")
    store.start()
    try:
        result = run("admin", "reindex", "--data", str(tmp_path / "data"))
    finally:
        store.stop()
    assert result.exit_code == 2
    assert "in use" in result.stderr
    assert "Traceback" not in result.output


def test_reindex_of_a_redis_out_of_reach_is_refused(tmp_path: Path) -> None:
    result = run(
        *("admin", "reindex", "--data", str(tmp_path)),
        *("--redis-url", f"unix://{tmp_path}/nothing.sock"),
    )
    assert result.exit_code == 2
    assert "kvkeep-server: KVKEEP_REDIS_URL: redis PING: " in result.stderr
    assert "Traceback" not in result.output

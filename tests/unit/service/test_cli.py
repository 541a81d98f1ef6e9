"""The server's command: what it says, with which exit code, and that it says so at once."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from kvkeep_service import app as app_module
from kvkeep_service import cli, command_line
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
    result = run("serve", *arguments)
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
        settings: Settings, listener: socket.socket, announce: Callable[[str], None]
    ) -> None:
        assert listener.getsockname()[0] == "127.0.0.2"
        served.append(settings)
        announce("http://127.0.0.1:1234")

    monkeypatch.setattr(app_module, "serve", serve)
    template = tmp_path / "template.jinja"
    result = run(
        *("serve", "--model", "some/model", "--data", str(tmp_path), "--port", "0"),
        *("--redis-url", "redis://r", "--store", "file:///s", "--device", "cpu"),
        *("--dtype", "bfloat16", "--chat-template", str(template), "--host", "127.0.0.2"),
        *("--head-scores", str(tmp_path / "heads.json")),
    )
    assert result.exit_code == 0
    assert result.stdout == "kvkeep is ready at http://127.0.0.1:1234\n"
    assert "loading model some/model" in result.stderr
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


def test_a_port_that_is_taken_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        program = (
            "import sys; from kvkeep_service import cli\n"
            f"try: cli.app(['serve', '--data', {str(tmp_path)!r}, '--port', '{port}'])\n"
            "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
        )
    assert result.stdout == "2 False\n"
    assert f"KVKEEP_PORT = {port}: Address already in use" in result.stderr


def test_a_start_that_is_refused_later_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*_: object) -> None:
        raise ModelUnavailable("some/model", "there is no such file")

    monkeypatch.setattr(app_module, "serve", serve)
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
    assert "kvkeep-server: redis" in result.stderr
    assert "Traceback" not in result.output

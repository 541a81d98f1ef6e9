from pathlib import Path

import pytest
from pydantic import ValidationError

from kvkeep_service.config import Settings, is_loopback, load_settings
from kvkeep_service.start_errors import SettingsInvalid


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"KVKEEP_{name.upper()}", raising=False)
    monkeypatch.delenv("KVKEEP_CONFIG", raising=False)


def refusal(**overrides: object) -> str:
    with pytest.raises(SettingsInvalid) as refused:
        load_settings(overrides)
    return str(refused.value)


def test_the_defaults_serve_the_bundled_model_on_this_machine_only() -> None:
    settings = load_settings()
    assert (settings.model, settings.host, settings.api_key) == ("bundled", "127.0.0.1", None)
    assert settings.body_limit_bytes == 32 * 1024 * 1024
    assert settings.default_ttl_seconds is None


def test_arguments_win_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kvkeep.toml"
    file.write_text('port = 1001\nmax_queue = 1\ndtype = "float16"\n')
    monkeypatch.setenv("KVKEEP_CONFIG", str(file))
    monkeypatch.setenv("KVKEEP_PORT", "1002")
    monkeypatch.setenv("KVKEEP_MAX_QUEUE", "2")
    settings = load_settings({"max_queue": 3})
    assert (settings.dtype, settings.port, settings.max_queue) == ("float16", 1002, 3)


@pytest.mark.parametrize(
    ("variable", "value", "limit"),
    [
        ("KVKEEP_PORT", "65536", "must be from 0 to 65535"),
        ("KVKEEP_PORT", "-1", "must be from 0 to 65535"),
        ("KVKEEP_BUILD_SLICE_MS", "0", "must be above 0 and at most 60000"),
        ("KVKEEP_TENANT_BYTES", "-1", "must be at least 0"),
        ("KVKEEP_BODY_LIMIT_BYTES", "12", "1024"),
        ("KVKEEP_DTYPE", "int8", "float32"),
        ("KVKEEP_ON_CORRUPT", "ignore", "rebuild"),
        ("KVKEEP_DEVICE", "tpu", "must be auto, cpu, cuda or cuda:N"),
        ("KVKEEP_DEVICE", "cuda:one", "must be auto, cpu, cuda or cuda:N"),
        ("KVKEEP_THREADS", "many", "integer"),
    ],
)
def test_a_bad_value_stops_the_start_naming_variable_value_and_limit(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, limit: str
) -> None:
    monkeypatch.setenv(variable, value)
    message = refusal()
    assert variable in message
    assert value in message
    assert limit in message


def test_every_bad_value_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_PORT", "no")
    monkeypatch.setenv("KVKEEP_DTYPE", "no")
    assert len(refusal().splitlines()) == 2


def test_a_misspelt_variable_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_PROT", "1")
    assert "KVKEEP_PROT" in refusal()


def test_variables_of_other_parts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_URL", "http://localhost:8000")
    monkeypatch.setenv("KVKEEP_KERNELS", "torch")
    load_settings()


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_API_KEY", "")
    assert load_settings().api_key is None


def test_a_misspelt_key_in_the_file_is_not_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kvkeep.toml"
    file.write_text("prot = 1\n")
    monkeypatch.setenv("KVKEEP_CONFIG", str(file))
    assert "prot" in refusal()


@pytest.mark.parametrize("content", [None, b"port = ", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "kvkeep.toml"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("KVKEEP_CONFIG", str(file))
    assert str(file) in refusal()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_an_open_host_without_a_key_is_refused(host: str) -> None:
    message = refusal(host=host)
    assert host in message
    assert "KVKEEP_API_KEY" in message
    assert load_settings({"host": host, "api_key": "secret-1"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert load_settings({"host": host}).host == host


@pytest.mark.parametrize("key", ["with space", "ümlaut", "new\nline"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    message = refusal(api_key=key)
    assert "KVKEEP_API_KEY" in message
    assert key not in message


def test_the_key_is_never_shown() -> None:
    settings = load_settings({"api_key": "secret-1"})
    assert "secret-1" not in repr(settings)
    assert "secret-1" not in refusal(api_key="secret-1", port=-1)


def test_settings_are_frozen() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.port = 1


def test_folders_of_the_user_are_resolved() -> None:
    assert load_settings({"data": "~/somewhere"}).data == Path.home() / "somewhere"


@pytest.mark.parametrize("url", ["file:///data", "s3://bucket/prefix?endpoint=http://host:9000"])
def test_a_store_is_a_directory_or_a_bucket(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("KVKEEP_STORE", url)
    assert load_settings().store == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file://relative", "file:///absolute/path"),
        ("/plain/path", "file:///directory or s3://bucket/prefix"),
        ("s3://bucket?endpiont=http://h", "there is no option 'endpiont'; there are endpoint, "),
        ("s3://key:hidden-word@bucket", "credentials belong in AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_wrong_store_is_refused_without_being_repeated(
    monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    monkeypatch.setenv("KVKEEP_STORE", url)
    with pytest.raises(SettingsInvalid, match="KVKEEP_STORE: ") as refused:
        load_settings()
    assert said in str(refused.value)
    assert "hidden-word" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis:6379/1",
        "rediss://user:word@redis",
        "unix:///run/redis.sock",
        "redis+sentinel://one,two/primary",
        "redis+cluster://one:7000,two:7001",
    ],
)
def test_a_redis_is_one_of_its_forms(url: str) -> None:
    assert load_settings({"redis_url": url}).redis_url == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://user:hidden-word@redis", "scheme 'http' is not one of redis, rediss, unix, "),
        ("redis://user:hidden-word@redis/records", "only the number of a database may stand"),
        ("redis://user:hidden-word@redis:port", "it cannot be read"),
        ("redis+cluster://user:hidden-word@one/1", "a cluster has no databases"),
        ("redis://user:hidden-word@redis?socket_timeout=9", "these are not to be set: "),
    ],
)
def test_a_wrong_redis_is_refused_without_being_repeated(url: str, said: str) -> None:
    message = refusal(redis_url=url)
    assert message.startswith("KVKEEP_REDIS_URL: ")
    assert said in message
    assert "hidden-word" not in message


def test_faults_are_none_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().faults is None
    monkeypatch.setenv("KVKEEP_FAULTS", "error=0.05,seed=7")
    assert load_settings().faults == "error=0.05,seed=7"
    monkeypatch.setenv("KVKEEP_FAULTS", "error=5")
    with pytest.raises(SettingsInvalid, match=r"KVKEEP_FAULTS = 'error=5': error = 5 is not"):
        load_settings()

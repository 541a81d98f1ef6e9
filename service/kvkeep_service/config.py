"""Every setting of the server: its unit, default and limit.

Precedence: values handed to `load_settings` (command line), then the environment
(``KVKEEP_`` + the upper-case name), then the TOML file that ``KVKEEP_CONFIG`` names, then the
default. Nothing else reads the environment, but for the overrides of the kernels room
(``KVKEEP_KERNELS``, see ``kvkeep_kernels.backend``).
"""

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvkeep_service.bounds import Bounds
from kvkeep_service.start_errors import SettingsInvalid
from kvkeep_storage.errors import Invalid
from kvkeep_storage.faults import Faults
from kvkeep_storage.quotas import Quotas
from kvkeep_storage.redis_link import RedisLink
from kvkeep_storage.store_url import parse_store_url

PREFIX = "KVKEEP_"
# Settings whose wrong value is not repeated: a secret may stand in it.
_UNSHOWN = frozenset({"api_key", "redis_url", "store"})
# Variables of the same family that other parts read.
_ELSEWHERE = frozenset({"KVKEEP_CONFIG", "KVKEEP_KERNELS", "KVKEEP_URL"})

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")

Folder = Annotated[Path, AfterValidator(Path.expanduser)]


class Settings(BaseSettings):
    """All knobs, read once at the start and handed down as small values."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    model: str = Field("bundled", min_length=1)
    """Hub id, directory, GGUF file, or "bundled" for the packaged demo model."""
    chat_template: Folder | None = None
    """Jinja file used instead of the model's own chat template."""
    device: str = "auto"
    """auto (CUDA when there is one), cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and cache; auto is float32 on a CPU, the model's own 16-bit type on a GPU."""
    cuda_graphs: bool = True
    """Whether decoding steps on a GPU are replayed from graphs; 0 launches every kernel anew."""
    threads: Annotated[int, Bounds(1, 1024)] | None = None
    """CPU threads of the engine; None leaves the choice to torch."""
    head_scores: Folder | None = None
    """What ``calibrate`` wrote for the model; None is its file in the data directory, if any."""
    model_cache: Folder = Path("~/.cache/kvkeep/models")
    """Where converted models are kept; never inside the data directory."""

    data: Folder = Path("kvkeep-data")
    """The data directory of the embedded store: records, objects and one lock file."""
    redis_url: str | None = Field(None, min_length=1)
    """A Redis of yours, in one of the forms of docs/redis.md; None runs the embedded server."""
    store: str | None = Field(None, min_length=1)
    """``file://`` or ``s3://`` URL of the object store; None is a folder of the data directory."""
    disk_cache: Folder | None = None
    """Directory for copies of what a remote store holds; None is one in the data directory."""
    disk_cache_bytes: Annotated[int, Bounds(0)] = 20 * 2**30
    """Budget of that directory, for all processes that share it; 0 keeps no copies."""
    faults: str | None = Field(None, min_length=1)
    """Faults that the object store shows on purpose, for tests and staging; None is none."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on, or a name, at all its addresses; all but loopback need an API key."""
    port: Annotated[int, Bounds(0, 65535)] = 8000
    """0 takes a free port, which the start line names."""
    api_key: SecretStr | None = None
    """The bearer key asked for everywhere but under /health; without it, loopback only."""
    body_limit_bytes: Annotated[int, Bounds(1024, 2**30)] = 32 * 2**20
    """The largest request body; a larger one is answered 413."""
    default_ttl_seconds: Annotated[int, Bounds(1, 10 * 365 * 86400)] | None = None
    """Expiry after creation of contexts registered without ``expires_after``; None is never."""

    reserve_tokens: Annotated[int, Bounds(192, 65536)] = 256
    """Positions kept free for question and answer: a document may use all but these."""
    max_queue: Annotated[int, Bounds(1, 100_000)] = 64
    """Queries that may wait for the engine; one more is answered 503 overloaded."""
    build_slice_ms: Annotated[float, Bounds(0, 60_000, is_above=True)] | None = None
    """What a build may take between two tokens of running answers; None is 0.4 of a token."""
    memory_bytes: Annotated[int, Bounds(2**20)] | None = None
    """For caches, builds and running answers together; None is 0.9 of what is free at the start."""
    resident_bytes: Annotated[int, Bounds(0)] = 4 * 2**30
    """Budget for caches held in the engine's memory."""
    host_bytes: Annotated[int, Bounds(0)] = 4 * 2**30
    """Budget for what a GPU gives up, in page-locked host memory; 0 keeps none."""
    session_bytes: Annotated[int, Bounds(0)] = 512 * 2**20
    """Of memory_bytes, a quarter at most, to continue answers in sessions; 0 keeps nothing."""
    session_ttl_seconds: Annotated[int, Bounds(1, 7 * 86400)] = 1800
    """How long an answer that nobody continues can be continued."""
    on_corrupt: Literal["rebuild", "fail"] = "rebuild"
    """What happens to a context whose stored cache is proven wrong."""
    tenant_bytes: Annotated[int, Bounds(0)] | None = None
    """Bytes of caches that one tenant may have, estimated while they are built; None is any."""
    tenant_contexts: Annotated[int, Bounds(0)] | None = None
    """Contexts that one tenant may have; None is any number."""
    tenant_queued: Annotated[int, Bounds(0)] | None = None
    """Contexts of one tenant that may wait for a build or be built; None is any number."""
    store_bytes: Annotated[int, Bounds(0)] | None = None
    """Bytes of all caches in the object store; the least recently used go. None is no cap."""
    stale_seconds: Annotated[float, Bounds(0, 3600)] = 60
    """While Redis is away, a cache in memory answers for so long after its record was read."""
    sweep_interval_seconds: Annotated[int, Bounds(1, 86400)] = 60
    """Between two sweeps for expired contexts and leftovers."""
    sweep_grace_seconds: Annotated[int, Bounds(1, 30 * 86400)] = 3600
    """Age an unreferenced generation must have before the sweeper removes it."""

    @property
    def quotas(self) -> Quotas:
        """What each tenant may have."""
        return Quotas(self.tenant_contexts, self.tenant_queued, self.tenant_bytes)

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError("must be auto, cpu, cuda or cuda:N, N being the number of a GPU")
        return device

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                # Prepares connections and makes none.
                RedisLink.open(url, timeout_seconds=1)
            except Invalid as error:
                raise ValueError(error.reason) from None
        return url

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: str | None) -> str | None:
        if store is not None:
            try:
                parse_store_url(store)
            except Invalid as error:
                raise ValueError(error.reason) from None
        return store

    @field_validator("faults")
    @classmethod
    def _check_faults(cls, faults: str | None) -> str | None:
        if faults is not None:
            try:
                Faults.parse(faults)
            except Invalid as error:
                raise ValueError(error.reason) from None
        return faults

    @model_validator(mode="after")
    def _check_the_door(self) -> Self:
        problem = _door_problem(self.host, self.api_key)
        if problem:
            raise ValueError(problem)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, then the optional TOML file."""
        sources = (init_settings, env_settings)
        path = os.environ.get("KVKEEP_CONFIG")
        if not path:
            return sources
        return (*sources, TomlConfigSettingsSource(settings_cls, toml_file=Path(path)))


def load_settings(overrides: Mapping[str, object] | None = None) -> Settings:
    """Read and check all settings. ``overrides`` are the flags given on the command line.

    Raises: SettingsInvalid, one line per wrong setting: variable, value and limit; also for an
        unknown ``KVKEEP_`` variable, an unknown key in the file, or an unreadable file.
    """
    _refuse_unknown_variables()
    _refuse_unreadable_file()
    try:
        return Settings(**dict(overrides or {}))  # type: ignore[arg-type]  # pydantic checks them
    except ValidationError as error:
        # The original would show rejected values, a key among them.
        raise SettingsInvalid([_line(item) for item in error.errors()]) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _refuse_unknown_variables() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields} | _ELSEWHERE
    unknown = sorted(
        name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known
    )
    if unknown:
        raise SettingsInvalid(
            [f"{name}: there is no such setting; is it spelled right?" for name in unknown]
        )


def _refuse_unreadable_file() -> None:
    path = os.environ.get("KVKEEP_CONFIG")
    if not path:
        return
    try:
        with open(path, "rb") as file:
            tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsInvalid([f"KVKEEP_CONFIG = {path!r}: cannot be read: {error}"]) from error


def _door_problem(host: str, api_key: SecretStr | None) -> str | None:
    if api_key is None:
        if is_loopback(host):
            return None
        return (
            f"KVKEEP_HOST = {host!r}: without KVKEEP_API_KEY only a loopback host"
            " (127.0.0.1, ::1, localhost) is allowed; set a key to open the server"
        )
    key = api_key.get_secret_value()
    if key and all("!" <= character <= "~" for character in key):
        return None
    return "KVKEEP_API_KEY: use one or more printable ASCII characters without spaces"


def _line(item: ErrorDetails) -> str:
    message = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    if item["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    shown = "" if name in _UNSHOWN else f" = {item['input']!r}"
    return f"{PREFIX}{name.upper()}{shown}: {message}"

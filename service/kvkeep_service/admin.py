"""The commands ``kvkeep-server admin``: look at what is kept, and mend it, by hand.

With the embedded store the server must be stopped first, and a command says so if it is not.
With a Redis and an object store of your own they run beside servers.
"""

import json
from collections import Counter
from typing import Annotated, Final

import typer

from kvkeep_service.command_line import Data, RedisUrl, Store, refused, run, settings_from
from kvkeep_service.config import Settings
from kvkeep_service.start_errors import SettingsInvalid
from kvkeep_service.stores import Stores, open_stores
from kvkeep_storage.accounts import Account, accounts
from kvkeep_storage.half_deleted import end_deletion, half_deleted
from kvkeep_storage.lone_documents import delete_lone_document, lone_documents
from kvkeep_storage.quotas import Quotas
from kvkeep_storage.reindex import reindex as restore
from kvkeep_storage.sweeper import Sweeper
from kvkeep_storage.verify import Verifier

admin = typer.Typer(no_args_is_help=True, help="Look at what a server keeps, and mend it.")

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def _settings_from(data: Data, redis_url: RedisUrl, store: Store) -> Settings:
    """Read the settings; where the data directory is needed it must be there, not be made.

    An empty one would say that everything is lost. Raises: Exit with code 2.
    """
    settings = settings_from({"data": data, "redis_url": redis_url, "store": store})
    is_needed = settings.redis_url is None or settings.store is None
    if is_needed and not settings.data.is_dir():
        found = f"KVKEEP_DATA = {str(settings.data)!r}: there is no such directory here"
        raise refused(SettingsInvalid([found]))
    return settings


@admin.command()
def reindex(data: Data = None, redis_url: RedisUrl = None, store: Store = None) -> None:
    """Restore all records, and what tenants are charged, after Redis was lost or flushed.

    Exit code 1 when something is too damaged to come back.
    """
    settings = _settings_from(data, redis_url, store)

    async def work() -> None:
        async with open_stores(settings) as stores:
            report = await restore(stores.objects, stores.metadata)
        typer.echo(f"missing and restored: {report.contexts} contexts, {report.caches} caches")
        for line in report.damaged:
            typer.echo(f"damaged: {line}", err=True)
        if report.damaged:
            raise typer.Exit(1)

    run(work())


@admin.command()
def verify(
    data: Data = None,
    redis_url: RedisUrl = None,
    store: Store = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended; damaged caches are rebuilt.")
    ] = False,
) -> None:
    """Read every document, mirror and cache, and compare them with their records.

    Exit code 1 when anything is wrong, repaired or not.
    """
    settings = _settings_from(data, redis_url, store)

    async def work() -> None:
        checked, problems, repaired = Counter[str](), 0, 0
        async with open_stores(settings) as stores:
            verifier = Verifier(
                stores.objects, stores.metadata, stores.leases, stores.jobs, repairs=repair
            )
            async for one in verifier.run():
                checked[one.what] += 1
                if one.problem is None:
                    continue
                problems += 1
                repaired += one.repair is not None
                done = "" if one.repair is None else f" ({one.repair})"
                typer.echo(f"{one.what} {one.name}: {one.problem}{done}", err=True)
        named = ", ".join(f"{checked[what]} {what}s" for what in _CHECKED)
        typer.echo(f"checked: {named}; {problems} problems, {repaired} repaired")
        if problems:
            raise typer.Exit(1)

    run(work())


_CHECKED: Final = ("record", "document", "mirror", "cache")


@admin.command()
def gc(
    data: Data = None,
    redis_url: RedisUrl = None,
    store: Store = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
) -> None:
    """Sweep now, and remove what a crash has left of a registration or a deletion.

    Only files older than KVKEEP_SWEEP_GRACE_SECONDS go. A dry run does not look at temporary
    files.
    """
    settings = _settings_from(data, redis_url, store)

    async def work() -> None:
        async with open_stores(settings) as stores:
            await _collect(stores, settings, is_dry=dry_run)

    run(work())


async def _collect(stores: Stores, settings: Settings, *, is_dry: bool) -> None:
    grace_seconds = settings.sweep_grace_seconds
    sweeper = Sweeper(
        stores.objects,
        stores.metadata,
        stores.leases,
        grace_seconds,
        store_bytes=settings.store_bytes,
    )
    report = await (sweeper.look() if is_dry else sweeper.run_once())
    lone = await lone_documents(stores.objects, stores.metadata, grace_seconds=grace_seconds)
    removed = []
    for item in lone:
        if is_dry or await delete_lone_document(stores.objects, stores.metadata, item.key):
            removed.append(item)
            typer.echo(f"lone document: {item.key.tenant}/{item.key.context_id}")
    ended = 0
    for key in await half_deleted(stores.objects, stores.metadata):
        if is_dry or await end_deletion(stores.objects, stores.metadata, key):
            ended += 1
            typer.echo(f"half deleted: {key.tenant}/{key.context_id}")
    freed_bytes = report.freed_bytes + sum(item.size_bytes for item in removed)
    typer.echo(
        f"{'would go' if is_dry else 'removed'}: {report.expired} expired contexts,"
        f" {report.orphan_generations} orphan generations, {report.temp_files} temporary files,"
        f" {report.evicted} caches over the cap, {len(removed)} lone documents,"
        f" {ended} half-deleted contexts; {_size(freed_bytes)}"
    )
    if report.failed:
        typer.echo(f"{report.failed} left to a later run: the store failed at them", err=True)


@admin.command()
def du(
    data: Data = None,
    redis_url: RedisUrl = None,
    store: Store = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in bytes.")] = False,
) -> None:
    """Show what each tenant has, beside its quotas."""
    settings = _settings_from(data, redis_url, store)

    async def work() -> None:
        async with open_stores(settings) as stores:
            found = await accounts(stores.objects, stores.metadata)
        if as_json:
            tenants = [_fields(account) for account in found]
            typer.echo(json.dumps({"quotas": _limits(settings.quotas), "tenants": tenants}))
        else:
            typer.echo(_table(found, settings.quotas))

    run(work())


def _limits(quotas: Quotas) -> dict[str, int | None]:
    return {"contexts": quotas.contexts, "queued": quotas.queued, "bytes": quotas.bytes}


def _fields(account: Account) -> dict[str, object]:
    return {
        "tenant": account.tenant,
        "contexts": account.usage.contexts,
        "queued": account.usage.queued,
        "document_bytes": account.document_bytes,
        "cache_bytes": account.cache_bytes,
        "charged_bytes": account.usage.bytes,
    }


def _table(found: list[Account], quotas: Quotas) -> str:
    rows = [("tenant", "contexts", "queued", "documents", "caches", "charged")]
    for account in found:
        usage = account.usage
        charged = _size(usage.bytes)
        rows.append(
            (
                account.tenant,
                _of(str(usage.contexts), quotas.contexts),
                _of(str(usage.queued), quotas.queued),
                _size(account.document_bytes),
                _size(account.cache_bytes),
                charged if quotas.bytes is None else f"{charged} of {_size(quotas.bytes)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _of(used: str, limit: int | None) -> str:
    return used if limit is None else f"{used} of {limit}"


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"

"""How the commands of ``kvkeep`` show a context: as a line, a row or a page."""

from collections.abc import Iterator

from kvkeep_client.fidelity import Fidelity
from kvkeep_client.models import ContextInfo


def summary(info: ContextInfo) -> str:
    """One line: what became of it."""
    if not info.is_ready:
        return f"{info.status}: {info.tokens.total:,} tokens to read"
    full = _bytes(info.compression.full_bytes)
    return (
        f"ready: {info.tokens.total:,} tokens, {_kept(info)} kept; stored: {_size(info)} of {full}"
    )


def row(info: ContextInfo) -> tuple[str, ...]:
    """The cells of a list: id, status, tokens, kept, size, queries, name."""
    return (
        info.id,
        info.status,
        f"{info.tokens.total:,}",
        _kept(info),
        _size(info),
        str(info.queries),
        info.name or "",
    )


def details(info: ContextInfo) -> Iterator[tuple[str, str]]:
    """Titles and values, line by line."""
    yield "context", info.id
    yield "name", info.name or "-"
    yield "status", info.status
    if info.progress is not None:
        yield "progress", f"{info.progress.stage}, {info.progress.fraction:.0%}"
    if info.error is not None:
        yield "error", f"{info.error.code}: {info.error.detail}"
    yield "model", info.model
    yield "tokens", f"{info.tokens.total:,} ({info.tokens.protected:,} protected)"
    remainder = ", with remainders" if info.compression.remainder else ""
    yield "kept", f"{_kept(info)} by {info.compression.policy_applied}{remainder}"
    yield "size", f"{_size(info)} of {_bytes(info.compression.full_bytes)}"
    if info.compression.ratios_available:
        yield "ratios", ", ".join(f"{ratio:g}" for ratio in info.compression.ratios_available)
    if info.fidelity is not None:
        yield "lost", _lost(info.fidelity)
    yield "queries", str(info.queries)
    yield "created", info.created_at.isoformat(" ", "seconds")
    yield "expires", info.expires_at.isoformat(" ", "seconds") if info.expires_at else "never"
    for key, value in info.metadata.items():
        yield "metadata", f"{key}={value}"


def _lost(fidelity: Fidelity) -> str:
    if fidelity.loss is not None and fidelity.top1_agreement is not None:
        same = f"{fidelity.top1_agreement:.0%} of next tokens the same"
        return f"{fidelity.loss:+.3f} nats per token, {same}"
    at = [f"{one.nll_kept - fidelity.nll_full:+.3f} at {one.ratio:g}" for one in fidelity.ratios]
    return f"not measured at this ratio; nats per token: {', '.join(at) or 'none'}"


def _kept(info: ContextInfo) -> str:
    ratio = info.compression.ratio
    return "auto" if ratio is None else f"{ratio:.0%}"


def _size(info: ContextInfo) -> str:
    """What is stored, which holds more than is kept where it is shared with who asked for more."""
    stored, achieved = info.compression.stored_bytes, info.compression.ratio_achieved
    if stored is None:
        return "-"
    held = _kept(info) if achieved is None else f"{achieved:.0%}"
    return _bytes(stored) if held == _kept(info) else f"{_bytes(stored)} ({held})"


def _bytes(count: int) -> str:
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and (larger := next(units, None)):
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"

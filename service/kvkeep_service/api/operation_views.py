"""What goes out over HTTP about the server itself: its model, versions and health."""

from collections.abc import Mapping
from typing import Literal

from kvkeep_service.api.views import View


class ModelView(View):
    """A model this server answers for, as the OpenAI API lists it."""

    id: str
    """Name of the model."""
    object: Literal["model"] = "model"
    """Always "model"."""
    owned_by: Literal["kvkeep"] = "kvkeep"
    """Always "kvkeep"."""


class ModelList(View):
    """The one model of this server."""

    object: Literal["list"] = "list"
    """Always "list"."""
    data: list[ModelView]
    """The one model."""


class VersionView(View):
    """What runs here: everything "auto" was resolved to."""

    version: str
    """Version of kvkeep."""
    model: str
    """Name of the model."""
    architecture: str
    """Its architecture, as its files name it."""
    device: str
    """Where it runs."""
    dtype: str
    """Type of its weights and of the KV caches."""
    max_document_tokens: int
    """Longest document that is accepted, in tokens."""
    kernels: str
    """Which kernels serve, and why."""
    weights_digest: str
    """Identity of the weights."""
    packages: Mapping[str, str]
    """Versions of the packages that an answer may depend on, by name."""


class HealthView(View):
    """Whether the server can take requests, and what is missing if not.

    ``degraded``: it answers, but its two stores do not belong together: reindex.
    """

    status: Literal["ok", "degraded", "unavailable"]
    """The worst of the checks."""
    checks: Mapping[str, Literal["ok", "degraded", "unavailable"]]
    """The state of each part, by name; empty for liveness."""

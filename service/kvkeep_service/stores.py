"""Everything that persists, as one value to hand down."""

from dataclasses import dataclass

from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects


@dataclass(frozen=True, slots=True)
class Stores:
    """Opened by the composition root and closed by it."""

    metadata: Metadata
    objects: Objects
    leases: Leases
    jobs: Jobs

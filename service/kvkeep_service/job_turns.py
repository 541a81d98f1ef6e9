"""Tenants take turns in the build queue, which itself is in order of arrival."""

from kvkeep_storage.jobs import Job, Jobs

_BLOCK_SECONDS = 1.0
# Jobs of one tenant that are looked past, before its next one is taken all the same.
_PASSED_OVER_MAX = 64


class JobTurns:
    """Claims jobs; while others wait, none of the tenant that was served last."""

    def __init__(self, jobs: Jobs, owner: str) -> None:
        """``owner`` names this process in the queue."""
        self._jobs = jobs
        self._owner = owner
        self._served: str | None = None

    def served(self, tenant: str) -> None:
        """Another tenant is next. Modifies the turns."""
        self._served = tenant

    async def claim(self) -> Job | None:
        """The next job, or None when none came for a second.

        What is passed over goes back to the queue, and no attempt is counted.
        Raises: MetadataUnavailable.
        """
        jobs = self._jobs
        job = await jobs.claim(self._owner, _BLOCK_SECONDS)
        if job is None or job.tenant != self._served or not await jobs.others_wait(job.tenant):
            return job
        passed_over = [job]
        try:
            while len(passed_over) < _PASSED_OVER_MAX:
                job = await jobs.claim(self._owner, 0)
                if job is None:
                    break
                if job.tenant != self._served:
                    return job
                passed_over.append(job)
            return passed_over.pop(0)
        finally:
            for one in passed_over:
                await jobs.retry_later(one, counted=False)

"""Sites that come back while a job runs: a restarted site cannot rejoin it, and takes part from the next job on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from fedbilevel.federation.session import Session

RETURNS = 3  # consecutive jobs restarted for a site that then gets no part
TROUBLE = ("error", "timeout", "no_reply")  # words in a site's job status


class ReturningSites:
    """Finds returning sites, for as many jobs as a run takes, and gives up those that never get a part."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._returns: Counter[str] = Counter()
        self._had_part: defaultdict[str, set[str]] = defaultdict(set)  # by job

    def found(self, session: Session, job: str, begun: bool) -> list[str]:
        """The sites that are connected but have no part in a running job; before it has begun, those that have lost theirs."""
        parts: defaultdict[str, set[str]] = defaultdict(set)
        for part in session.engine.get_client_job_status() or ():
            parts[part["client_name"]].add(part.get("job_id", part.get("status", "")))
        with_part = {site for site, jobs in parts.items() if job in jobs}
        if not with_part and not self._had_part[job]:
            return []
        self._had_part[job] |= with_part
        for site in with_part:
            del self._returns[site]
        troubled = {site for site, jobs in parts.items() if any(word in said for said in jobs for word in TROUBLE)}
        free = parts.keys() - with_part - troubled
        back = [site for site in session.federation.sites if site in free and (begun or site in self._had_part[job])]
        self._returns.update(back)
        for site in back:
            if self._returns[site] == RETURNS + 1:
                why = "see console.txt in that site's kit"
                self._say(f"{site} is connected but got no part in {RETURNS} jobs ({why}): continuing without it")
        return [site for site in back if self._returns[site] <= RETURNS]

    def restarted(self, job: str, back: Sequence[str]) -> bool:
        """Whether one of the sites that are back had a part in the job, which has died with its process."""
        return not self._had_part[job].isdisjoint(back)

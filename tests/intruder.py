"""Somebody with a kit who submits a job, or gives one of the engine's commands: `python intruder.py KIT USER JOB_OR_COMMAND`.

Prints what the server says, and how the job ends.
"""

import sys
import time
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import new_secure_session


def main(kit: str, user: str, job: str) -> None:
    try:
        session = new_secure_session(user, kit, timeout=4.0)
    except Exception as error:
        print(f"no session: {type(error).__name__}: {error}")
        return
    try:
        if not Path(job).is_dir():
            return print(session.api.do_command(job))
        number = session.submit_job(job)
        deadline = time.monotonic() + 60
        status = ""
        while not status.startswith("FINISHED") and time.monotonic() < deadline:
            time.sleep(0.3)
            status = str(session.get_job_meta(number).get("status"))
        print(f"job {number}: {status}")
    except Exception as error:
        print(f"no job: {type(error).__name__}: {error}")
    finally:
        session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

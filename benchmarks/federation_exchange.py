"""One exchange with four sites over TLS, ours against bare FLARE calls in the same job: `make bench-federation`.

An exchange sends an array to every site and averages the replies. Bytes are those of the sites' TCP connections to the
server, TLS included, compared with the floats that the run counts, four bytes each. Exits with 1 if ours is too slow or
sends too much.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fedbilevel.federation.job import JOB, write_job
from fedbilevel.federation.provision import SERVER_CLASS, SITE_CLASS, Federation, found
from fedbilevel.federation.session import Session, has_finished
from fedbilevel.runs.folder import RunFolder

SITES = ["site-1", "site-2", "site-3", "site-4"]
LIMIT = 300.0  # seconds
SLOWEST = 1.3  # times the bare calls' seconds
MOST_BYTES, LARGE = 1.1, 100_000  # times the counted bytes, for arrays of more bytes than these


def main() -> None:
    results = measured("exchange_job.ExchangeServer", "exchange_job.ExchangeSite")
    columns = ("array", "ours s", "bare s", "ratio", "counted MB", "on the wire MB", "ratio", "bare on the wire MB")
    print("".join(f"{column:>{len(column) + 3}}" for column in columns))
    failures = []
    for name, r in results.items():
        times = r["ours seconds"], r["bare seconds"], r["ours seconds"] / r["bare seconds"]
        sizes = r["counted"] / 1e6, r["ours bytes"] / 1e6, r["ours bytes"] / r["counted"], r["bare bytes"] / 1e6
        values = name, *(f"{v:.4f}" for v in times), *(f"{v:.3f}" for v in sizes)
        print("".join(f"{value:>{len(column) + 3}}" for column, value in zip(columns, values, strict=True)))
        if times[2] > SLOWEST:
            failures.append(f"{name}: {times[2]:.2f} times the bare calls' time, and at most {SLOWEST} is allowed")
        if r["counted"] / (2 * len(SITES)) > LARGE and sizes[2] > MOST_BYTES:
            failures.append(f"{name}: {sizes[2]:.2f} times the counted bytes, and at most {MOST_BYTES} is allowed")
    if failures:
        sys.exit("\n".join(failures))


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def started(folder: Path) -> Iterator[None]:
    """During the block, the server and all sites of a federation run."""
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", "from exchange_engine import main; main()", "federation", "start", folder]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, **here})
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def measured(server: str, site: str) -> dict:
    """What a job of these classes writes, in a federation of its own."""
    with tempfile.TemporaryDirectory(prefix="fedbilevel-") as temporary:
        folder, port = Path(temporary) / "federation", free_port()
        federation = found(folder, SITES, "localhost", port)
        for name in ("server", *SITES):
            file = folder / name / "local" / "resources.json"
            content = json.loads(file.read_text())
            content["class_allow_list"] += [server, site]
            file.write_text(json.dumps(content))
        with started(folder):
            return written(federation, Path(temporary), port, server, site)


def written(federation: Federation, folder: Path, port: int, server_class: str, site_class: str) -> dict:
    """What the job wrote."""
    run = RunFolder(folder / "run")
    run.path.mkdir()
    (run.path / "config.json").write_text(json.dumps({"configuration": {}, "identity": "exchange"}))
    job, out = folder / JOB, folder / "results.json"
    write_job(job, run, SITES)
    config = job / "app" / "config"
    server = json.loads((config / "config_fed_server.json").read_text().replace(SERVER_CLASS, server_class))
    server["components"][0]["args"] = {"out": str(out), "port": port}
    (config / "config_fed_server.json").write_text(json.dumps(server))
    client = (config / "config_fed_client.json").read_text().replace(SITE_CLASS, site_class)
    (config / "config_fed_client.json").write_text(client)
    deadline = time.monotonic() + LIMIT
    time.sleep(5)  # the server starts
    with Session.open(federation, print) as session:
        while len(session.connected()) < len(SITES):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all sites connected within {LIMIT:.0f} s")
            time.sleep(0.5)
        number = session.engine.submit_job(str(job))
        while not out.exists():
            ended = has_finished(session.status(number))
            if time.monotonic() > deadline or (ended and not out.exists()):
                logs = (folder / "federation" / "server" / "console.txt").read_text()
                raise RuntimeError(f"the job gave no results; the end of the server's log:\n{logs[-6000:]}")
            time.sleep(0.5)
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()

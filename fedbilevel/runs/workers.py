"""Who does jobs: this process, or others. A worker that dies costs its job, which is done again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from fedbilevel.errors import InputError
from fedbilevel.own_code import allow
from fedbilevel.settings import whole_number

MOST = 1024  # processes
ATTEMPTS = 3  # at a job whose workers die
LOOK = 0.25  # seconds between two looks at workers

Observe = Callable[[int, int], None]  # called with the number of a job and its rounds; and with -1 and 0 while nothing moves
Done = TypeVar("Done", covariant=True)


class Job(Protocol[Done]):
    """Work that any process can do, since it can be pickled."""

    def names(self) -> Iterable[str]:
        """The names of what it needs, which may be the user's files."""

    def do(self, observe: Callable[[int], None] = lambda rounds: None) -> Done:
        """What comes of it, which is no whole number; `observe` is called with its rounds."""


class Workers(Protocol):
    """Those who do jobs."""

    count: int  # how many they do at once

    def do(self, jobs: Sequence[Job[Done]], observe: Observe) -> Iterator[tuple[int, Done]]:
        """What comes of the jobs, each with its number, as they are done."""


class Here:
    """This process, one job after another."""

    count = 1

    def do(self, jobs: Sequence[Job[Done]], observe: Observe) -> Iterator[tuple[int, Done]]:
        """What comes of the jobs, each with its number, as they are done."""
        for number, job in enumerate(jobs):
            yield number, job.do(partial(observe, number))


class Processes:
    """Processes on this machine, each with its share of the cores, and with its own GPU where there are several."""

    def __init__(self, count: int):
        self.count = count
        self.started: dict[int, _Process] = {}  # by number

    def do(self, jobs: Sequence[Job[Done]], observe: Observe) -> Iterator[tuple[int, Done]]:
        """What comes of the jobs, each with its number, as they are done."""
        waiting, deaths = list(range(len(jobs))), [0] * len(jobs)
        busy: dict[int, int] = {}  # process -> job

        def bury(process: int) -> None:
            number = busy.pop(process)
            self.started.pop(process).end()
            waiting.insert(0, number)
            deaths[number] += 1
            if deaths[number] == ATTEMPTS:
                raise InputError(f"{ATTEMPTS} processes died at one job: they may need more memory") from None

        try:
            while waiting or busy:
                for process in [k for k in range(self.count) if k not in busy][: len(waiting)]:
                    busy[process] = waiting.pop(0)
                    pipe_to = self._process(process).pipe
                    try:
                        pipe_to.send(jobs[busy[process]])
                    except OSError:
                        bury(process)
                by_pipe: dict[Any, int] = {self.started[process].pipe: process for process in busy}
                for pipe in wait(list(by_pipe), LOOK):
                    process = by_pipe[pipe]
                    try:
                        said: Any = cast(Connection, pipe).recv()
                    except (EOFError, OSError):
                        bury(process)
                        continue
                    if isinstance(said, Exception):
                        raise said
                    if isinstance(said, int):
                        observe(busy[process], said)
                    else:
                        yield busy.pop(process), said
                observe(-1, 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; what they are doing is lost."""
        for process in self.started.values():
            process.end()
        self.started.clear()

    def _process(self, number: int) -> _Process:
        """The living process of a number; one that has died while it was idle is replaced."""
        if number in self.started and not self.started[number].process.is_alive():
            self.started.pop(number).end()
        if number not in self.started:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, number, self.count), daemon=True)
            process.start()
            theirs.close()
            self.started[number] = _Process(process, ours)
        return self.started[number]


class _Process(NamedTuple):
    """A process that does one job after another, and the pipe to it."""

    process: Any
    pipe: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe: Connection, number: int, of: int) -> None:
    """Do the jobs that come through a pipe, telling the rounds meanwhile, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has begun this one
    _settle_in(number, of)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job = pipe.recv()
            try:
                pipe.send(do_at_worker(job, pipe.send))
            except InputError as error:
                pipe.send(error)


class RayCluster:
    """The workers of an existing Ray cluster, which does a job again if its worker dies."""

    def __init__(self, address: str):
        try:
            import ray
        except ImportError:
            raise InputError("--ray needs Ray, which is not installed: pip install 'fedbilevel[ray]'") from None
        try:
            ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"there is no Ray cluster at {address} ({type(error).__name__}): start one with 'ray start'"
            ) from None
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.count = max(1, gpus or int(resources.get("CPU", 1)))
        self._do = ray.remote(num_cpus=0 if gpus else 1, num_gpus=1 if gpus else 0, max_retries=ATTEMPTS)(do_at_worker)

    def do(self, jobs: Sequence[Job[Done]], observe: Observe) -> Iterator[tuple[int, Done]]:
        """What comes of the jobs, each with its number, as they are done."""
        import ray

        waiting: dict[Any, int] = {self._do.remote(job): number for number, job in enumerate(jobs)}
        try:
            while waiting:
                for done in ray.wait(list(waiting), timeout=LOOK)[0]:
                    yield waiting.pop(done), ray.get(done)
                observe(-1, 0)
        except BaseException:
            for reference in waiting:
                ray.cancel(reference, force=True)
            raise

    def close(self) -> None:
        """Leave the cluster."""
        import ray

        ray.shutdown()


def require_workers(processes: int, ray: str) -> None:
    """Raise `InputError` unless such workers can be asked for."""
    if whole_number("processes", processes, 1, MOST) > 1 and ray:
        raise InputError("give either processes on this machine or the address of a Ray cluster, not both")


@contextlib.contextmanager
def workers(processes: int = 1, ray: str = "") -> Iterator[Workers]:
    """During the block, the workers that are asked for."""
    require_workers(processes, ray)
    if not ray and processes == 1:
        yield Here()
        return
    spread = RayCluster(ray) if ray else Processes(processes)
    try:
        yield spread
    finally:
        spread.close()


def do_at_worker(job: Job[Done], observe: Callable[[int], None] = lambda rounds: None) -> Done:
    """Do a job in another process, which has the user's leave to execute what the first process executes."""
    for name in job.names():
        allow(name)
    return job.do(observe)


def _settle_in(process: int, of: int) -> None:
    """Take this process's share of the cores, and one of the GPUs without all of its memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[process % len(cores) :: of] or cores)
    import jax

    devices = jax.local_devices()
    jax.config.update("jax_default_device", devices[process % len(devices)])

"""Run a script in a child process on a phantom GPU, within limits, and bring its trace back.

The parent never imports torch and trusts nothing of the child but the trace file: a crash, a hang
or a full memory in the child becomes an Outcome with the line at which it happened.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vramlint import phantom, sandbox
from vramlint.trace import code
from vramlint.trace.model import Environment, Outcome, Site, Trace
from vramlint.trace.pace import Limits

Progress = Callable[[str], None]

OUTPUT_KEPT = 64 << 10
GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a run may use. ``memory_bytes`` is host memory; None: most of what is free."""

    seconds: float = 300.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and how. ``argv0`` is the script's name as the user wrote it."""

    script: Path
    arguments: tuple[str, ...] = ()
    devices: tuple[phantom.Device, ...] = ()
    gpu: str = ""
    limits: Limits = Limits()
    bounds: Bounds = Bounds()
    capacity_bytes: int | None = None
    record: bool = True
    allocator: str | None = None


def run(
    job: Job, *, progress: Progress | None = None, echo: Callable[[bytes], None] | None = None
) -> Trace:
    """Trace ``job`` and return what was seen, however the script ended.

    ``progress`` gets short words while it runs; ``echo`` gets the script's output as it comes.
    Raises phantom.PhantomUnavailable where no phantom GPU can be made here.
    """
    build = phantom.find_torch()
    preload = [sandbox.library()]
    scratch = Path(tempfile.mkdtemp(prefix="vramlint-"))
    try:
        for name in ("overlay", "phantom", "tmp"):
            (scratch / name).mkdir()
        environment = dict(os.environ)
        environment.update(
            phantom.environment(
                job.devices,
                build,
                scratch / "phantom",
                capacity_override=job.capacity_bytes,
                preload_also=preload,
            )
        )
        environment.update(sandbox.environment(scratch / "overlay"))
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["VRAMLINT"] = "1"
        if job.allocator is not None:
            environment["PYTORCH_ALLOC_CONF"] = job.allocator
            environment["PYTORCH_CUDA_ALLOC_CONF"] = job.allocator
        return _Child(job, scratch, environment, progress, echo).trace()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Child:
    """One child process and what the parent knows of it."""

    def __init__(
        self,
        job: Job,
        scratch: Path,
        environment: dict[str, str],
        progress: Progress | None,
        echo: Callable[[bytes], None] | None,
    ) -> None:
        self.job, self.scratch, self.environment = job, scratch, environment
        self.progress, self.echo = progress, echo
        self.trace_file = scratch / "trace.gz"
        self.stacks = scratch / "stacks.txt"
        self.tail = bytearray()
        self.limit: Outcome | None = None
        self.peak_memory = 0

    def trace(self) -> Trace:
        """Start, watch, and read the result."""
        process = self._start()
        try:
            self._watch(process)
        finally:
            sandbox.kill_tree(process.pid)
            process.wait()
        return self._result(process.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        job = self.job
        description = {
            "script": str(job.script.resolve()),
            "argv0": str(job.script),
            "arguments": list(job.arguments),
            "trace": str(self.trace_file),
            "stacks": str(self.stacks),
            "temporary": str(self.scratch),
            "limits": asdict(job.limits),
            "engine": "phantom",
            "gpu": job.gpu,
            "record": job.record,
        }
        job_file = self.scratch / "job.json"
        job_file.write_text(json.dumps(description))
        # The package may live outside the child's own path (a checkout, a zipped tool): add it last,
        # and take out the working directory that -c puts first.
        root = str(Path(__file__).resolve().parents[2])
        bootstrap = (
            f"import sys; sys.path.pop(0); sys.path.append({root!r}); "
            "from vramlint.trace.child import main; main()"
        )
        return subprocess.Popen(
            [sys.executable, "-c", bootstrap, str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Read the child's output until it ends; stop it at a limit."""
        bounds = self.job.bounds
        allowed = bounds.memory_bytes or _most_of_free_memory()
        deadline = time.monotonic() + bounds.seconds
        assert process.stdout is not None
        output = process.stdout
        os.set_blocking(output.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            looked = 0.0
            while True:
                for _ in selector.select(timeout=0.1):
                    data = output.read(1 << 16)
                    if data == b"":
                        selector.unregister(output)
                    elif data:
                        self._output(data)
                if process.poll() is not None:
                    data = output.read()
                    if data:
                        self._output(data)
                    return
                now = time.monotonic()
                if not selector.get_map():
                    time.sleep(0.02)
                if now - looked >= 0.2:
                    looked = now
                    used = _resident_bytes(process.pid)
                    self.peak_memory = max(self.peak_memory, used)
                    if self.limit is None and used > allowed:
                        self.limit = Outcome("memory-limit", requested=allowed)
                        self._stop(process, polite=False)
                if self.limit is None and now > deadline:
                    self.limit = Outcome("time-limit", requested=int(bounds.seconds))
                    self._stop(process, polite=True)
                    deadline = now + GRACE_SECONDS
                elif self.limit is not None and now > deadline:
                    sandbox.kill_tree(process.pid)

    def _stop(self, process: subprocess.Popen[bytes], *, polite: bool) -> None:
        """Ask for the stack, then for an end (the trace is still written), or end it."""
        _signal(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        if polite:
            _signal(process.pid, signal.SIGTERM)
        else:
            sandbox.kill_tree(process.pid)

    def _output(self, data: bytes) -> None:
        self.tail += data
        del self.tail[:-OUTPUT_KEPT]
        if self.echo is not None:
            self.echo(data)

    def _result(self, status: int) -> Trace:
        tail = self.tail.decode("utf-8", "replace")
        trace = None
        if self.trace_file.exists():
            try:
                trace = Trace.load(self.trace_file)
            except ValueError:
                trace = None  # cut off while it was being written
        if trace is None:
            outcome = self.limit or _death(status)
            environment = Environment(
                "phantom", sys.version.split()[0], "", "", str(self.job.script),
                self.job.arguments, self.job.gpu,
            )  # fmt: skip
            trace = Trace(environment, outcome)
        outcome = trace.outcome
        if self.limit is not None and not outcome.complete:
            outcome = replace(self.limit, site=outcome.site)
        if outcome.site is None and outcome.kind in ("time-limit", "memory-limit", "killed"):
            outcome = replace(outcome, site=_stack_site(self.stacks))
        return replace(trace, outcome=outcome, output_tail=tail)


def _death(status: int) -> Outcome:
    """The child ended without a trace."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return Outcome("killed", f"the process was ended by {name}", exit_code=status)
    return Outcome("exited", "the process ended by os._exit", exit_code=status)


def _stack_site(stacks: Path) -> Site | None:
    """The innermost user line in faulthandler's last dump."""
    try:
        text = stacks.read_text(errors="replace")
    except OSError:
        return None
    for match in re.finditer(r'File "([^"]+)", line (\d+) in (\S+)', text):
        if code.is_user_file(match[1]):
            return Site(match[1], int(match[2]), match[3])
    return None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _most_of_free_memory() -> int:
    """Nine tenths of the memory that is available now, in bytes."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 * 9 // 10
    except OSError:
        pass
    return 8 << 30


def _resident_bytes(leader: int) -> int:
    """Resident memory of the child's session (children of its own included), in bytes."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if int(entry.name) != leader and os.getsid(int(entry.name)) != leader:
                continue
            fields = Path(entry.path, "statm").read_text().split()
            total += (int(fields[1]) - (int(fields[2]) if int(entry.name) != leader else 0)) * page
        except (OSError, ValueError):
            continue
    return total

"""The traced process: prepares, runs the script as ``__main__``, writes the trace.

Started by ``runner`` with one argument, a job file. Nothing of the script's is imported before it
asks for it; what a pre-flight changes is installed right after the modules in question load.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

from vramlint.trace import code, counters, imports, pace, recorder
from vramlint.trace.assumptions import assumptions, assume
from vramlint.trace.model import DeviceRecord, Environment, Event, Holder, Outcome, Site, Trace

# A polite end: the handler raises in the main thread, and what was seen so far is written.
POLITE_SIGNAL = signal.SIGTERM
# A rude look: faulthandler prints all stacks even if the interpreter never runs again.
STACK_SIGNAL = signal.SIGUSR1


class LimitReached(BaseException):
    """The runner asked for the end: time or memory is used up."""


def main() -> None:
    """Run the job named on the command line."""
    begun = time.monotonic()
    job = json.loads(Path(sys.argv[1]).read_text())
    stacks = open(job["stacks"], "w")  # noqa: SIM115 - faulthandler keeps it for the process's life
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=False)
    belts = _enter_sandbox(Path(job["temporary"]))

    recording = recorder.Recorder()
    peaks = counters.Peaks()
    limits = pace.Limits(**job["limits"])
    pacing = pace.Pace(recording, limits)
    _install(recording, pacing, peaks, job)

    def end_politely(*_: Any) -> None:
        raise LimitReached

    signal.signal(POLITE_SIGNAL, end_politely)
    outcome = _run(job, recording, pacing)
    signal.signal(POLITE_SIGNAL, signal.SIG_IGN)
    scripted = time.monotonic()
    trace = _trace(job, recording, pacing, peaks, outcome, belts)
    trace.seconds["script"] = scripted - begun  # type: ignore[index]
    trace.save(Path(job["trace"]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown would run the script's atexit handlers and join its threads.
    os._exit(0)


def _enter_sandbox(temporary: Path) -> tuple[str, ...]:
    from vramlint.sandbox import inside

    return inside.enter(temporary).names()


def _install(
    recording: recorder.Recorder, pacing: pace.Pace, peaks: counters.Peaks, job: dict[str, Any]
) -> None:
    from vramlint.trace import checkpoints, host, phantom_data, weights

    def torch_loaded(torch: types.ModuleType) -> None:
        pacing.install_memory(torch)
        counters.install(peaks, torch)
        host.install(torch)
        if job["record"]:
            recorder.install(recording, torch)

    imports.on_import("torch", torch_loaded)
    imports.on_import("torch.optim.optimizer", pacing.install_optimizers)
    imports.on_import("torch.utils.data.dataloader", pacing.install_loaders)
    checkpoints.install()
    phantom_data.install()
    weights.install()


def _run(job: dict[str, Any], recording: recorder.Recorder, pacing: pace.Pace) -> Outcome:
    """Execute the script as ``__main__``, with its own arguments and import path."""
    script = Path(job["script"])
    main_module = types.ModuleType("__main__")
    main_module.__file__ = str(script)
    main_module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    sys.argv = [job["argv0"], *job["arguments"]]
    sys.path.insert(0, str(script.parent))
    try:
        source = script.read_bytes()
        exec(compile(source, str(script), "exec"), main_module.__dict__)
    except BaseException as error:
        # After the trace has ended the script may fail in its own clean-up.
        recording.holders = find_holders(error.__traceback__)
        if pacing.ended:
            return Outcome("stopped")
        return _outcome(error, recording)
    recording.holders = find_holders(None)
    return Outcome("stopped" if pacing.ending else "finished")


def _outcome(error: BaseException, recording: recorder.Recorder) -> Outcome:
    """What an exception that left the script means. Drops the exception, which holds frames."""
    place = code.of_traceback(error.__traceback__)
    site = Site(*place) if place else None
    if isinstance(error, pace.EndOfTrace):
        return Outcome("stopped")
    if isinstance(error, LimitReached):
        return Outcome("time-limit", site=site)
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return Outcome("finished", site=site)
        is_number = isinstance(error.code, int)
        status = error.code if is_number else 1
        return Outcome("exited", "" if is_number else str(error.code), site, int(status or 1))
    if isinstance(error, SyntaxError) and error.filename and code.is_user_file(error.filename):
        site = Site(error.filename, error.lineno or 1)
    recording.tag_gradients()
    frames = traceback.TracebackException.from_exception(error)
    text = "".join(frames.format()) if len(frames.stack) < 200 else "".join(frames.format_exception_only())
    kind = "crashed"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        kind = "out-of-memory"
    return Outcome(
        kind,
        message=str(error),
        site=site,
        exit_code=1,
        exception=type(error).__name__,
        traceback=_script_part(text),
    )


def _script_part(text: str) -> str:
    """A formatted traceback without the frames of ``child`` itself."""
    lines, skipping = [], False
    for line in text.splitlines():
        if line.startswith('  File "'):
            skipping = line.startswith(f'  File "{__file__}"')
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            lines.append(line)
    return "\n".join(lines)


def _trace(
    job: dict[str, Any],
    recording: recorder.Recorder,
    pacing: pace.Pace,
    peaks: counters.Peaks,
    outcome: Outcome,
    belts: tuple[str, ...],
) -> Trace:
    torch: Any = sys.modules.get("torch")
    devices: tuple[DeviceRecord, ...] = ()
    if recording.mode is not None:
        recording.mode.__exit__(None, None, None)
    if torch is not None and torch.cuda.is_initialized():
        devices = _devices(torch, peaks, recording)
    pinned = 0
    if job["engine"] == "phantom":
        from vramlint.phantom import inside

        pinned = inside.peak_pinned_bytes()
        for kind, text in inside.assumed():
            assume(kind, text)
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return Trace(
        environment=Environment(
            engine=job["engine"],
            python=sys.version.split()[0],
            torch=torch.__version__ if torch is not None else "",
            cuda=(torch.version.cuda or "") if torch is not None else "",
            script=job["script"],
            arguments=tuple(job["arguments"]),
            gpu=job["gpu"],
            belts=belts,
            allocator=allocator,
        ),
        outcome=outcome,
        operations=recording.finished_operations(),
        sites=recording.sites(),
        modules=recording.modules(),
        devices=devices,
        marks=tuple(pacing.marks),
        tags=_tags(recording),
        holders=recording.holders,
        assumptions=assumptions(),
        pinned_peak_bytes=pinned,
        steps=pacing.steps,
        seconds={},
    )


def _tags(recording: recorder.Recorder) -> Any:
    from vramlint.trace.model import Tag

    return tuple(Tag(*tag) for tag in recording.tags)


def _devices(
    torch: Any, peaks: counters.Peaks, recording: recorder.Recorder
) -> tuple[DeviceRecord, ...]:
    counters.keep(peaks, torch)
    snapshot = torch.cuda.memory._snapshot()
    records = []
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(index)
        properties = torch.cuda.get_device_properties(index)
        history = snapshot["device_traces"][index] if index < len(snapshot["device_traces"]) else []
        records.append(
            DeviceRecord(
                index=index,
                name=properties.name,
                total_bytes=properties.total_memory,
                peak_allocated=peaks.allocated.get(index, 0),
                peak_reserved=peaks.reserved.get(index, 0),
                allocated=stats.get("allocated_bytes.all.current", 0),
                reserved=stats.get("reserved_bytes.all.current", 0),
                retries=stats.get("num_alloc_retries", 0),
                ooms=stats.get("num_ooms", 0),
                events=tuple(_events(history, recording)),
            )
        )
    return tuple(records)


def _events(history: list[dict[str, Any]], recording: recorder.Recorder) -> Any:
    """Torch's history entries as events; the operation by metadata, or by time without it."""
    from bisect import bisect_right

    started = recording.started
    for entry in history:
        if started:
            operation = bisect_right(started, entry["time_us"]) - 1
        else:
            operation = int(entry.get("user_metadata") or -1)
        action = entry["action"]
        address = entry.get("addr", entry.get("device_free", 0))
        pool = tuple(entry.get("pool_id") or (0, 0))
        yield Event(action, address, entry["size"], entry.get("stream", 0), operation, pool)


def find_holders(traceback: types.TracebackType | None) -> tuple[Holder, ...]:
    """Containers that hold several CUDA tensors, in the script's modules and in the frames that an
    exception left alive. Called when the run is over, so reading locals changes nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    scopes: list[tuple[str, dict[str, Any]]] = []
    while traceback is not None:
        frame = traceback.tb_frame
        if code.is_user_file(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            scopes.append((frame.f_code.co_filename, frame.f_locals))
        traceback = traceback.tb_next
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and code.is_user_file(path):
            scopes.append((path, vars(module)))
    found: dict[tuple[str, str], Holder] = {}
    for path, variables in scopes:
        for name, value in list(variables.items()):
            for expression, container in _containers(name, value, path):
                count = _held(torch, container)
                if count >= 2:
                    holder = Holder(expression, type(container).__name__, count, Site(path, 0))
                    found.setdefault((path, expression), holder)
    return tuple(found.values())


def _containers(name: str, value: Any, path: str) -> list[tuple[str, Any]]:
    """A variable itself, and the plain attributes of an object of the script's own classes."""
    if name.startswith("__"):
        return []
    kind = sys.modules.get(type(value).__module__)
    if kind is not None and code.is_user_file(getattr(kind, "__file__", None) or ""):
        attributes = getattr(value, "__dict__", {})
        return [(f"{name}.{a}", v) for a, v in list(attributes.items()) if not a.startswith("_")]
    return [(name, value)]


def _held(torch: Any, value: Any) -> int:
    """How many CUDA tensors a plain container holds, two levels deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple, set)) and type(value).__name__ != "deque":
        return 0
    count = 0
    for item in list(value)[:10_000]:
        if isinstance(item, torch.Tensor):
            count += item.is_cuda and not isinstance(item, torch.nn.Parameter)
        elif isinstance(item, (list, tuple)):
            count += sum(isinstance(x, torch.Tensor) and x.is_cuda for x in item)
    return count


if __name__ == "__main__":
    main()

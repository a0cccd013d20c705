"""Traces on disk: gzip JSON lines, one record a line, so that a trace can be a CI artefact.

The first line names the format and its version. Tensor references, sites and the like are written
as short arrays; a reader of another version refuses instead of guessing.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vramlint.trace.assumptions import Assumption
from vramlint.trace.model import (
    DeviceRecord,
    Environment,
    Event,
    Holder,
    Mark,
    Operation,
    Outcome,
    Site,
    Tag,
    TensorRef,
    Trace,
)

FORMAT = "vramlint-trace"
VERSION = 1


def save(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path``; the same trace gives the same bytes."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 1, raw, mtime=0) as out:
        for record in _records(trace):
            out.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def load(path: Path) -> Trace:
    """Read a trace. Raises ValueError with a sentence for a person, OSError for the file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return _read(lines)
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a vramlint trace ({error})") from error
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is a damaged vramlint trace ({error!r})") from error


def _records(trace: Trace) -> Iterator[Any]:
    environment, outcome = trace.environment, trace.outcome
    yield {
        "format": FORMAT,
        "version": VERSION,
        "environment": {n: getattr(environment, n) for n in Environment.__slots__},
        "outcome": {n: getattr(outcome, n) for n in Outcome.__slots__ if n != "site"},
        "outcome_site": _site(outcome.site),
        "sites": [_site(s) for s in trace.sites],
        "modules": list(trace.modules),
        "assumptions": [[a.kind, a.text] for a in trace.assumptions],
        "holders": [[h.expression, h.kind, h.tensors, _site(h.site)] for h in trace.holders],
        "pinned_peak_bytes": trace.pinned_peak_bytes,
        "steps": trace.steps,
        "seconds": dict(trace.seconds),
        "output_tail": trace.output_tail,
    }
    for mark in trace.marks:
        yield ["m", *(getattr(mark, n) for n in Mark.__slots__)]
    for tag in trace.tags:
        yield ["g", *(getattr(tag, n) for n in Tag.__slots__)]
    for op in trace.operations:
        yield [
            "o", op.name, op.site, op.module, op.phase, op.step,
            [_tensor(t) for t in op.inputs], [_tensor(t) for t in op.outputs], op.arguments,
        ]  # fmt: skip
    for device in trace.devices:
        yield ["d", *(getattr(device, n) for n in DeviceRecord.__slots__ if n != "events")]
        for e in device.events:
            yield ["e", e.action, e.address, e.size, e.stream, e.operation, *e.pool]


def _site(site: Site | None) -> list[Any] | None:
    return None if site is None else [site.path, site.line, site.function]


def _tensor(t: TensorRef) -> list[Any]:
    return [t.address, t.storage, list(t.shape), t.dtype, t.device]


def _read(lines: Iterator[str]) -> Trace:
    head = json.loads(next(lines, "null"))
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("not a vramlint trace")
    if head["version"] != VERSION:
        raise ValueError(
            f"a trace of format version {head['version']}; this vramlint reads version {VERSION}"
        )
    operations: list[Operation] = []
    marks: list[Mark] = []
    tags: list[Tag] = []
    devices: list[tuple[list[Any], list[Event]]] = []

    def tensor(t: list[Any]) -> TensorRef:
        return TensorRef(t[0], t[1], tuple(t[2]), t[3], t[4])

    for line in lines:
        kind, *r = json.loads(line)
        if kind == "e":
            devices[-1][1].append(Event(*r[:5], (r[5], r[6])))
        elif kind == "o":
            operations.append(
                Operation(
                    name=r[0], site=r[1], module=r[2], phase=r[3], step=r[4],
                    inputs=tuple(map(tensor, r[5])), outputs=tuple(map(tensor, r[6])),
                    arguments=r[7],
                )
            )  # fmt: skip
        elif kind == "m":
            marks.append(Mark(*r))
        elif kind == "g":
            tags.append(Tag(*r))
        elif kind == "d":
            devices.append((r, []))
    environment = dict(head["environment"])
    environment["arguments"] = tuple(environment["arguments"])
    environment["belts"] = tuple(environment["belts"])
    site = head["outcome_site"]
    return Trace(
        environment=Environment(**environment),
        outcome=Outcome(**head["outcome"], site=Site(*site) if site else None),
        operations=tuple(operations),
        sites=tuple(Site(*s) for s in head["sites"]),
        modules=tuple(head["modules"]),
        devices=tuple(DeviceRecord(*r, events=tuple(events)) for r, events in devices),
        marks=tuple(marks),
        tags=tuple(tags),
        holders=tuple(Holder(h[0], h[1], h[2], Site(*h[3]) if h[3] else None) for h in head["holders"]),
        assumptions=tuple(Assumption(*a) for a in head["assumptions"]),
        pinned_peak_bytes=head["pinned_peak_bytes"],
        steps=head["steps"],
        seconds=head["seconds"],
        output_tail=head["output_tail"],
    )

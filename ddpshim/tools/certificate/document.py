"""Reads, checks and writes the JSON of a certificate. Nothing in it is unpickled or executed.

One object: `facts` (code, data, arguments, environment), `tensors` (names), `marks` (one for every `every` steps) and
`checkpoints` (files beside it). Each mark has the hash of the one before in its own, and `seal` is the hash of the last
one and of all else. While the program runs, its newest marks are lines of a file beside it, so that what is written for
a mark does not grow with the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import CertificateError
from ddpshim.reading import read_bytes

SCHEMA = 1
_MOST_BYTES = 256 * 1024 * 1024
_REST_PER_NEWEST = 10  # the whole is written again once its newest marks have a tenth of its bytes
_HEX = re.compile(r"[0-9a-f-]+")
# Field of the document or of a mark -> type. A float may be written as an integer.
_FIELDS: dict[str, Any] = {
    "certificate": int,
    "ddpshim": str,
    "program": list,  # words after `run`
    "exact": int,
    "ranks": int,
    "every": int,
    "first": int,  # the step after which recording began; 0 but in a repetition
    "seed": int,  # of the generators that the program does not seed
    "facts": dict,
    "tensors": list,
    "marks": list,
    "checkpoints": list,
    "starts": list,  # steps from which a later start continued
    "numbers_at_end": str,  # as in a mark, after the last step; empty before the end
    "is_complete": bool,
    "seal": str,
}
_MARK: dict[str, Any] = {
    "step": int,
    "samples": list,  # of each step since the mark before, a hash of the samples
    "losses": list,  # of each step, the sum over its backward passes
    "numbers": list,  # of each step, a hash of the numbers read from tensors since the one before; may be empty
    "generators": str,  # empty for a mark that was made later than at its step
    "weights": str,
    "optimizer": str,
    "chain": str,
}
WIDTH = 16  # hexadecimal digits of the hash of one tensor
UNCHANGED = "-" * WIDTH  # no optimizer that has the tensor made a step since the mark before
PARTS = {"code": dict, "packages": dict, "data": dict, "environment": dict}


def digest(value: Any) -> str:
    """Return the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def chained(before: str, mark: dict[str, Any]) -> str:
    """Return the hash of a mark and all before it."""
    return digest([before, {name: value for name, value in mark.items() if name != "chain"}])


def seal_of(document: dict[str, Any], chain: str) -> str:
    """Return the hash of a certificate whose last mark has the hash `chain`."""
    return digest([chain, {name: value for name, value in document.items() if name not in ("seal", "marks")}])


def begin(document: dict[str, Any]) -> str:
    """Return the hash that the first mark continues."""
    return digest([document[name] for name in ("program", "exact", "every", "seed")])


def write(document: dict[str, Any], path: Path) -> None:
    """Seal a certificate and replace `path` by it: readers see the old one or the new one. Local."""
    document["seal"] = seal_of(document, document["marks"][-1]["chain"] if document["marks"] else begin(document))
    lists = ("marks", "checkpoints")
    rest = json.dumps({name: value for name, value in document.items() if name not in lists}, indent=1)
    rows = [f' "{name}": [\n{_rows(document[name])}\n ]' for name in lists]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(rest[: rest.rindex("}")].rstrip() + ",\n" + ",\n".join(rows) + "\n}\n")
    os.replace(partial, path)
    _newest(path).unlink(missing_ok=True)


def add(mark: dict[str, Any], path: Path) -> bool:
    """Write a new mark beside the certificate in `path`; False if it is time to write the whole, again. Local."""
    with _newest(path).open("a") as file:
        file.write(json.dumps(mark) + "\n")
        return path.exists() and file.tell() * _REST_PER_NEWEST < path.stat().st_size


def _newest(path: Path) -> Path:
    return path.with_name(f".{path.name}.newest")


def _rows(items: list[dict[str, Any]]) -> str:
    return ",\n".join(f"  {json.dumps(item)}" for item in items)


def read(path: Path, first: int = 0) -> dict[str, Any]:
    """Return a certificate that begins after step `first`. Raises CertificateError if it is none, or was edited."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CertificateError(f"{path} is larger than {_MOST_BYTES >> 20} MB: no certificate is. It was not read.")
        document = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CertificateError(f"{path} cannot be read as a certificate ({error}). Nothing was run.") from None
    wrong = next(_wrong_in(document, first), None)
    if wrong is not None:
        raise CertificateError(
            f"{path} is not a certificate of this version of ddpshim: {wrong}. Nothing was run. Make it with "
            "`python -m ddpshim run --certify FILE`."
        )
    broken = _first_broken(document)
    if broken is not None:
        raise CertificateError(
            f"{path} was edited after it was written: {broken}. Nothing was run; get the file again from who made it."
        )
    return _with_newest(document, path)


def _with_newest(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a certificate with the marks beside it, up to the first that does not continue those before it."""
    try:
        lines = read_bytes(_newest(path)).splitlines()
    except OSError:
        return document
    whole = {**document, "marks": [*document["marks"]]}
    for line in lines:
        try:
            mark = json.loads(line)
        except (ValueError, RecursionError):  # the process was killed while it wrote it
            break
        longer = {**whole, "marks": [mark]}
        last = whole["marks"][-1] if whole["marks"] else {"step": whole["first"], "chain": begin(whole)}
        if next(_wrong_marks(longer, last["step"]), None) or mark["chain"] != chained(last["chain"], mark):
            break
        whole["marks"].append(mark)
    return whole


def _wrong_in(document: Any, first: int) -> Any:
    """Yield what a document lacks."""
    if not isinstance(document, dict) or document.get("certificate") != SCHEMA:
        yield f"its field 'certificate' is not {SCHEMA}"
        return
    odd = [*_wrong_fields(document, _FIELDS, "")]
    yield from odd
    if odd:
        return
    yield from (f"facts has no '{name}'" for name in PARTS if not isinstance(document["facts"].get(name), dict))
    if not document["program"] or not all(isinstance(word, str) for word in document["program"]):
        yield "its program is not a list of words"
    if not all(isinstance(name, str) for name in document["tensors"]):
        yield "its tensors are not names"
    if not (document["exact"] > 0 < document["every"] and document["ranks"] > 0):
        yield "'exact', 'ranks' and 'every' are not positive"
    if document["first"] != first:
        yield f"it begins after step {document['first']}"
    yield from _wrong_marks(document, document["first"])
    for saved in document["checkpoints"]:
        odd = [*_wrong_fields(saved, {"step": int, "file": str, "sha256": str}, "a checkpoint's ")]
        yield from odd
        if not odd and os.path.basename(saved["file"]) != saved["file"]:
            yield f"the checkpoint {saved['file']!r} lies in another folder"


def _wrong_marks(document: dict[str, Any], last: int) -> Any:
    """Yield what the marks lack, of which the first follows that of step `last`."""
    for mark in document["marks"]:
        odd = [*_wrong_fields(mark, _MARK, "a mark's ")]
        yield from odd
        if odd:
            return
        if not mark["losses"]:
            yield f"the mark of step {mark['step']} has no losses"
        num, rest = divmod(len(mark["weights"]), WIDTH)  # an optimizer may start later
        if rest or num > len(document["tensors"]) or not _HEX.fullmatch(mark["weights"]):
            yield f"the weights of step {mark['step']} are not a hash for each tensor"
        if not all(isinstance(loss, (int, float)) for loss in mark["losses"]):
            yield f"the losses of step {mark['step']} are not numbers"
        for name in ("samples", "numbers"):
            if len(mark[name]) != len(mark["losses"]) and (mark[name] or name == "samples"):
                yield f"step {mark['step']} does not have a hash of {name} for each loss"
        if mark["step"] - len(mark["losses"]) != last:
            yield f"the mark of step {mark['step']} does not follow that of step {last}: steps are missing"
        last = mark["step"]


def _wrong_fields(found: Any, fields: dict[str, Any], whose: str) -> Any:
    for name, kind in fields.items():
        if not isinstance(found, dict) or type(found.get(name)) is not kind:
            yield f"{whose}field '{name}' is missing or not of type {kind.__name__}"


def _first_broken(document: dict[str, Any]) -> Optional[str]:
    before = begin(document)
    for mark in document["marks"]:
        if mark["chain"] != chained(before, mark):
            return f"the mark of step {mark['step']}, or what stands before it, is not what was recorded"
        before = mark["chain"]
    if document["seal"] == seal_of(document, before):
        return None
    return "its facts, its checkpoints or its end are not what was recorded"


def folder_of(path: Path) -> Path:
    """Return the folder with a certificate's checkpoints."""
    return path.with_name(f"{path.stem}.checkpoints")

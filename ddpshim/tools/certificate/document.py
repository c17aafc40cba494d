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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpshim.errors import CertificateError
from ddpshim.reading import read_bytes

SCHEMA = 1
_MOST_BYTES = 256 * 1024 * 1024
_REST_PER_NEWEST = 10  # the whole is written again once its newest marks have a tenth of its bytes
_HEX = re.compile(r"[0-9a-f-]+")
_NO_WORD = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # others stand for bytes that are no UTF-8
WIDTH = 16  # hexadecimal digits of the hash of one tensor
UNCHANGED = "-" * WIDTH  # no optimizer that has the tensor made a step since the mark before
# What each field holds: a type, a list of such, or a mapping with fields of its own; `str: ...` stands for any name.
_MARK: dict[Any, Any] = {
    "step": int,
    "samples": [str],  # of each step since the mark before, a hash of the samples
    "losses": [float],  # of each step, the sum over its backward passes
    "numbers": [str],  # of each step, a hash of the numbers read from tensors since the one before; may be empty
    "generators": str,  # empty for a mark that was made later than at its step
    "weights": str,
    "optimizer": str,
    "chain": str,
}
_FIELDS: dict[Any, Any] = {
    "certificate": int,
    "program": [str],  # words after `run`
    "exact": int,
    "ranks": int,
    "every": int,
    "first": int,  # the step after which recording began; 0 but in a repetition
    "seed": int,  # of the generators that the program does not seed
    "facts": {
        "code": {str: str},
        "packages": {str: {"version": str, "sha256": str}},
        "data": {str: str},
        "environment": {"variables": {str: str}},
    },
    "tensors": [str],  # their names
    "marks": list,  # of _MARK
    "checkpoints": [{"step": int, "file": str, "sha256": str}],
    "starts": [int],  # steps from which a later start continued
    "numbers_at_end": str,  # as in a mark, after the last step; empty before the end
    "is_complete": bool,
    "seal": str,
}


def digest(value: Any) -> str:
    """Return the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def chained(before: str, mark: dict[str, Any]) -> str:
    """Return the hash of a mark and all before it."""
    return digest([before, {name: value for name, value in mark.items() if name != "chain"}])


def begin(document: dict[str, Any]) -> str:
    """Return the hash that the first mark continues."""
    return digest([document[name] for name in ("program", "exact", "every", "seed")])


def last_hash(document: dict[str, Any]) -> str:
    """Return the hash that the next mark continues."""
    return str(document["marks"][-1]["chain"]) if document["marks"] else begin(document)


def seal_of(document: dict[str, Any]) -> str:
    """Return the hash of a certificate."""
    rest = {name: value for name, value in document.items() if name not in ("seal", "marks")}
    return digest([last_hash(document), rest])


def write(document: dict[str, Any], path: Path) -> None:
    """Seal a certificate and replace `path` by it: readers see the old one or the new one. Local."""
    document["seal"] = seal_of(document)
    rest = json.dumps({name: value for name, value in document.items() if name != "marks"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(mark)}" for mark in document["marks"])
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(f'{rest[:-2]},\n "marks": [\n{rows}\n ]\n}}\n')
    os.replace(partial, path)
    _newest(path).unlink(missing_ok=True)


def add(mark: dict[str, Any], path: Path) -> bool:
    """Write a new mark beside the certificate in `path`; False if it is time to write the whole, again. Local."""
    with _newest(path).open("a") as file:
        file.write(json.dumps(mark) + "\n")
        return path.exists() and file.tell() * _REST_PER_NEWEST < path.stat().st_size


def _newest(path: Path) -> Path:
    return path.with_name(f".{path.name}.newest")


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
    before = begin(document)
    for mark in document["marks"]:
        if mark["chain"] != chained(before, mark):
            raise _edited(path, f"the mark of step {mark['step']}, or what stands before it, is")
        before = mark["chain"]
    if document["seal"] != seal_of(document):
        raise _edited(path, "its facts, its checkpoints or its end are")
    return document if document["is_complete"] else _with_newest(document, path)


def _edited(path: Path, what: str) -> CertificateError:
    return CertificateError(
        f"{path} was edited after it was written: {what} not what was recorded. Nothing was run; get the file again "
        "from who made it."
    )


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
        last = whole["marks"][-1]["step"] if whole["marks"] else whole["first"]
        is_wrong = any(_wrong_in_mark(mark, last, len(whole["tensors"])))
        if is_wrong or mark["chain"] != chained(last_hash(whole), mark):
            break
        whole["marks"].append(mark)
    return whole


def _wrong_in(document: Any, first: int) -> Iterator[str]:
    """Yield what is wrong in a document. Only the first is certain: what follows relies on it."""
    if not isinstance(document, dict) or document.get("certificate") != SCHEMA:
        yield f"its field 'certificate' is not {SCHEMA}"
    yield from _wrong_kinds(document, _FIELDS, "the file")
    if document["program"] in ([], ["-m"]):
        yield "its program has no name"
    for word in (*document["program"], *document["facts"]["environment"]["variables"].values()):
        if _NO_WORD.search(word):
            yield f"{word!r:.60} cannot be given to a program"
    if not (document["exact"] > 0 < document["every"] and document["ranks"] > 0):
        yield "'exact', 'ranks' and 'every' are not positive"
    if document["first"] != first:
        yield f"it begins after step {document['first']}"
    for mark in document["marks"]:
        yield from _wrong_in_mark(mark, first, len(document["tensors"]))
        first = mark["step"]
    for saved in document["checkpoints"]:
        if os.path.basename(saved["file"]) != saved["file"]:
            yield f"the checkpoint {saved['file']!r} lies in another folder"


def _wrong_in_mark(mark: Any, last: int, num_tensors: int) -> Iterator[str]:
    """Yield what is wrong in a mark that follows that of step `last`, as `_wrong_in` does."""
    yield from _wrong_kinds(mark, _MARK, f"the mark after step {last}")
    step, num = mark["step"], len(mark["losses"])
    if not num or len(mark["samples"]) != num or len(mark["numbers"]) not in (0, num):
        yield f"the mark of step {step} does not have a loss, and hashes, for each step"
    num_hashes, rest = divmod(len(mark["weights"]), WIDTH)  # an optimizer may start later
    if rest or num_hashes > num_tensors or not _HEX.fullmatch(mark["weights"]):
        yield f"the weights of step {step} are not a hash for each tensor"
    if step - num != last:
        yield f"the mark of step {step} does not follow that of step {last}: steps are missing"


def _wrong_kinds(found: Any, kind: Any, what: str) -> Iterator[str]:
    """Yield what is not of its kind, as in `_FIELDS`."""
    own: Any = kind if isinstance(kind, type) else type(kind)
    if type(found) is not own:
        yield f"{what} is missing or not of type {own.__name__}"
    elif isinstance(kind, list):
        for number, item in enumerate(found):
            yield from _wrong_kinds(item, kind[0], f"item {number} of {what}")
    elif isinstance(kind, dict):
        for name in found if str in kind else kind:
            yield from _wrong_kinds(found.get(name), kind.get(name, kind.get(str)), f"{name} of {what}")


def folder_of(path: Path) -> Path:
    """Return the folder with a certificate's checkpoints."""
    return path.with_name(f"{path.stem}.checkpoints")

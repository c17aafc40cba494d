"""Reads, checks and writes the JSON of a certificate. Nothing in it is unpickled or executed.

One object:
- program (words after `run`), exact, ranks, every, seed (of the generators that the program does not seed)
- first: the step after which recording began; 0 but in a repetition
- facts: code, packages, data, environment
- marks, one for every `every` steps, and where a file was saved: step; losses, for each step since the mark before the
  sum over its backward passes; weights, a hash of the tensors of the optimizers that stepped since then
- checkpoints: step, file (beside the certificate), sha256
- is_complete: whether the program has ended

Each mark has the hash of the one before in its own, and `seal` is the hash of the last one and of all else.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ddpshim.errors import CertificateError
from ddpshim.reading import read_bytes

SCHEMA = 1
_MOST_BYTES = 256 * 1024 * 1024


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


def read(path: Path, first: int = 0) -> dict[str, Any]:
    """Return a certificate that begins after step `first`. Raises CertificateError if it is none, or was edited."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CertificateError(f"{path} is larger than {_MOST_BYTES >> 20} MB: no certificate is. It was not read.")
        document: dict[str, Any] = json.loads(read_bytes(path))
        if document["certificate"] != SCHEMA:
            raise ValueError(f"its field 'certificate' is not {SCHEMA}")
        _check(document, first)
        before = begin(document)
        for mark in document["marks"]:
            if mark["chain"] != chained(before, mark):
                raise _edited(path, f"the mark of step {mark['step']}, or what stands before it, is")
            before = mark["chain"]
        if document["seal"] != seal_of(document):
            raise _edited(path, "its facts, its checkpoints or its end are")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CertificateError(
            f"{path} cannot be read as a certificate of this version of ddpshim ({error}). Nothing was run. Make it "
            "with `python -m ddpshim run --certify FILE`."
        ) from None
    return document


def _edited(path: Path, what: str) -> CertificateError:
    return CertificateError(
        f"{path} was edited after it was written: {what} not what was recorded. Nothing was run; get the file again "
        "from who made it."
    )


def _check(document: dict[str, Any], first: int) -> None:
    """Raise ValueError if a step is missing, or a checkpoint lies elsewhere: somebody made the hashes anew."""
    if document["first"] != first:
        raise ValueError(f"it begins after step {document['first']}")
    for mark in document["marks"]:
        if mark["step"] - len(mark["losses"]) != first:
            raise ValueError(f"the mark of step {mark['step']} does not follow that of step {first}: steps are missing")
        first = mark["step"]
    for saved in document["checkpoints"]:
        if os.path.basename(saved["file"]) != saved["file"]:
            raise ValueError(f"the checkpoint {saved['file']!r} lies in another folder")


def folder_of(path: Path) -> Path:
    """Return the folder with a certificate's checkpoints."""
    return path.with_name(f"{path.stem}.checkpoints")

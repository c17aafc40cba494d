"""Lists what ddpshim does not know in another release of robomimic: `python -m evidence.new_release TREE`.

TREE is the package's folder, the folder above it, or the name of an installed package. Exits 1 if there is anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from ddpshim.robomimic import known
from ddpshim.trainers.patching.files import Status, status
from ddpshim.trainers.patching.patchset import transform_moved


def compared(tree: str) -> tuple[list[str], int]:
    """Return a line for each thing that ddpshim relies on, and how many of them the tree lacks; write nothing.

    Raises PatchError if there is no such tree.
    """
    looked = status(tree)
    lines: list[str] = []
    num_lacking = 0
    for found, text in [*_patches(looked), *_data(looked.directory)]:
        lines.append(f"{'ok     ' if found else 'LACKING'} {text}")
        num_lacking += not found
    return lines, num_lacking


def _patches(looked: Status) -> Iterator[tuple[bool, str]]:
    if looked.state != "unknown":
        yield True, f"patch set {looked.patch_set.name} fits ({looked.state})"
        return
    yield False, f"no patch set fits; the nearest is {looked.patch_set.name}"
    for file in looked.files:
        if file.state != "unknown":
            yield file.state != "missing", f"  {file.name}: {file.state}"
            continue
        _, num_hunks, odd = transform_moved(looked.patch_set.patches, file.name, file.content)
        yield not odd, f"  {file.name}: changed upstream; {num_hunks - len(odd)} of {num_hunks} hunks have their lines"
        for problem in odd:
            yield False, f"    {problem}"


def _data(package: Path) -> Iterator[tuple[bool, str]]:
    file = package / "utils" / "dataset.py"
    if not file.is_file():
        yield False, "utils/dataset.py is not there: batches are fetched sample by sample"
        return
    digest = known.digest_of_methods(file, "SequenceDataset", known.SAMPLE_METHODS)
    release = known.release_of(digest)
    if release is None:
        text = f"SequenceDataset makes samples by other code (digest {digest or 'missing'}), so they are fetched singly"
        yield (
            False,
            f"{text}. Show by tests/same_samples/test_sequences.py that batches are equal, then add it to known.py",
        )
    else:
        yield True, f"SequenceDataset makes samples as in {release.names}"
    loading = known.digest_of_methods(file, "SequenceDataset", ["load_dataset_in_memory"])
    yield loading == known.LOAD_DIGEST, f"load_dataset_in_memory has the digest {loading}, known is {known.LOAD_DIGEST}"
    meta = known.digest_of_methods(file, "MetaDataset", known.META_METHODS)
    if meta:
        yield meta == known.META_DIGEST, f"MetaDataset has the digest {meta}, known is {known.META_DIGEST}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", metavar="TREE")
    lines, num_lacking = compared(parser.parse_args().tree)
    print("\n".join(lines))
    return int(num_lacking > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Patch sets on small codebases made on the spot: chosen by content, all or nothing, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import pytest

from ddpshim.__main__ import main
from ddpshim.errors import PatchError
from ddpshim.trainers import patching
from ddpshim.trainers.patching import apply, revert, status
from tests.preloaded_commands import patience

TRAIN = "import torch\n\n\ndef train(model):\n    model.fit()\n    return model\n"
TRAIN_PATCHED = "import torch\nimport ddpshim\n\n\ndef train(model):\n    ddpshim.fit(model)\n    return model\n"
LOOP = "one\ntwo\nthree"  # no newline at the end
LOOP_PATCHED = "one\nTWO\nthree\nfour"
COMMON = "shared = True\n"
COMMON_PATCHED = "shared = 2\n"

# 01 and 02 touch train.py one after the other; 02 has no context lines at all.
SET_A = {
    "01-launch.patch": """\
Description: start under a launcher
 --- not a file header, this is prose
Origin: made by hand, base commit 0123abc
Forwarded: no
Without it: ranks do not find each other.
--- a/toybot/train.py
+++ b/toybot/train.py
@@ -1,2 +1,3 @@
 import torch
+import ddpshim
\x20
""",
    "02-fit.patch": """\
Description: synchronise
--- a/toybot/train.py\t2024-01-01 00:00:00
+++ b/toybot/train.py\t2024-01-01 00:00:00
@@ -6 +6 @@ def train(model):
-    model.fit()
+    ddpshim.fit(model)
--- a/toybot/sub/loop.py
+++ b/toybot/sub/loop.py
@@ -2,2 +2,3 @@
-two
-three
\\ No newline at end of file
+TWO
+three
+four
\\ No newline at end of file
--- a/toybot/common.py
+++ b/toybot/common.py
@@ -1 +1 @@
-shared = True
+shared = 2
""",
}
NEWER = TRAIN.replace("fit", "fit_all")
SET_B = {
    "01-fit.patch": """\
--- a/toybot/train.py
+++ b/toybot/train.py
@@ -4,0 +5 @@
+    # new
--- a/toybot/common.py
+++ b/toybot/common.py
@@ -1 +1 @@
-shared = True
+shared = 2
""",
}
ORIGINAL = {"train.py": TRAIN, "sub/loop.py": LOOP, "common.py": COMMON}
PATCHED = {"train.py": TRAIN_PATCHED, "sub/loop.py": LOOP_PATCHED, "common.py": COMMON_PATCHED}


class Toy(NamedTuple):
    patches: Path
    root: Path  # the folder that contains the package

    @property
    def package(self) -> Path:
        return self.root / "toybot"

    @property
    def target(self) -> str:
        return str(self.root)


def write_package(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": '__version__ = "1.0"\n', **files}.items():
        path = root / "toybot" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def write_set(folder: Path, diffs: dict[str, str], source: Path, base: str = "toybot 1.0") -> None:
    folder.mkdir(parents=True)
    for name, text in diffs.items():
        (folder / name).write_bytes(text.encode())
    patching.build_manifest(folder, source, base)


def contents(package: Path) -> dict[str, bytes]:
    """Every file under the package, ddpshim's own included."""
    return {str(p.relative_to(package)): p.read_bytes() for p in sorted(package.rglob("*")) if p.is_file()}


def assert_holds(package: Path, files: dict[str, str]) -> None:
    assert {name: (package / name).read_bytes().decode() for name in files} == files


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Two releases; 2.0 shares common.py with 1.0. The target is a pristine 1.0."""
    patches = tmp_path / "patches"
    write_set(patches / "toybot" / "1.0", SET_A, write_package(tmp_path / "pristine", ORIGINAL))
    newer = write_package(tmp_path / "newer", {"train.py": NEWER, "common.py": COMMON})
    write_set(patches / "toybot" / "2.0", SET_B, newer, "commit 89abcdef0")
    monkeypatch.setattr(patching, "default_patches_root", lambda: patches)
    return Toy(patches, write_package(tmp_path / "site", ORIGINAL))


def fail_replace_of(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    real, left = os.replace, [error]

    def replace(source: Path, destination: Path) -> None:
        if Path(destination).name == name and left:
            raise left.pop()
        real(source, destination)

    monkeypatch.setattr(os, "replace", replace)


def test_a_set_is_chosen_only_if_all_its_files_match(toy: Toy) -> None:
    # common.py alone fits both sets, before and after patching; the package calls itself 1.0.
    write_package(toy.root, {"train.py": NEWER})
    done = apply(toy.target)
    assert done.patch_set.name == "toybot/2.0"
    assert_holds(toy.package, {"common.py": COMMON_PATCHED, "sub/loop.py": LOOP})


def test_several_different_fitting_sets_are_refused_until_named(toy: Toy) -> None:
    other = {"01.patch": SET_B["01-fit.patch"].partition("--- a/toybot/common.py")[2]}
    other["01.patch"] = "--- a/toybot/common.py" + other["01.patch"]
    write_set(toy.patches / "fork" / "1.0", other, toy.root)
    with pytest.raises(PatchError, match=r"several different sets \(fork/1.0, toybot/1.0\).*--set"):
        apply(toy.target)
    assert apply(toy.target, "toybot/1.0").patch_set.name == "toybot/1.0"
    assert revert(toy.target, "toybot/1.0").patch_set.name == "toybot/1.0"
    assert_holds(toy.package, ORIGINAL)


def test_equal_sets_are_one_and_naming_a_set_does_not_weaken_the_match(toy: Toy) -> None:
    write_set(toy.patches / "fork" / "1.0", SET_A, toy.root)
    before = contents(toy.package)
    with pytest.raises(PatchError, match=r"train.py: unknown"):
        apply(toy.target, "2.0")
    with pytest.raises(PatchError, match=r"no patch set '3\.0'.*toybot/1\.0, toybot/2\.0"):
        apply(toy.target, "3.0")
    assert contents(toy.package) == before
    assert apply(toy.target).state == "applied"


def test_what_is_neither_as_released_nor_patched_is_refused(toy: Toy) -> None:
    train = toy.package / "train.py"
    for text in (TRAIN.replace("\n", "\r\n"), TRAIN_PATCHED + "# mine\n"):  # other line endings; an edit
        train.write_bytes(text.encode())
        before = contents(toy.package)
        for work in (apply, revert):
            with pytest.raises(PatchError, match=r"train\.py: unknown"):
                work(toy.target)
        assert contents(toy.package) == before
        write_package(toy.root, ORIGINAL)
        apply(toy.target)
    train.unlink()
    with pytest.raises(PatchError, match=r"train\.py: missing"):
        apply(toy.target)


def test_a_package_patched_by_another_ddpshim_is_sent_to_that_one(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "older"
    write_set(older / "toybot" / "1.0", {"01.patch": SET_A["01-launch.patch"]}, toy.root)
    with monkeypatch.context() as other:
        other.setattr(patching, "default_patches_root", lambda: older)
        apply(toy.target)
    with pytest.raises(PatchError, match=r"If another version of ddpshim has patched it, revert with that"):
        apply(toy.target)
    monkeypatch.setattr(patching, "default_patches_root", lambda: older)
    revert(toy.target)
    assert_holds(toy.package, ORIGINAL)


def test_target_is_found_by_name_without_importing_it(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy.package / "__init__.py").write_text("raise SystemError('imported')\n")
    monkeypatch.syspath_prepend(str(toy.root))
    monkeypatch.chdir(toy.root)
    for target in (str(toy.package), "./toybot", "."):
        assert status(target).directory == toy.package
    assert apply("toybot").directory == toy.package
    assert "toybot" not in sys.modules
    assert_holds(toy.package, PATCHED)


def test_target_is_found_through_an_editable_finder(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    # As setuptools' finder does: the folder may be called otherwise than the package.
    renamed = toy.root / "src_of_toybot"
    toy.package.rename(renamed)

    def find_spec(name: str, path: object = None, target: object = None) -> object:
        found = spec_from_file_location(name, renamed / "__init__.py", submodule_search_locations=[str(renamed)])
        return found if name == "toybot" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, SimpleNamespace(find_spec=find_spec)])
    apply("toybot")
    assert_holds(renamed, PATCHED)


def test_targets_that_are_not_there_are_named(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PatchError, match=r"toybot is not installed for .*--target PATH"):
        apply("toybot")
    with pytest.raises(PatchError, match=r"'nowhere' is neither a package .*\(toybot\) nor a folder"):
        apply("nowhere")
    (toy.package / "__init__.py").unlink()
    monkeypatch.syspath_prepend(str(toy.root))
    with pytest.raises(PatchError, match="no __init__"):
        apply("toybot")


def test_a_symlink_stays_one_and_its_target_is_replaced(toy: Toy, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "real_train.py"
    real.parent.mkdir()
    (toy.package / "train.py").rename(real)
    os.link(real, tmp_path / "cache.py")
    (toy.package / "train.py").symlink_to(real)
    apply(toy.target)
    assert (toy.package / "train.py").is_symlink()
    assert (real.read_text(), (tmp_path / "cache.py").read_text()) == (TRAIN_PATCHED, TRAIN)
    revert(toy.target)
    assert (toy.package / "train.py").is_symlink()
    assert real.read_text() == TRAIN


def test_mode_bits_stay(toy: Toy) -> None:
    for mode in (0o755, 0o600, 0o444):
        (toy.package / "train.py").chmod(mode)
        for work in (apply, revert):
            work(toy.target)
            assert stat.S_IMODE((toy.package / "train.py").stat().st_mode) == mode


@pytest.mark.parametrize("name", ["common.py", "loop.py", "train.py"])
def test_a_failing_replace_puts_everything_back(toy: Toy, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = contents(toy.package)
    fail_replace_of(monkeypatch, name, OSError(28, "No space left on device"))
    with pytest.raises(PatchError, match=r"No space left.*all files were restored"):
        apply(toy.target)
    assert contents(toy.package) == before
    apply(toy.target)
    after = contents(toy.package)
    fail_replace_of(monkeypatch, name, OSError(28, "No space left on device"))
    with pytest.raises(PatchError, match="all files were restored"):
        revert(toy.target)
    assert contents(toy.package) == after
    fail_replace_of(monkeypatch, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        revert(toy.target)
    assert contents(toy.package) == after


@pytest.mark.parametrize(("work", "files"), [(apply, PATCHED), (revert, ORIGINAL)])
def test_a_failure_to_put_back_can_be_completed(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, work: Callable[[str], object], files: dict[str, str]
) -> None:
    real, seen = os.replace, []

    def replace(source: Path, destination: Path) -> None:
        seen.append(Path(destination).name)
        if len(seen) > 1:  # the first file, then a dead disk
            raise OSError(5, "Input/output error")
        real(source, destination)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        with pytest.raises(PatchError, match=r"so did restoring them.*`revert` completes it"):
            apply(toy.target)
    look = status(toy.target)
    assert (look.state, [file.state for file in look.files]) == ("partly applied", ["patched", "original", "original"])
    work(toy.target)
    assert_holds(toy.package, files)
    assert not list(toy.package.rglob(".*"))


def test_a_folder_that_cannot_be_written_changes_nothing(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = contents(toy.package), tempfile.NamedTemporaryFile

    def make(dir: Path, **options: Any) -> Any:
        if dir.name == "sub":
            raise PermissionError(13, "Permission denied")
        return real(dir=dir, **options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", make)
    with pytest.raises(PatchError, match=r"Permission denied.*all files were restored"):
        apply(toy.target)
    assert contents(toy.package) == before


@pytest.mark.launch
def test_many_processes_at_once_end_in_one_apply(toy: Toy) -> None:
    script = (
        "import sys, pathlib; from ddpshim.trainers import patching\n"
        "patching.default_patches_root = lambda: pathlib.Path(sys.argv[2])\n"
        "print(patching.apply(sys.argv[1]).state)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, toy.target, str(toy.patches)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    printed = [process.communicate(timeout=patience(120))[0].strip() for process in running]
    assert printed == ["applied"] * 4
    assert_holds(toy.package, PATCHED)
    assert not list(toy.package.rglob(".*"))


def test_a_damaged_set_is_refused(toy: Toy) -> None:
    folder = toy.patches / "toybot" / "1.0"
    good = json.loads((folder / "manifest.json").read_text())
    hashes = good["files"]["toybot/train.py"]

    def with_patched(digest: str) -> dict[str, object]:
        return {**good, "files": {**good["files"], "toybot/train.py": {**hashes, "patched": digest}}}

    damages = [
        ({**good, "patches": ["01-launch.patch"]}, "does not describe"),
        ({**good, "version": "1.1"}, "does not describe"),
        ({**good, "files": {"toybot/train.py": hashes}}, "does not describe"),
        (with_patched(hashes["original"]), "two hashes"),
        ({**good, "files": 3}, "not a manifest"),
        (with_patched("0" * 64), "set is damaged"),
    ]
    before = contents(toy.package)
    for manifest, text in damages:
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(PatchError, match=text):
            apply(toy.target)
    (folder / "manifest.json").unlink()
    with pytest.raises(PatchError, match="patch manifest"):
        patching.load_sets()
    shutil.rmtree(toy.patches)
    with pytest.raises(PatchError, match="No patch set under"):
        patching.load_sets()
    assert contents(toy.package) == before


def test_a_manifest_needs_the_tree_its_diffs_were_made_from(toy: Toy, tmp_path: Path) -> None:
    apply(toy.target)
    with pytest.raises(PatchError, match=r"toybot/common\.py, 02-fit\.patch, line 1: 'shared = True' .* not there"):
        patching.build_manifest(toy.patches / "toybot" / "1.0", toy.root, "x")
    with pytest.raises(PatchError, match="Could not read"):
        patching.build_manifest(toy.patches / "toybot" / "1.0", tmp_path, "x")
    with pytest.raises(PatchError, match=r"No \*.patch"):
        patching.build_manifest(tmp_path, toy.root, "x")


def test_a_set_borrows_the_patches_of_another_release(toy: Toy, tmp_path: Path) -> None:
    """Its lines stand once each, elsewhere; the hashes in its manifest are its own."""
    folder, lent = toy.patches / "toybot" / "1.1", sorted((toy.patches / "toybot" / "1.0").glob("*.patch"))
    folder.mkdir()
    root = write_package(tmp_path / "twice", {name: text * 2 for name, text in ORIGINAL.items()})
    with pytest.raises(PatchError, match=r"occur at lines .* the wrong code"):
        patching.build_manifest(folder, root, "toybot 1.1", lent)
    assert not (folder / "manifest.json").exists()
    root = write_package(tmp_path / "moved", {name: f"# a new head\n\n{text}" for name, text in ORIGINAL.items()})
    made = patching.build_manifest(folder, root, "toybot 1.1", lent)
    assert made["patches"] == ["../1.0/01-launch.patch", "../1.0/02-fit.patch"]
    before = contents(root / "toybot")
    done = apply(str(root))
    assert (done.patch_set.name, done.state) == ("toybot/1.1", "applied")
    assert_holds(root / "toybot", {name: f"# a new head\n\n{text}" for name, text in PATCHED.items()})
    assert revert(str(root)).state == "not applied"
    assert contents(root / "toybot") == before
    apply(toy.target)
    assert_holds(toy.package, PATCHED)


HEAD = b"--- a/p/f\n+++ b/p/f\n"
OF_GIT = b"prose\ndiff --git a/p/f b/p/f\nindex 123..456 100644\n" + HEAD


@pytest.mark.parametrize(
    ("diff", "old", "new"),
    [
        (b"@@ -2 +2 @@\n-b\n+B\n", b"a\nb\nc\n", b"a\nB\nc\n"),
        (b"@@ -2 +2 @@\n-b\r\n+c\r\n", b"a\r\nb\r\n", b"a\r\nc\r\n"),
        (b"@@ -1,0 +2,2 @@\n+x\n+y\n", b"a\nb\n", b"a\nx\ny\nb\n"),
        (b"@@ -0,0 +1 @@\n+x\n", b"a\n", b"x\na\n"),
        (b"@@ -0,0 +1 @@\n+x\n", b"", b"x\n"),
        (b"@@ -2,2 +1,0 @@\n-b\n-c\n", b"a\nb\nc\nd\n", b"a\nd\n"),
        (b"@@ -1 +0,0 @@\n-a\n", b"a\n", b""),
        (b"@@ -1,0 +2 @@\n+x\n@@ -3 +3,0 @@\n-c\n@@ -4 +4 @@\n-d\n+D\n", b"a\nb\nc\nd\n", b"a\nx\nb\nD\n"),
        (b"@@ -1 +1 @@ def f\n-a\n+a\n\\ No newline at end of file\n", b"a\n", b"a"),
        (b"@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n", b"a", b"a\n"),
        (b"@@ -1,2 +1,2 @@\n-a\n+A\n b\n\\ No newline at end of file\n", b"a\nb", b"A\nb"),
        (b"@@ -2 +2 @@\n---- x\n+++ y\n", b"a\n--- x\n", b"a\n++ y\n"),
        (b"@@ -1 +1 @@\n-a\x0cb\rc\xff\n+\xfe\n", b"a\x0cb\rc\xff\n", b"\xfe\n"),
    ],
)
def test_hunks_apply_and_reverse(diff: bytes, old: bytes, new: bytes) -> None:
    for head in (HEAD, OF_GIT):
        assert _transformed(head + diff, old) == (new, [])
        assert _transformed(head + diff, new, "original") == (old, [])


def _transformed(diff: bytes, content: bytes, wanted: str = "patched", **options: Any) -> tuple[bytes, list[str]]:
    return patching.transform({"01.patch": patching.parse_diff(diff, "01.patch")}, "p/f", content, wanted, **options)


@pytest.mark.parametrize(
    "old", [b"x\na\nb\nc\n", b"a\nB\nc\n", b"a\n", b"", b"a\nb", b"a\nb \nc\n", b"a\r\nb\r\nc\r\n"]
)
def test_no_fuzz_and_no_offset(old: bytes) -> None:
    (odd,) = _transformed(HEAD + b"@@ -2 +2 @@\n-b\n+B\n", old)[1]
    assert odd.startswith("p/f, 01.patch, line 2: 'b' and the lines after it occur not there, in a file of ")


def test_an_insertion_beyond_the_end_or_after_a_cut_line_is_refused() -> None:
    diff = HEAD + b"@@ -3,0 +4 @@\n+x\n"
    assert "a file of 2 lines" in _transformed(diff, b"a\nb\n")[1][0]
    assert "would join the two" in _transformed(diff, b"a\nb\nc")[1][0]
    assert _transformed(diff, b"a\n", is_moved=True) == (
        b"a\n",
        ["p/f, 01.patch, line 3: has no unchanged line to find it by; place it by hand"],
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"only prose\n", "no `--- a/"),
        (HEAD, "without a hunk"),
        (2 * (HEAD + b"@@ -1 +1 @@\n-a\n+b\n"), "two for one file"),
        (HEAD + b"@@ -1,2 +1 @@\n-a\n+b\n", "counts 2,1 lines but has 1,1"),
        (HEAD + b"@@ -1 +1 @@\n-a\n+b\n+c\n", "neither a hunk"),
        (HEAD + b"@@ -1,2 +1,2 @@\n-a\n+b\n\n", "counts 2,2"),  # an editor stripped the space
        (HEAD + b"@@ -1 +1 @@\n-a\n+b", "counts 1,1"),  # cut off
        (HEAD + b"@@ -x +1 @@\n-a\n+b\n", "neither a hunk"),
        (b"@@ -1 +1 @@\n-a\n+b\n", "no `--- a/"),
        (b"--- a/p/f\n+++ b/p/g\n@@ -1 +1 @@\n-a\n+b\n", "inside the tree"),
        (b"--- /dev/null\n+++ b/p/f\n@@ -0,0 +1 @@\n+b\n", "inside the tree"),
        (b"--- a/../f\n+++ b/../f\n@@ -1 +1 @@\n-a\n+b\n", "inside the tree"),
        (b"--- a//etc/f\n+++ b//etc/f\n@@ -1 +1 @@\n-a\n+b\n", "inside the tree"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", "inside the tree"),
        (b"diff --git a/p/f b/p/f\nold mode 100644\nnew mode 100755\n" + HEAD, "mode"),
    ],
)
def test_malformed_diffs_are_refused(text: bytes, reason: str) -> None:
    with pytest.raises(PatchError, match=reason) as caught:
        patching.parse_diff(text, "01.patch")
    assert str(caught.value).startswith("01.patch line ")


@pytest.mark.launch
@pytest.mark.skipif(shutil.which("patch") is None, reason="needs GNU patch")
def test_the_manual_commands_of_the_readme_do_the_same(toy: Toy) -> None:
    diffs = sorted((toy.patches / "toybot" / "1.0").glob("*.patch"))
    for order, flags, files in ((diffs, ["--forward"], PATCHED), (diffs[::-1], ["-R"], ORIGINAL)):
        for path in order:
            command = ["patch", "-p1", "--fuzz=0", "--batch", *flags, "-i", str(path)]
            subprocess.run(command, cwd=toy.root, check=True, stdout=subprocess.DEVNULL)
        assert_holds(toy.package, files)
        assert revert(toy.target).state == "not applied"
        write_package(toy.root, files)


def test_commands_print_and_give_exit_codes(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--target", toy.target]

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["patch", *argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    assert run("status", *target) == (
        0,
        f"toybot/1.0 in {toy.package}: not applied\n"
        f"  original  {patching.sha256(COMMON.encode())[:12]}  toybot/common.py\n"
        f"  original  {patching.sha256(LOOP.encode())[:12]}  toybot/sub/loop.py\n"
        f"  original  {patching.sha256(TRAIN.encode())[:12]}  toybot/train.py\n",
        "",
    )
    assert run("check", *target) == (0, f"toybot/1.0 in {toy.package}: would change 3 files\n", "")
    assert run("apply", *target, "--set", "1.0")[1].startswith("toybot/1.0: applied\n")
    assert "already applied" in run("apply", *target)[1]
    assert run("check", *target) == (0, f"toybot/1.0 in {toy.package}: already applied\n", "")
    assert run("status", *target)[1].startswith(f"toybot/1.0 in {toy.package}: applied\n  patched ")
    assert "toybot/1.0: reverted" in run("revert", *target)[1]
    code, out, _ = run("revert", *target)
    assert (code, out.splitlines()[0]) == (0, "toybot/1.0: not applied, nothing to do")

    write_package(toy.root, {"train.py": "edited\n"})
    edited = patching.sha256(b"edited\n")
    for action in ("check", "apply", "revert"):
        code, out, err = run(action, *target)
        assert (code, out) == (1, "")
        assert err.startswith("ddpshim: ")
        assert "  toybot/sub/loop.py: original\n  toybot/train.py: unknown\n" in err
    assert "toybot/1.0 (2 of 3 files match; the package calls itself 1.0)" in err
    assert "get toybot again (toybot 1.0)" in err
    code, out, err = run("status", *target)
    assert (code, err) == (0, "")
    assert f"  unknown   {edited[:12]}  toybot/train.py" in out

    folder = toy.patches / "toybot" / "1.0"
    (folder / "manifest.json").unlink()
    pristine = str(toy.root.parent / "pristine")
    code, out, _ = run("manifest", str(folder), "--source", pristine, "--base", "again")
    assert code == 0
    assert patching.load_sets()[0].base == "again"

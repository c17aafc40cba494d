"""One writer for programs that do not know of ranks: what is on the disk, and what each rank sees, is one process's.

A program runs alone, then as the main rank and, in the same process, as a rank that comes to each line after the main
rank has ended (or before it has begun): whatever it sees and decides has to be the same.
"""

from __future__ import annotations

import _sqlite3
import atexit
import contextlib
import ctypes
import functools
import gc
import glob
import gzip
import io
import json
import logging
import multiprocessing
import os
import pickle
import posix
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable
from unittest import mock

import h5py
import matplotlib.figure
import numpy as np
import pytest
import tensorboardX
import torch
import torch.distributed as dist

import ddpshim
from ddpshim.errors import SyncError
from ddpshim.job.world import World
from ddpshim.process.job import Job
from ddpshim.trainers.unedited import file_overlay
from ddpshim.trainers.unedited import main_file_log as saves
from ddpshim.trainers.unedited.clock import Clock, Commands
from ddpshim.trainers.unedited.file_overlay import View
from ddpshim.trainers.unedited.main_file_log import MainsChanges
from ddpshim.trainers.unedited.private_files import PrivateFiles
from tests.ranks import run_ranks


def tree(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*"))}


def content(path: Path) -> Any:
    if path.is_symlink():
        return os.readlink(path)
    if path.suffix == ".pt":
        return torch.load(path)  # a file of torch's has the name in it that it was first written to
    return path.is_file() and path.read_bytes()


def worlds(num_ranks: int = 2) -> list[World]:
    """Those of ranks that live in this process, one after the other."""
    store = dist.HashStore()
    made = []
    for rank in range(num_ranks):
        job = Job()
        job.store = store
        made.append(World(rank=rank, world_size=num_ranks, _job=job))
    return made


def in_folder(folder: Path, program: Callable[[], Any]) -> Any:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return program()
    finally:
        os.chdir(before)


def as_rank(world: World, folder: Path, program: Callable[[], Any]) -> Any:
    with PrivateFiles(world, time.time()).installed():
        return in_folder(folder, program)


def make_old_files(folder: Path) -> None:
    (folder / "old" / "inner").mkdir(parents=True)
    (folder / "run_1").mkdir()
    (folder / "log.txt").write_text("an earlier run\n")
    (folder / "old" / "a.txt").write_text("a")
    (folder / "old" / "inner" / "b.txt").write_text("b")
    (folder / "state.json").write_text('{"runs": 1}')
    (folder / "large.bin").write_bytes(bytes(100_000))
    (folder / "link").symlink_to("old")
    with h5py.File(folder / "old.hdf5", "w") as file:
        file["data"] = np.arange(4)
    for end, content in database_that_was_not_closed().items():
        (folder / f"wal.db{end}").write_bytes(content)
    make_study(folder / "study.db", 100_000)


def make_study(path: Path, num_bytes: int) -> None:
    """A database of at least so many bytes, with one trial."""
    with contextlib.closing(sqlite3.connect(path)) as study:
        study.execute("create table trials (number integer primary key, note blob)")
        study.execute("insert into trials (note) values (zeroblob(?))", (num_bytes,))
        study.commit()


@functools.cache
def database_that_was_not_closed() -> dict[str, bytes]:
    """One with a row that is only in its journal."""
    with tempfile.TemporaryDirectory() as folder:
        database = sqlite3.connect(f"{folder}/a", isolation_level=None)
        database.execute("pragma journal_mode=wal")
        database.execute("create table t as select 1")
        content = {end: Path(folder, f"a{end}").read_bytes() for end in ("", "-wal")}
        database.close()
        return content


def numbered_folder() -> Any:
    """The next number that is free, by what is there."""
    name = f"run_{len(glob.glob('run_*')) + 1}"
    os.makedirs(f"{name}/models")
    Path(name, "models").mkdir(exist_ok=True)
    for there in ("run_1", f"{name}/models"):
        with pytest.raises(FileExistsError) as raised:
            os.mkdir(there)
    return name, raised.value.filename, Path(name).resolve().name


def written_files() -> Any:
    with open("log.txt", "a") as log:
        log.write("a line\n")
        log.flush()
        seen = [Path("log.txt").read_text()]
    with open("state.json", "r+") as file:
        state = json.load(file)
        state["runs"] += 1
        file.seek(0)
        json.dump(state, file)
    with open("new.txt", "x") as new:
        new.write("x")
    errors = []
    for path, mode in (("new.txt", "x"), ("none/new.txt", "w"), ("none.txt", "r+"), ("old", "w"), ("log.txt/new", "w")):
        with pytest.raises(OSError, match=path) as raised, open(path, mode):
            pass
        errors.append((type(raised.value), raised.value.filename))
    Path("old/a.txt").write_text("another")
    Path("touched").touch()
    descriptor = os.open("by_os", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, b"os")
    os.close(descriptor)
    os.truncate("large.bin", 10)
    os.chmod("by_os", 0o600)
    np.save("array.npy", np.arange(3))
    np.savez("arrays.npz", a=np.arange(4))
    with gzip.open("text.gz", "wt") as zipped:
        zipped.write("zipped")
    with gzip.open("text.gz", "rt") as zipped:
        seen.append(zipped.read())
    for path in ("state.json", "new.txt", "old/a.txt"):
        seen.append(Path(path).read_text())
    seen += [np.load("array.npy").tolist()]
    with np.load("arrays.npz") as arrays:
        seen.append(arrays["a"].tolist())
    Path("text.gz").unlink()  # it has the time in it
    modes = [os.stat(name).st_mode for name in ("by_os", "new.txt", "state.json", "log.txt")]
    return seen, raised.value.filename, modes, os.path.getsize("large.bin")


def removed_and_moved() -> Any:
    os.remove("log.txt")
    seen = [os.path.exists("log.txt"), os.path.lexists("log.txt"), os.access("log.txt", os.R_OK)]
    seen.append(Path("log.txt").is_file())
    with pytest.raises(FileNotFoundError, match=r"log\.txt"):
        Path("log.txt").read_text()
    with pytest.raises(FileNotFoundError) as raised:
        os.stat("log.txt")
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("old")
    with pytest.raises(IsADirectoryError):
        os.unlink("run_1")
    Path("log.txt").write_text("anew")
    seen.append(os.listdir("old/inner"))
    shutil.rmtree("old/inner")
    os.mkdir("old/inner")  # empty now
    Path("part").write_text("whole")
    os.replace("part", "state.json")
    os.rename("old", "moved")
    shutil.move("moved/a.txt", "run_1")
    shutil.copytree("moved", "copy")
    os.symlink("run_1", "latest")
    Path("latest/through.txt").write_text("a link")
    os.link("log.txt", "same.txt")
    os.renames("large.bin", "far/away/large.bin")
    seen.append(os.readlink("link"))
    os.symlink("far", "link.new")
    os.replace("link.new", "link")
    seen += [Path("run_1/through.txt").read_text(), os.readlink("latest"), os.path.realpath("latest/..")]
    seen[-1] = os.path.relpath(seen[-1], os.getcwd())
    shutil.rmtree("run_1")
    Path("run_1").write_text("a file now")
    os.rename("run_1", "run_2")
    return seen, raised.value.filename, os.path.exists("old"), os.path.exists("link"), os.path.islink("link")


def lists() -> Any:
    os.symlink("old/inner", "to_inner")
    with os.scandir("to_inner") as entries:
        linked = [(entry.path, entry.is_file()) for entry in entries]
    linked += [(name, os.path.isfile(f"to_inner/{name}")) for name in os.listdir("to_inner")]
    os.makedirs("new/inner")
    Path("new/c.txt").write_text("c")
    Path("old/d.txt").write_text("d")
    os.remove("old/a.txt")
    seen = [sorted(os.listdir()), sorted(os.listdir("old")), sorted(glob.glob("**", recursive=True))]
    seen += [sorted(str(path) for path in Path().rglob("*.txt")), sorted(path.name for path in Path("old").iterdir())]
    with os.scandir("old") as entries:
        seen.append(
            sorted((e.name, e.path, e.is_dir(), e.is_file(), e.is_symlink(), e.stat().st_size % 4096) for e in entries)
        )
    seen.append(sorted((base, sorted(folders), sorted(files)) for base, folders, files in os.walk("old")))
    os.chdir("new")
    seen += [os.path.basename(os.getcwd()), os.path.basename(os.getcwdb())]
    seen.append(type("Holder", (), {"stat": os.stat})().stat("../old/d.txt").st_size)  # of a class, it is no method
    seen += [os.listdir("..") != [], Path("inner").is_dir(), Path.cwd().name]
    Path("relative.txt").write_text("r")
    os.chdir("inner")
    Path("../../old/inner/e.txt").write_text("e")
    return seen, sorted(os.listdir(b"..")), os.path.isfile("../relative.txt"), linked


def checkpoints() -> Any:
    seen = []
    os.makedirs("models")
    for epoch in range(3):
        torch.save({"epoch": epoch}, "models/latest.part")
        os.replace("models/latest.part", "models/latest.pt")
        with open(f"models/{epoch}.pt", "wb") as file:
            torch.save({"epoch": epoch}, file)
        if epoch:
            os.remove(f"models/{epoch - 1}.pt")
        seen.append(sorted(os.listdir("models")))
    shutil.copyfile("models/latest.pt", "best.pt")
    torch.save({}, "over.pt")
    Path("over.pt").write_text("no checkpoint any more")
    os.replace("over.pt", "moved.pt")
    torch.save({"moved": 1}, "moved.pt")
    seen.append(torch.load("moved.pt"))
    with open(b"caf\xe9", "wb") as no_utf_8:
        torch.save({}, no_utf_8)
    with Path("models/2.pt").open("rb") as file:
        seen.append(torch.load(file))
    seen += [torch.load("models/latest.pt"), torch.load("best.pt")]
    os.link("models/latest.pt", "linked.pt")
    for refused, error in (
        (lambda: os.link("best.pt", "linked.pt"), FileExistsError),
        (lambda: os.link("best.pt", "best.pt"), FileExistsError),
        (lambda: os.rename("none.pt", "none.pt"), FileNotFoundError),
        (lambda: os.replace("linked.pt", "models"), IsADirectoryError),
        (lambda: os.rmdir("linked.pt"), NotADirectoryError),
    ):
        with pytest.raises(error):
            refused()
    with open("moved.pt", "r+b") as file:
        start = file.read(2)
        file.seek(0)
        file.write(start)
    seen += [torch.load("linked.pt"), torch.load("moved.pt"), start]
    os.makedirs("parts/inner")
    torch.save({"part": 1}, "parts/inner/1.pt")
    os.rename("parts", "kept")
    seen += [os.listdir("kept/inner"), torch.load("kept/inner/1.pt"), os.path.exists("parts/inner/1.pt")]
    return seen, os.path.isfile("models/2.pt"), os.path.exists("models/0.pt")


def rotated() -> Any:
    """Keeps the newest two checkpoints by time of change, which a thread saves."""
    os.makedirs("run")
    kept = []
    for epoch, name in enumerate("07418"):

        def save(path: str = f"run/{name}.pt", epoch: int = epoch) -> None:
            torch.save({"epoch": "x" * 1000 * (epoch + 1)}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)

        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        time.sleep(0.02)  # the times of two files differ
        for old in sorted(glob.glob("run/*.pt"), key=os.path.getmtime)[:-2]:
            os.remove(old)
        with os.scandir("run") as entries:
            files = sorted(entries, key=lambda entry: entry.stat().st_mtime_ns)
        kept.append([(file.name[0], os.path.getsize(file)) for file in files])
    assert ["".join(name for name, *_ in files) for files in kept] == ["0", "07", "74", "41", "18"]
    return kept


def by_libraries() -> Any:
    """What opens files by itself, past Python."""
    seen: list[Any] = []
    with h5py.File("demo.hdf5", "w") as file:
        file["a"] = np.arange(3)
    for mode in ("a", "r+"):
        with h5py.File("demo.hdf5", mode) as file:
            file[f"by_{mode}"] = np.arange(2)
    with h5py.File("old.hdf5", "a") as file:
        file["added"] = 1
        seen.append(sorted(file))
    with h5py.File("demo.hdf5", "r") as file:
        seen += [sorted(file), file["a"][:].tolist()]
    with pytest.raises(FileExistsError):
        h5py.File("demo.hdf5", "x")
    with pytest.raises(FileNotFoundError):
        h5py.File("none.hdf5", "r")
    with contextlib.closing(sqlite3.connect("runs.db")) as runs:
        runs.execute("create table runs (name text)")
        runs.execute("insert into runs values ('first')")
        runs.commit()
    with contextlib.closing(type("Holder", (), {"connect": sqlite3.connect})().connect("runs.db")) as runs:
        seen.append(list(runs.execute("select * from runs")))
    with contextlib.closing(sqlite3.connect("study.db")) as study:
        for _ in range(2):
            seen.append(list(study.execute("select count(*) from trials")))
            study.execute("insert into trials (note) values ('new')")
            study.commit()
    with contextlib.closing(sqlite3.connect("wal.db")) as left:
        seen.append(list(left.execute("select * from t")))
    addresses = "file:./runs.db?mode=rw", "file:made%20here.db?mode=rwc&cache=shared", "file:mine?mode=memory"
    for address in (*addresses, "file::memory:?cache=shared", ":memory:", "", b"bytes.db", Path("path.db")):
        is_address = isinstance(address, str) and address.startswith("file")
        with contextlib.closing(sqlite3.dbapi2.connect(address, uri=is_address)) as runs:
            runs.execute("create table steps (loss real)")
            runs.execute("insert into steps values (0.5)")
            runs.commit()
            seen.append(list(runs.execute("select * from steps")))
    for address in ("file:runs.db?mode=ro", "file:none.db?mode=ro"):
        with contextlib.suppress(sqlite3.OperationalError):
            runs = sqlite3.connect(address, uri=True)
            seen.append(list(runs.execute("select * from steps")))
            runs.close()
    Path("text").write_text("of this rank")
    seen.append(subprocess.run(["cat", "text"], capture_output=True, text=True, check=True).stdout)
    with contextlib.closing(logging.FileHandler("events.log")) as handler:
        handler.handle(logging.makeLogRecord({"msg": "logged"}))
    writer = tensorboardX.SummaryWriter("board")
    writer.add_scalar("loss", 1.0, 1)
    writer.close()
    seen += [Path("events.log").read_text(), len(list(Path("board").iterdir()))]
    shutil.rmtree("board")  # it has the time in it
    figure = matplotlib.figure.Figure(figsize=(1, 1))
    figure.savefig("curve.png")
    return seen, Path("curve.png").stat().st_size > 100


PROGRAMS = [numbered_folder, written_files, removed_and_moved, lists, checkpoints, rotated]


@pytest.mark.parametrize("program", [*PROGRAMS, pytest.param(by_libraries, marks=pytest.mark.ranks)])
def test_each_rank_sees_and_the_disk_has_what_one_process_would(tmp_path: Path, program: Callable[[], Any]) -> None:
    for name in ("alone", "ranks", "early"):
        make_old_files(tmp_path / name)
    alone = in_folder(tmp_path / "alone", program)
    main, peer = worlds()
    assert as_rank(main, tmp_path / "ranks", program) == alone
    before = tree(tmp_path / "ranks")
    assert as_rank(peer, tmp_path / "ranks", program) == alone, "a rank that comes late"
    assert before == tree(tmp_path / "ranks") == tree(tmp_path / "alone")
    if program not in (checkpoints, rotated):  # for which a rank waits
        main, peer = worlds()
        early = tree(tmp_path / "early")
        assert as_rank(peer, tmp_path / "early", program) == alone, "a rank that comes first"
        assert tree(tmp_path / "early") == early


def commands() -> Any:
    """Commands that write in a folder of the program's own, in one that was there, and to open files."""
    os.makedirs("run/code")
    Path("run/code/a.py").write_text("a")
    found: list[Any] = [subprocess.run(["cp", "-r", "run/code", "run/copy"], check=True).returncode]
    found.append(subprocess.run("echo x >> log.txt; echo y >> run/code/a.py", shell=True).args)
    found.append(subprocess.check_output("echo here >> run/where; cat log.txt; mkdir run/made", shell=True, text=True))
    with open("run/hash", "w") as file:
        found.append(subprocess.call(["sh", "-c", "echo hash; exit 3"], stdout=file))
    found.append(subprocess.getstatusoutput("cat run/hash; rm run/copy/a.py; false"))
    found.append([subprocess.getoutput("echo z | tee -a log.txt"), os.system("echo z >> log.txt")])
    for end in ("exit 2", "kill -9 $$", "true"):
        with os.popen(f"mkdir -p run/popen; echo a; echo b; {end}") as stream:
            found.append([stream.readline(), *stream, stream.close()])
    for command, timeout_s, kind in (
        ("echo no >> log.txt; echo why >&2; exit 4", None, subprocess.CalledProcessError),
        ("echo early; sleep 9", 0.2, subprocess.TimeoutExpired),
        ("", None, FileNotFoundError),
    ):
        arguments = ["sh", "-c", command] if command else ["no such command"]
        with pytest.raises(kind) as raised:
            subprocess.run(arguments, check=True, capture_output=True, timeout=timeout_s)
        found += [str(raised.value), getattr(raised.value, "stderr", None), getattr(raised.value, "filename", None)]
    found.append({path.name: content(path) for path in Path("run").rglob("*")})
    found.append(Path("log.txt").read_text())
    return found


@pytest.mark.ranks
def test_the_main_rank_runs_commands_and_all_have_what_came_of_them(tmp_path: Path) -> None:
    expected, made = None, None
    for name, several in (("plain", [None]), ("ranks", worlds())):
        folder = tmp_path / name / "folder"
        folder.mkdir(parents=True)
        (folder / "log.txt").write_text("before\n")
        for world in several:
            with contextlib.ExitStack() as until:
                if world is not None:
                    files, clock = PrivateFiles(world, time.time()), Clock(world)
                    for part in (files, clock, Commands(clock, files)):
                        until.enter_context(part.installed())
                found = in_folder(folder, commands)
            expected = expected or found
            assert found == expected
            made = made or tree(folder)
            assert tree(folder) == made


def test_a_checkpoint_that_the_main_rank_removes_while_another_looks_at_it(tmp_path: Path) -> None:
    main, peer = worlds()
    path, place = tmp_path / "last.pt", View.place
    as_rank(main, tmp_path, lambda: torch.save({}, path))
    expected = path.stat()

    def found_then_removed(view: View, name: str) -> str:
        found = place(view, name)
        ctypes.CDLL(None).unlink(os.fsencode(path))  # as another process does
        return found

    with PrivateFiles(peer, time.time()).installed(), mock.patch.object(View, "place", found_then_removed):
        torch.save({}, path)
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (expected.st_size, expected.st_mtime_ns)
        with pytest.raises(FileNotFoundError):
            os.stat(tmp_path / "none.pt")


class Looking:
    """Has another rank list a folder while it is saved."""

    def __init__(self, view: View, folder: Path) -> None:
        self._look = lambda: view.names(str(folder))

    def __reduce__(self) -> Any:
        self.seen = self._look()
        return list, ()


def test_a_checkpoint_that_is_being_written_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "old.pt").touch()
    main, peer = worlds()
    view = View(MainsChanges(peer, time.time() - 1), saves.MainsSaves(peer))
    looking = Looking(view, tmp_path)
    as_rank(main, tmp_path, lambda: torch.save(looking, "new.pt"))
    view.remove_all()
    assert looking.seen == ["old.pt"]
    assert len(os.listdir(tmp_path)) == 2


def test_a_folder_that_the_main_rank_makes_just_after_the_news_is_not_seen(tmp_path: Path) -> None:
    main, peer = worlds()
    changes = [MainsChanges(world, time.time() - 1) for world in (main, peer)]
    peers_news, folder = changes[1].news, str(tmp_path / "made")

    def news_then_made() -> Any:
        known = [*peers_news()]
        if not os.path.isdir(folder):
            changes[0].tell(folder)
            os.mkdir(folder)
        return iter(known)

    changes[1].news = news_then_made  # type: ignore[method-assign]
    view = View(changes[1], saves.MainsSaves(peer))
    place = view.place(folder)
    assert (os.path.isdir(folder), os.path.exists(place)) == (True, False)
    assert view.place(folder) == place  # else os.makedirs(exist_ok=True) gets FileExistsError, and then finds no folder
    view.remove_all()


@pytest.mark.parametrize("size", [11, 100_000])
def test_a_file_that_the_main_rank_changes_while_it_is_copied(tmp_path: Path, size: int) -> None:
    """For a rank that appends to it: to what was there. The news hold no large file, which it then cannot read."""
    main, peer = worlds()
    changes = [MainsChanges(world, time.time() - 1) for world in (main, peer)]
    view, file, copy_file = View(changes[1], saves.MainsSaves(peer)), tmp_path / "log.txt", file_overlay.copy_file
    file.write_bytes(b"x" * size)

    def appended_then_copied(source: str, to: str) -> None:
        changes[0].tell(str(file))
        with file.open("ab") as writing:
            writing.write(b"of the main rank")
        copy_file(source, to)

    with mock.patch.object(file_overlay, "copy_file", appended_then_copied):
        own = Path(view.place_to_write(str(file), keeps=True))
    assert own.read_bytes() == (b"x" if size == 11 else b"\0") * size
    assert os.listdir(own.parent) == ["log.txt"]
    with pytest.raises(SyncError, match="is read on this rank after") if size > 11 else contextlib.nullcontext():
        assert view.place_with_content(str(file)) == str(own)
    view.remove_all()


def test_all_see_what_the_main_rank_does_for_all(tmp_path: Path) -> None:
    """A rollout that it plays while others wait."""
    main, peer = worlds()

    def before() -> None:
        os.makedirs("run/media")
        for name in ("old.mp4", "run/both.txt", "run/media/first.mp4"):
            Path(name).write_text("before")

    files = [PrivateFiles(world, time.time()) for world in (main, peer)]
    with files[0].installed():
        in_folder(tmp_path, before)
        with files[0].changes.apart():
            Path(tmp_path, "run/media/video.mp4").write_text("of the main rank")
            Path(tmp_path, "run/media/first.mp4").unlink()
            Path(tmp_path, "run/both.txt").write_text("after")
            Path(tmp_path, "run/new").mkdir()
            Path(tmp_path, "run/new/inner.txt").write_text("i")
    with files[1].installed():
        in_folder(tmp_path, before)
        assert Path(tmp_path, "run/both.txt").read_text() == "before"
        files[1].see_what_is_shared()
        assert tree(tmp_path / "run") == {
            **{"both.txt": b"after", "media": False, "media/video.mp4": b"of the main rank"},
            **{"new": False, "new/inner.txt": b"i"},
        }
        Path(tmp_path, "run/both.txt").write_text("of this rank")
        assert Path(tmp_path, "run/both.txt").read_text() == "of this rank"
    assert Path(tmp_path, "run/both.txt").read_text() == "after"


def test_a_file_that_cannot_be_known_any_more(tmp_path: Path) -> None:
    make_old_files(tmp_path)
    make_study(tmp_path / "large.db", 5_000_000)
    main, peer = worlds()
    with PrivateFiles(main, time.time()).installed():
        Path(tmp_path, "large.bin").write_bytes(b"new")
        with contextlib.closing(sqlite3.connect(tmp_path / "large.db")) as database:
            database.execute("drop table trials")
    with PrivateFiles(peer, time.time()).installed():
        assert Path(tmp_path, "large.bin").stat().st_size == 100_000
        reads: list[Callable[[], Any]] = [
            lambda: Path(tmp_path, "large.bin").read_bytes(),
            lambda: np.memmap(tmp_path / "large.bin", mode="r+"),
            lambda: sqlite3.connect(tmp_path / "large.db"),
        ]
        with pytest.raises(FileExistsError):
            os.link(tmp_path / "state.json", tmp_path / "large.bin")
        for read in reads:
            with pytest.raises(SyncError, match=r"large\.(bin|db) is read on this rank after the main"):
                read()
        Path(tmp_path, "large.bin").write_bytes(b"of this rank")
        assert Path(tmp_path, "large.bin").read_bytes() == b"of this rank"


def test_a_large_file_that_the_main_rank_has_only_opened_or_moved(tmp_path: Path) -> None:
    make_study(tmp_path / "large.db", 5_000_000)
    for name in ("log.txt", "old/inner.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 100_000)

    def program() -> list[Any]:
        with contextlib.closing(sqlite3.connect("large.db")) as database:
            seen: list[Any] = list(database.execute("select count(*) from trials"))
        with open("log.txt", "a") as log:
            os.rename("old", "moved")
            seen.append(Path("moved/inner.bin").read_bytes())
            if world.rank:  # the main rank has opened it, and not written to it
                log.write("of this rank")
        return [*seen, Path("log.txt").read_text().replace("of this rank", "")]

    found = []
    for world in worlds():
        with PrivateFiles(world, time.time()).installed():
            found.append(in_folder(tmp_path, program))
            assert Path(tmp_path, "log.txt").stat().st_size == 100_000 + world.rank * len("of this rank")
    assert found == [[(1,), b"x" * 100_000, "x" * 100_000]] * 2


def test_writes_past_it_are_refused(tmp_path: Path) -> None:
    _, peer = worlds()
    with PrivateFiles(peer, time.time()).installed():
        writes: list[Callable[[], Any]] = [
            lambda: io.FileIO(tmp_path / "a", "w"),
            lambda: posix.mkdir(tmp_path / "b"),
            lambda: sqlite3.Connection(tmp_path / "a"),
            lambda: _sqlite3.connect(f"file:{tmp_path}/b?mode=rwc", uri=True),  # type: ignore[attr-defined]
        ]
        for write in writes:
            with pytest.raises(SyncError, match=r"test_private_files\.py:\d+ writes to .*/(a|b) "):
                write()
        for name in (":memory:", "file:a?mode=memory", ""):
            sqlite3.Connection(name, uri=True).close()
        io.FileIO(os.devnull, "w").close()
    assert not list(tmp_path.iterdir())
    io.FileIO(tmp_path / "a", "w").close()


def test_a_file_that_an_opener_opens_in_a_folder_of_this_rank(tmp_path: Path) -> None:
    _, peer = worlds()
    with PrivateFiles(peer, time.time()).installed():
        run = tmp_path / f"run_{os.getpid()}"
        run.mkdir()
        with tempfile.NamedTemporaryFile("w", dir=run, delete=False) as file:
            file.write("of this rank")
        os.replace(file.name, run / "saved")
        with open(run / "more", "w", opener=functools.partial(os.open, mode=0o600)) as file:
            file.write("more")
        assert sorted(path.read_text() for path in run.iterdir()) == ["more", "of this rank"]
        with pytest.raises(SyncError, match=r"writes to .*/past"):
            open(run / "past", "w", opener=posix.open).close()
    assert not list(tmp_path.iterdir())


def fails(folder: Path) -> None:
    assert len(list((folder / "temporary").iterdir())) == 1
    Path(folder, "file").write_text("of this rank")
    with tempfile.NamedTemporaryFile(dir=folder) as file, tempfile.TemporaryDirectory() as temporary:
        assert Path(file.name).exists()
        assert posix.stat(temporary), "it is where C libraries find it"
        raise ZeroDivisionError


def test_a_program_that_fails_leaves_nothing(tmp_path: Path) -> None:
    _, peer = worlds()
    with mock.patch.object(tempfile, "tempdir", str(tmp_path / "temporary")):
        (tmp_path / "temporary").mkdir()
        files = PrivateFiles(peer, time.time())
        with pytest.raises(ZeroDivisionError), files.installed():
            fails(tmp_path)
    assert list(tmp_path.rglob("*")) == [tmp_path / "temporary"]


def test_a_rank_that_ends_by_exit_handlers_leaves_nothing(tmp_path: Path) -> None:
    files = PrivateFiles(worlds()[1], time.time())
    with mock.patch.object(atexit, "register") as register, files.installed():
        Path(tmp_path, "made").write_text("of this rank")
        assert files._files is not None
        for handler in reversed(register.call_args_list):
            handler.args[0](*handler.args[1:], **handler.kwargs)
        assert not os.path.exists(files._files.view.top)
    assert not list(tmp_path.iterdir())


def test_children_see_the_files_of_their_rank(tmp_path: Path) -> None:
    """Those that are started afresh get them with what they are to run; here it is unpickled in this process."""
    make_old_files(tmp_path)
    _, peer = worlds()
    files = PrivateFiles(peer, time.time())
    with files.installed():
        Path(tmp_path, "made").write_text("of this rank")
        Path(tmp_path, "log.txt").unlink()
        torch.save({}, tmp_path / "saved.pt")
        process = multiprocessing.get_context("spawn").Process(target=print)
        packed = pickle.dumps(process.ddpshim_files)  # type: ignore[attr-defined]
        childs = pickle.loads(pickle.dumps(process.ddpshim_files.files))  # type: ignore[attr-defined]
        assert posix.stat(childs.place_to_read(tmp_path / "made")).st_size == 12
        assert childs.place_to_read(tmp_path / "saved.pt") == str(tmp_path / "saved.pt")
        with pytest.raises(FileNotFoundError):
            childs.open_file(tmp_path / "log.txt")
        with childs.open_file(tmp_path / "of_child", "w") as file:
            file.write("x")
        assert Path(tmp_path, "of_child").read_text() == "x"
        childs.rename(tmp_path / "saved.pt", tmp_path / "moved.pt")
        assert childs.place_to_read(tmp_path / "moved.pt") == str(tmp_path / "moved.pt")
    assert not Path(tmp_path, "of_child").exists()
    passed = pickle.loads(packed)
    gc.collect()
    assert os.listdir is not posix.listdir, "it is in place as long as the process object is there"
    assert "log.txt" not in os.listdir(tmp_path)
    passed.close()
    assert os.listdir is posix.listdir
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()  # this is no child: it may train


def train(pause_s: float = 0.0, step: Callable[[], Any] = lambda: None) -> Any:
    seen: list[Any] = []
    shutil.rmtree("old", ignore_errors=True)
    folder = Path(f"run_{len(glob.glob('run_*')) + 1}")
    folder.mkdir()
    Path("latest").symlink_to(folder)
    best: list[Path] = []
    for epoch in range(4):
        step()  # at which ranks meet
        time.sleep(pause_s)
        with open(folder / "log.json", "a") as log:
            log.write(json.dumps({"epoch": epoch}) + "\n")
        path = folder / f"{epoch}.pt"
        torch.save({"epoch": epoch}, path)
        with (folder / "last.part").open("wb") as file:
            torch.save({"epoch": epoch, "last": True}, file)
        os.replace(folder / "last.part", folder / "last.pt")
        best.append(path)
        if len(best) > 2:
            best.pop(0).unlink()
        seen += [sorted(os.listdir("latest")), torch.load("latest/last.pt"), path.is_file()]
    shutil.copy(best[-1], "best.pt")
    return seen, torch.load("best.pt"), (folder / "log.json").read_text(), sorted(os.listdir())


def train_as_rank(folder: str, slow: int) -> Any:
    here = ddpshim.world()
    return in_folder(Path(folder), lambda: train(0.1 if here.rank == slow else 0.0, here.barrier))


NUM_OLD = 40


def remove_as_rank(folder: str) -> Any:
    """Before, rank 1 failed at about every tenth: the folder was another one, or empty, and then not."""

    def program() -> list[str]:
        for number in range(NUM_OLD):
            ddpshim.world().barrier()
            shutil.rmtree(f"old_{number}")
        return os.listdir()

    return in_folder(Path(folder), program)


def save_apart(folder: str) -> Any:
    """Each rank saves to a name of its own."""
    here = ddpshim.world()
    torch.save({}, f"{folder}/of_{here.rank}.pt")
    here.barrier()
    with mock.patch.object(saves, "_THREADS_S", 0.2):
        try:
            return torch.load(f"{folder}/of_{here.rank}.pt")
        except SyncError as error:
            return str(error)


def as_ranks(programs: list[tuple[Any, ...]]) -> list[Any]:
    """What each of the programs returned, in a job of its own."""
    found = []
    for program, *arguments in programs:
        here = ddpshim.world()
        with PrivateFiles(here, here.broadcast(time.time())).installed():
            here.barrier()
            found.append(program(*arguments))
            here.barrier()
        ddpshim.cleanup()
        ddpshim.setup(seed=0, device="cpu")
    return found


@pytest.mark.ranks
def test_real_ranks_at_different_places_of_one_program(tmp_path: Path) -> None:
    for name in ("alone", "slow_0", "slow_1"):
        make_old_files(tmp_path / name)
    alone = in_folder(tmp_path / "alone", train)
    for number in range(NUM_OLD):
        (tmp_path / "removed" / f"old_{number}" / "inner").mkdir(parents=True)
        (tmp_path / "removed" / f"old_{number}" / "inner" / "a.txt").write_text("a")
    (tmp_path / "apart").mkdir()
    programs = [(train_as_rank, str(tmp_path / f"slow_{slow}"), slow) for slow in (0, 1)]
    programs += [(remove_as_rank, str(tmp_path / "removed")), (save_apart, str(tmp_path / "apart"))]
    main, peer = run_ranks(as_ranks, 2, programs)
    assert main == [alone, alone, [], {}]
    assert peer[:-1] == main[:-1]
    assert "of_1.pt, its save number 1, but of the main rank's 1 saves none" in peer[-1]
    assert tree(tmp_path / "alone") == tree(tmp_path / "slow_0") == tree(tmp_path / "slow_1")
    assert sorted(path.name for path in (tmp_path / "apart").iterdir()) == ["of_0.pt"]

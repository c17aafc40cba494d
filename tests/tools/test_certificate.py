"""`run --certify` and `check --certificate`: honest repetitions are verified, planted changes are named.

All changes: python -m evidence.certificates.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ddpshim.errors import CertificateError
from ddpshim.tools.certificate import document, facts
from evidence import certificates
from tests.preloaded import environment, preloaded
from tests.preloaded_commands import commands, patience

TAMPERS = {tamper.name: tamper for tamper in certificates.tampers()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("certified")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "DEADLINE_S", patience(120))
        patch.setattr(certificates, "PYTHON", str(commands() / "python"))
        for name, value in preloaded().shell_environment(environment()).items():
            patch.setenv(name, value)
        certificates.make(folder)
        yield folder


@pytest.mark.launch
@pytest.mark.parametrize("number", [5, 10])
def test_honest_repetition_is_verified(made: Path, number: int) -> None:
    with certificates.copied(made) as folder:
        (folder / "out").mkdir()
        (folder / "out" / "last.pth").write_bytes(b"of the user")
        arguments = certificates.honest(number)
        said = certificates.ddpshim(folder, "check", *arguments)
        first, last = arguments[-1].split(":")
        assert f"verified: steps {first} to {last} have the hashes of the certificate, on {arguments[3]} rank" in said
        assert (folder / "out" / "last.pth").read_bytes() == b"of the user"
        assert not (folder / "progress").exists()


@pytest.mark.launch
def test_the_end_is_verified_where_the_program_draws_after_its_last_step(made: Path) -> None:
    with certificates.copied(made) as folder:
        said = certificates.ddpshim(folder, "check", "--certificate", "run.json", "--nproc", "4")
    assert "verified: steps 60 to 64 have the hashes of the certificate, on 4 ranks" in said


@pytest.mark.launch
@pytest.mark.parametrize(
    "name",
    [
        "forged: losses [4]",
        "forged: numbers [6]",
        "forged: numbers after the last step",
        "code: the loss, by a factor",
        "data: y",
        "checkpoint: one weight, forged",
    ],
)
def test_planted_change_is_named(made: Path, name: str) -> None:
    assert certificates.tried(TAMPERS[name], made)


@pytest.mark.launch
@pytest.mark.parametrize("name", [name for name in TAMPERS if name.startswith(("edited", "forged: a missing"))])
def test_edited_certificate_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    tamper = TAMPERS[name]
    for file in made.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert document.read(tmp_path / tamper.certificate)["exact"] == certificates.EXACT
    tamper.change(tmp_path)
    with pytest.raises(CertificateError, match=tamper.cause):
        document.read(tmp_path / tamper.certificate)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.update(certificate=2), "its field 'certificate' is not 1"),
        (lambda f: f.update(marks=[1]), "the mark after step 0 is missing or not of type dict"),
        (lambda f: f["marks"][0].update(losses=["x"] * 10), "of the mark after step 0 is missing or not of type float"),
        (lambda f: f["marks"][0].update(weights="../"), "the weights of step 10 are not a hash for each tensor"),
        (lambda f: f.update(program=[]), "its program has no name"),
        (lambda f: f.update(program=["-m"]), "its program has no name"),
        (lambda f: f["program"].append("a\0"), "cannot be given to a program"),
        (lambda f: f["facts"]["environment"]["variables"].update(OMP_NUM_THREADS="\ud800"), "cannot be given"),
        (lambda f: f["facts"]["packages"].update(torch=1), "torch of packages of facts of the file is missing"),
        (lambda f: f.update(starts=[[1]]), "item 0 of starts of the file is missing or not of type int"),
        (lambda f: f.update(exact=0), "are not positive"),
        (lambda f: f.update(facts={}), "code of facts of the file is missing"),
        (lambda f: f["checkpoints"].append({"step": 1, "file": "../x", "sha256": ""}), "lies in another folder"),
    ],
)
def test_hostile_file_gets_a_sentence(made: Path, tmp_path: Path, change: object, said: str) -> None:
    (tmp_path / "run.json").write_bytes((made / "run.json").read_bytes())
    certificates.edited(change, False)(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CertificateError, match=said):
        document.read(tmp_path / "run.json")


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"[" * 100000, b'{"certificate": 1}', b"null"])
def test_other_file_gets_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CertificateError, match="Nothing was run"):
        document.read(tmp_path / "run.json")


@pytest.mark.launch
def test_newest_marks_lie_beside_the_certificate(made: Path, tmp_path: Path) -> None:
    path, found = tmp_path / "run.json", document.read(made / "run.json")
    marks = found["marks"]
    found["tensors"] += [f"tensor {i}" for i in range(2000)]
    assert not document.add(marks[0], tmp_path.joinpath("new.json")), "there is nothing beside which it could lie"
    document.write({**found, "marks": marks[:4], "is_complete": False}, path)
    first = path.read_bytes()
    for mark in marks[4:6]:
        assert document.add(mark, path), "another mark is a small part of the whole"
    newest = path.with_name(".run.json.newest")
    with newest.open("a") as file:
        file.write('{"step": 64, "lo')  # the process was killed
    assert document.read(path)["marks"] == marks[:6]
    assert path.read_bytes() == first
    newest.write_text(newest.read_text().replace('"step": 50', '"step": 51'))
    assert document.read(path)["marks"] == marks[:4]
    document.write({**found, "marks": marks[:6]}, path)
    assert not newest.exists()
    assert document.read(path)["marks"] == marks[:6]
    nothing: dict[str, object] = {name: {} for name in found["facts"]}
    document.write({**found, "facts": nothing, "tensors": found["tensors"][:8], "marks": marks[:1]}, path)
    assert not document.add(marks[1], path), "a large part: it is time to write the whole"


@pytest.mark.launch
def test_signature_of_the_page(made: Path, tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (openssh)")
    sign, verify = re.findall("^ssh-keygen .*", (certificates.ROOT / "docs" / "check.md").read_text(), re.MULTILINE)
    shutil.copy(made / "run.json", tmp_path)

    def code(command: str) -> int:
        return subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, timeout=60, check=False
        ).returncode

    assert code("ssh-keygen -t ed25519 -N '' -f KEY") == 0
    (tmp_path / "signers").write_text(f"me@lab.org {(tmp_path / 'KEY.pub').read_text()}")
    assert code(sign) == 0
    assert code(verify) == 0
    certificates.edited(lambda found: found.update(is_complete=False), True)(tmp_path)
    assert document.read(tmp_path / "run.json")["is_complete"] is False
    assert code(verify) != 0


def test_a_package_inside_another_is_named_by_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "site-packages" / "outer" / "_vendor" / "inner"
    inside.mkdir(parents=True)
    for file in (inside / "__init__.py", inside.parents[1] / "__init__.py", tmp_path / "own.py"):
        file.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    for name, file in (("inner", inside / "__init__.py"), ("own", tmp_path / "own.py")):
        monkeypatch.setitem(sys.modules, name, mock.Mock(__file__=str(file)))
    own, packages = facts.code_and_packages(tmp_path)
    assert own["own.py"] == facts.sha256_of(tmp_path / "own.py")
    assert {"outer", "torch"} <= packages.keys()
    assert "inner" not in packages


@pytest.mark.launch
def test_facts_of_the_run(made: Path) -> None:
    found = json.loads((made / "run.json").read_text())
    assert set(found["facts"]["code"]) >= {"train.py", "helper.py"}
    assert {"torch", "numpy", "ddpshim"} <= set(found["facts"]["packages"])
    assert found["facts"]["environment"]["threads"] == 1
    assert [mark["step"] for mark in found["marks"]] == [10, 20, 30, 40, 50, 60, 64]
    assert "1.weight" in found["tensors"]

"""`run --certify` and `check --certificate`: honest repetitions are verified, planted changes are named.

All changes: python -m evidence.certificates.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddpshim.errors import CertificateError
from ddpshim.rows.capture import is_supported
from ddpshim.tools import certificate
from evidence import certificates, results
from tests.preloaded import environment, preloaded
from tests.preloaded_commands import commands, patience

TAMPERS = {tamper.name: tamper for tamper in certificates.tampers()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("certified")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "DEADLINE_S", patience(120))
        patch.setattr(results, "PYTHON", str(commands() / "python"))
        for name, value in preloaded().shell_environment(environment()).items():
            patch.setenv(name, value)
        certificates.make(folder)
        yield folder


@pytest.mark.launch
def test_honest_repetition_is_verified(made: Path) -> None:
    """Also the last steps of all, although the program draws after them."""
    with certificates.copied(made) as folder:
        (folder / "out").mkdir()
        (folder / "out" / "last.pth").write_bytes(b"of the user")
        arguments = certificates.honest(10)
        said = certificates.ddpshim(folder, "check", *arguments)
        first, last = arguments[-1].split(":")
        assert f"verified: steps {first} to {last} have the hashes of the certificate, on {arguments[3]} rank" in said
        assert (folder / "out" / "last.pth").read_bytes() == b"of the user"
        assert not (folder / "progress").exists()
        said = certificates.ddpshim(folder, "check", "--certificate", "run.json", "--nproc", "4")
    assert "verified: steps 60 to 64 have the hashes of the certificate, on 4 ranks" in said


@pytest.mark.launch
@pytest.mark.parametrize("name", ["forged: losses [4]", "data: y", "checkpoint: one weight, forged"])
def test_planted_change_is_named(made: Path, name: str) -> None:
    assert certificates.tried(TAMPERS[name], made)


@pytest.mark.launch
@pytest.mark.parametrize("name", [name for name in TAMPERS if name.startswith(("edited", "forged: a missing"))])
def test_edited_certificate_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    tamper = TAMPERS[name]
    for file in made.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert certificate.read(tmp_path / tamper.certificate)["exact"] == certificates.EXACT
    tamper.change(tmp_path)
    with pytest.raises(CertificateError, match=tamper.cause):
        certificate.read(tmp_path / tamper.certificate)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.update(certificate=2), "its field 'certificate' is not 1"),
        (lambda f: f.update(marks=[1]), "cannot be read as a certificate"),
        (lambda f: f.pop("program"), "of this version of ddpshim .it has no field 'program'"),
        (lambda f: f["marks"][0].update(losses=["x"] * 10), "was edited after it was written"),
        (lambda f: f["checkpoints"].append({"step": 1, "file": "../x", "sha256": ""}), "lies in another folder"),
    ],
)
def test_hostile_file_gets_a_sentence(made: Path, tmp_path: Path, change: object, said: str) -> None:
    (tmp_path / "run.json").write_bytes((made / "run.json").read_bytes())
    certificates.edited(change, False)(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CertificateError, match=said):
        certificate.read(tmp_path / "run.json")
    for content in (b"", b"\x80\x04N.", b"[" * 100000, b'{"certificate": 1}', b"null"):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(CertificateError, match="Nothing was run"):
            certificate.read(tmp_path / "run.json")


_CAPTURED = """
import torch
from torch import nn
from torch.utils.data import DataLoader

class Gain:
    def of(self): return 1.0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = nn.Linear(4, 64), nn.Linear(64, 1)
    def forward(self, x):
        return self.last(torch.tanh(self.hidden(x)) * GAINS[0][0].of() * 2)

GAINS = [[Gain()]]
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step, x in enumerate(DataLoader(torch.randn(72, 4), 12)):
    if step == 4:
        Gain.of = lambda self: 3.0
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.launch
@pytest.mark.skipif(not is_supported(), reason="captures need torch 2.8")
def test_what_a_capture_gets_wrong_is_a_difference(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that no guard sees, between two replays that are compared: a repetition is without captures."""
    monkeypatch.setenv("DDPSHIM_ROWS", "all")
    (tmp_path / "train.py").write_text(_CAPTURED)
    certify = ("run", "--nproc", "2", "--certify", "run.json", "--certify-every", "1", "train.py")
    # With an empty DDPSHIM_EXACT, which counts as not set.
    assert "--certify sets DDPSHIM_EXACT=2: numbers are" in certificates.ddpshim(tmp_path, *certify, DDPSHIM_EXACT="")
    said = certificates.ddpshim(tmp_path, "check", "--certificate", "run.json", "--steps", "3:6", code=1)
    assert "loss: differs first in step 5" in said


@pytest.mark.launch
def test_signature_of_the_page(made: Path, tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (openssh)")
    sign, verify = re.findall("^ssh-keygen .*", (certificates.ROOT / "docs" / "check.md").read_text(), re.MULTILINE)
    shutil.copy(made / "run.json", tmp_path)

    def code(command: str) -> int:
        return subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, timeout=patience(60), check=False
        ).returncode

    assert code("ssh-keygen -t ed25519 -N '' -f KEY") == 0
    (tmp_path / "signers").write_text(f"me@lab.org {(tmp_path / 'KEY.pub').read_text()}")
    assert code(sign) == 0
    assert code(verify) == 0
    certificates.edited(lambda found: found.update(is_complete=False), True)(tmp_path)
    assert certificate.read(tmp_path / "run.json")["is_complete"] is False
    assert code(verify) != 0


@pytest.mark.launch
def test_facts_of_the_run(made: Path) -> None:
    found = json.loads((made / "run.json").read_text())
    assert set(found["facts"]["code"]) >= {"train.py", "helper.py"}
    assert {"torch", "numpy", "ddpshim"} <= set(found["facts"]["packages"])
    assert found["facts"]["environment"]["threads"] == 1
    assert [mark["step"] for mark in found["marks"]] == [10, 20, 30, 40, 50, 60, 64]


@pytest.mark.unit
def test_the_program_may_import_while_a_thread_lists_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Name(str):
        def startswith(self, *args: Any) -> bool:
            monkeypatch.setitem(sys.modules, "imported_meanwhile", ModuleType("imported_meanwhile"))
            return super().startswith(*args)

    monkeypatch.setitem(sys.modules, Name("early"), ModuleType("early"))
    assert certificate.Reads(0).code() is not None
    assert "imported_meanwhile" in sys.modules


@pytest.mark.unit
def test_code_that_torch_writes_is_not_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_remote_module_non_scriptable", "a_module_of_the_program"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text("")
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    found = [Path(name).name for name in certificate.Reads(0).code() if Path(name).parent == tmp_path]
    assert found == ["a_module_of_the_program.py"]

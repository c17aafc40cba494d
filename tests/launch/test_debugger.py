"""`breakpoint()` and pdb on three ranks: one terminal, and every rank does what is typed there."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.preloaded import environment, kill_all_in, preloaded, show_stacks
from tests.preloaded_commands import commands, patience

DEADLINE_S = 90

UNEDITED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(20, 2048)
net = nn.Sequential(nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scale = 1.0
for step, (bx, by) in enumerate(DataLoader(TensorDataset(x, x[:, :1].clone()), batch_size=10, shuffle=True)):
    losses = (net(bx) - by) ** 2
    loss = losses.mean() * scale
    optimizer.zero_grad()
    loss.backward()
    if step == 0:
        breakpoint()
    optimizer.step()
    print(f"loss {loss.item():.5f} of {tuple(losses.shape)}")
"""

EDITED = """
import pdb, sys
import torch
from torch import nn
import ddpshim

world = ddpshim.setup(seed=0)

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if "data" in sys.argv and world.rank == 0 and index > 11:
            breakpoint()
        return torch.tensor([float(index)])

net = ddpshim.wrap_parallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.0001)
scale = 1.0
for step, x in enumerate(ddpshim.make_loader(Items(), batch_size=12)):
    loss = net(x).square().mean() * scale
    optimizer.zero_grad()
    loss.backward()
    if step == 0 and "all" in sys.argv:
        pdb.set_trace()
        if world.is_main:
            print("main")
        print("all")
    if step == 1 and "error" in sys.argv:
        try:
            step / 0
        except ZeroDivisionError:
            pdb.post_mortem()
    if step == 1 and "main" in sys.argv and world.is_main:
        breakpoint()
    optimizer.step()
print(f"scale {scale} on {world.rank}")
ddpshim.cleanup()
"""


def _line(code: str) -> str:
    """Where `code` stands, as a message says it."""
    return f"train.py:{EDITED[: EDITED.index(code)].count(chr(10)) + 1}"


class Terminal:
    """A program on three ranks, and the terminal in which it was started."""

    def __init__(self, folder: Path, program: str, *arguments: str) -> None:
        self.folder, self.seen, self._read = folder, "", 0
        (folder / "train.py").write_text(program)
        self._screen, inside = pty.openpty()
        command = [str(commands() / "python"), "-m", "ddpshim", "run", "--nproc", "3", "train.py", *arguments]
        environ = preloaded().shell_environment({**environment(), "OMP_NUM_THREADS": "1"})
        streams = {"stdin": inside, "stdout": inside, "stderr": inside}
        self.process = subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, **streams)  # type: ignore[call-overload]
        os.close(inside)
        self._end = time.monotonic() + patience(DEADLINE_S)

    def _take(self) -> bool:
        """Read what is on the screen; return whether more can come."""
        if select.select([self._screen], [], [], 0.1)[0]:
            try:
                self.seen += os.read(self._screen, 1 << 16).decode().replace("\r", "")
            except OSError:  # all have closed it
                return False
        if time.monotonic() > self._end:
            show_stacks(self.folder)
            raise AssertionError(f"too late:\n{self.seen}\n{self.log(0)}\n{self.log(1)}\n{self.log(2)}")
        return True

    def until(self, text: str) -> str:
        """Return what is printed before the next `text`."""
        while text not in self.seen[self._read :]:
            assert self._take(), self.seen
        found = self.seen.index(text, self._read)
        said, self._read = self.seen[self._read : found], found + len(text)
        return said

    def answer(self, line: str) -> str:
        """Type `line` at the prompt that is there; return what is printed before the next prompt."""
        os.write(self._screen, f"{line}\n".encode())
        return self.until("(Pdb) ").partition("\n")[2]

    def end(self, line: str = "") -> str:
        """Type `line`; return what is printed until the end."""
        os.write(self._screen, f"{line}\n".encode() if line else b"")
        while self._take():
            continue
        return self.seen[self._read :]

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all_in(self.folder)
        self.process.kill()
        self.process.wait()

    def exit_code(self) -> int:
        return self.process.wait(patience(DEADLINE_S))

    def log(self, rank: int) -> str:
        return "".join(log.read_text() for log in self.folder.glob(f"ddpshim-logs/*/rank_{rank}.log"))


def test_an_unedited_program_is_one_program_in_the_debugger(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as plain:
        exec(UNEDITED.replace("breakpoint()", "scale = 2.0"), {})
    first, second = plain.getvalue().splitlines()
    assert first.endswith("of (10, 1)")
    with Terminal(tmp_path, UNEDITED) as screen:
        screen.until("(Pdb) ")
        assert screen.answer("p losses.shape, losses.tolist().__len__()") == "(torch.Size([10, 1]), 10)\n"
        (loss,) = re.findall(r"^tensor\((.*), grad_fn=<MulBackward0>\)\n$", screen.answer("p loss"))
        assert float(loss) == pytest.approx(float(first.split()[1]), abs=2e-4)
        assert screen.answer("!scale = 2.0") == ""
        assert "-> print(f" in screen.answer("n")
        said = screen.end("c")
        assert screen.exit_code() == 0
        assert [line for line in said.splitlines() if line.startswith("loss")] == [first, second]
        assert f"tensor({loss}, grad_fn" in screen.log(1)
        assert second in screen.log(2)


def test_each_rank_of_an_edited_trainer_does_what_is_typed(tmp_path: Path) -> None:
    with Terminal(tmp_path, EDITED, "all", "main") as screen:
        assert "-> if world.is_main" in screen.until("(Pdb) ")
        assert screen.answer("p world.rank, world.sum(len(x)), world.sum(x.sum().item())") == "(0, 12, 66.0)\n"
        said = screen.answer("n")  # into the branch of the main rank
        assert '-> print("main")' in said
        assert f"ranks 1, 2 did not come to {_line('print(')} yet, and do nothing of what you type here before" in said
        assert screen.answer("!scale = 2.0") == ""
        assert "main\n" in screen.answer("n")  # all are there again
        assert screen.answer("!scale *= 3") == ""
        said = screen.answer("c")  # where the other ranks never come
        assert f"ranks 1, 2 did not come to {_line('optimizer.step')} yet" in said
        assert "scale 6.0 on 0" in screen.end("c")
        assert screen.exit_code() == 0
        for rank in (1, 2):
            assert f"(Pdb) ({rank}, 12, 66.0)\n" in screen.log(rank)
            assert f"scale 3.0 on {rank}" in screen.log(rank)


def test_where_ranks_fetch_their_samples_the_main_rank_stops_alone(tmp_path: Path) -> None:
    with Terminal(tmp_path, EDITED, "data", "error") as screen:
        assert "__getitem__()\n-> return" in screen.until("(Pdb) ")
        while "-> step / 0" not in screen.answer("c"):
            continue
        why = f"{_line('return torch.tensor')}: only rank 0 stops here, where each rank fetches its own samples"
        assert screen.seen.count(why) == 4  # its rows of the second batch
        assert screen.answer("p step") == "1\n"  # after the error
        said = screen.end("q")
        assert said.endswith(
            f"ddpshim: {_line('step / 0')} was quit in the debugger, which ends the job (exit code 1)\n"
        )
        assert screen.exit_code() == 1
        assert "Traceback" not in "".join(map(screen.log, range(3)))


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_the_debugger_ends_with_ctrl_c_and_with_its_input(tmp_path: Path, is_interrupted: bool) -> None:
    with Terminal(tmp_path, EDITED, "all") as screen:
        screen.until("(Pdb) ")
        if is_interrupted:
            screen.process.send_signal(signal.SIGINT)
            assert "ddpshim: stopped by SIGINT; their logs are in " in screen.end()
            assert screen.exit_code() == 130
        else:
            said = screen.end("\x04")
            assert said.endswith(
                f"ddpshim: {_line('if world.is_main:')} was quit in the debugger, which ends the job (exit code 1)\n"
            )
            assert screen.exit_code() == 1

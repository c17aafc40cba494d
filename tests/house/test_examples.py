"""The examples: each is run as it says itself and as examples/README.md says, and prints what proves its point.

Ranks and agents are forked (tests/preloaded.py), and so are those of the examples that start runs themselves.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ddpshim
from examples import how_it_works, resume, two_nodes
from tests.examples import PAGE, ROOT, Row, printed, rows, shown
from tests.preloaded import environment, preloaded, start_afresh
from tests.preloaded_commands import commands
from tests.ranks import run_ranks

FOLDER = ROOT / "examples"
DEADLINE_S = 120
TABLE, OTHERS = rows(PAGE.read_text())
LAUNCHED = ["weighted_datasets", "diffusion_ema", "accumulation_bf16", "rollouts"]
ENVIRON = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?"


def commands_of(name: str) -> list[str]:
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    return [line.strip().split("  ")[0] for line in text.splitlines() if line.startswith("    python ")]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a command of the page or of a docstring prints, the library's own lines left out; it is run once."""
    done: dict[str, str] = {}

    def run(command: str) -> str:
        if command not in done:
            folder = tmp_path_factory.mktemp("example")
            (folder / "examples").symlink_to(FOLDER)
            python, *words = command.split()
            assert python == "python"
            code, said = start_afresh(words, ENVIRON, folder, DEADLINE_S)
            assert code == 0, said
            done[command] = printed(said)
        return done[command]

    return run


@pytest.fixture
def on(output: Callable[[str], str], request: pytest.FixtureRequest) -> Callable[[str, int], str]:
    return lambda name, n: output(f"python -m ddpshim run --nproc {n} examples/{name}.py")


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(NUMBER, text)]


def words(text: str) -> str:
    """The text without its numbers, and without hashes of weights: processors round differently."""
    return re.sub(rf"\s*(?:\b[0-9a-f]{{16}}\b|{NUMBER})", " #", text)


def words_shown(command: str) -> str:
    return words(shown(PAGE.read_text())[command])


# The page


@pytest.mark.unit
def test_the_page_lists_the_examples_and_nothing_else() -> None:
    there = {str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*") if p.suffix in (".py", ".sh", ".json", ".yaml")}
    listed = [row.file for row in (*TABLE, *OTHERS)]
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.file not in ("resume.py", "two_nodes.py")], ids=lambda r: r.file
)
def test_a_command_of_the_page_prints_what_the_page_shows(row: Row, output: Callable[[str], str]) -> None:
    assert words(output(row.command)) == words_shown(row.command)


@pytest.mark.parametrize("name", LAUNCHED)
def test_without_a_launcher_it_runs_as_well(name: str, output: Callable[[str], str]) -> None:
    plain = f"python examples/{name}.py"
    assert plain in commands_of(name)
    assert (
        output(plain).splitlines()[-1][:8]
        == output(f"python -m ddpshim run --nproc 1 examples/{name}.py").splitlines()[-1][:8]
    )


# What each of them proves


def with_ddpshim() -> tuple[list[float], Any]:
    """The training of examples/how_it_works.py with the library: the loss of each step, and the policy."""
    ddpshim.setup(batch="global", device="cpu")
    obs, action, policy = how_it_works.make()
    wrapped = ddpshim.wrap_parallel(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    losses = []
    for _ in range(how_it_works.NUM_EPOCHS):
        for x, y in DataLoader(TensorDataset(obs, action), how_it_works.BATCH_SIZE, shuffle=True):
            loss = (wrapped(x + 0.1 * torch.randn(len(x), 8)) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, policy


def both_ways() -> list[tuple[list[float], list[bytes]]]:
    ddpshim.cleanup()
    ways = []
    for way in (with_ddpshim, how_it_works.main):
        losses, policy = way()
        ddpshim.cleanup()
        ways.append((losses, [parameter.detach().numpy().tobytes() for parameter in policy.parameters()]))
    return ways


def test_plain_torch_has_the_bits_of_the_library() -> None:
    by_size = []
    for num_ranks in (1, 2, 3):
        results = [way for rank in run_ranks(both_ways, num_ranks, seed=1) for way in rank]
        assert len(results[0][0]) == 30
        assert results == [results[0]] * 2 * num_ranks
        by_size.append(results[0])
    for losses, _ in by_size[1:]:
        assert losses == pytest.approx(by_size[0][0], rel=1e-5)


@pytest.mark.parametrize(("name", "is_same"), [("train_after", True), ("train_shares", False)])
def test_the_trainer_after_the_migration_has_the_losses_of_its_door(
    name: str, is_same: bool, output: Callable[[str], str]
) -> None:
    after = [f"python -m ddpshim run --nproc {n} examples/{name}.py" for n in (1, 2)]
    commands = ["python examples/train_before.py", f"python examples/{name}.py", *after]
    before, plain, one, two = (numbers(output(command)) for command in commands)
    assert plain == before
    assert two == pytest.approx(one, abs=2e-4)
    assert (one == pytest.approx(before, abs=2e-4)) == is_same, "shares have an order of their own, on any number"
    assert len(two) == len(before) == 10


def test_weights_are_those_of_all_ranks_and_no_draw_is_made_twice(on: Callable[[str, int], str]) -> None:
    one, two = (on("weighted_datasets", n) for n in (1, 2))
    for line in two.splitlines()[1:4]:
        size, weight, share, *of_ranks = numbers(line)
        assert size in (500, 6000, 200)
        assert [share, *of_ranks] == pytest.approx([weight] * 3, abs=0.03)
        assert sum(of_ranks) / 2 == pytest.approx(share, abs=1e-3)
    alike, num_draws = numbers(two.splitlines()[4].split(":")[1])[:2]
    assert num_draws == 3200
    assert alike < 20
    assert re.search(r"draws, step by step: [0-9a-f]{16}$", two)
    assert two.splitlines()[-1] == one.splitlines()[-1]


def test_the_noise_the_ema_and_the_loss_are_those_of_one_process(on: Callable[[str, int], str]) -> None:
    one, two = (on("diffusion_ema", n).splitlines()[1:] for n in (1, 2))
    (alone,), rows_of_ranks = [numbers(one[0])], [numbers(line) for line in two[:2]]
    assert [row[0] for row in rows_of_ranks] == [0, 1]
    assert rows_of_ranks[0][1:3] == rows_of_ranks[1][1:3] == alone[1:3]
    assert rows_of_ranks[0][3:] == rows_of_ranks[1][3:] == pytest.approx(alone[3:], abs=2e-8)
    assert alone[3] != alone[4]
    assert numbers(two[2].split("|x|")[1]) == pytest.approx([1.0], abs=0.1)
    losses = [float(line.split(": ")[1]) for lines in (one, two) for line in lines if "loss of the last epoch" in line]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_parts_are_the_whole_in_float32_and_not_in_bf16(on: Callable[[str, int], str]) -> None:
    tables = [[numbers(line.split("  ", 1)[1]) for line in on("accumulation_bf16", n).splitlines()[1:]] for n in (1, 2)]
    for table in tables:
        whole, parts, bf16, bf16_parts = [row[-4:] for row in table]
        assert whole[2] == 0.0
        assert parts[:2] == pytest.approx(whole[:2], rel=1e-5)
        assert parts[2] < 1e-6
        assert 1e-4 < bf16[2] < 5e-2
        assert 1e-4 < bf16_parts[2] < 5e-2
    assert tables[0][0][-4:-2] == pytest.approx(tables[1][0][-4:-2], rel=1e-5)
    assert [[row[-1] for row in table] for table in tables] == [[0] * 4, [1] * 4]


def test_rollouts_have_the_statistics_of_one_rank(on: Callable[[str, int], str]) -> None:
    one, two = (on("rollouts", n).splitlines() for n in (1, 2))
    _, played, of_all, *alone = numbers(one[1])
    assert (played, of_all) == (20, 20)
    assert sum(numbers(line)[1] for line in two[1:3]) == 20
    assert [numbers(line)[3:] for line in two[1:3]] == [alone, alone]
    assert 0 < alone[1] < 1
    assert one[2:] == two[3:]


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that an example starts are forked."""
    monkeypatch.chdir(tmp_path)
    for name, value in preloaded().shell_environment(ENVIRON).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(commands() / "python"))


def test_an_interrupted_training_goes_on_on_one_rank_and_on_three(
    tmp_path: Path, forks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    resume.demo(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "uninterrupted, on 1 rank: 160 steps"
    num_steps, epoch, step, code = numbers(lines[1].split("after")[1])
    assert 45 < num_steps == epoch * 40 + step < 160
    assert step > 0, "not in the middle of an epoch"
    assert code == 75
    for line, ranks in zip(lines[2:], ("1 rank", "3 ranks")):
        said = f"continued on {ranks}: {160 - num_steps:.0f} steps; 160 of 160 had the same samples; "
        assert line.startswith(f"{said}largest difference of a weight ")
        assert float(line.split()[-1]) < 1e-12
    assert words("\n".join(lines)) == words_shown("python examples/resume.py --demo")


def test_two_agents_make_two_nodes(forks: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert two_nodes.emulate() == 0
    lines = printed(capfd.readouterr().out).splitlines()
    assert words("\n".join(lines)) == words_shown("python examples/two_nodes.py")
    assert lines[-1] == "exit codes of the agents: [0, 0]"
    assert lines[0].startswith("4 ranks, loss of rank 0 ")
    table = [numbers(line) for line in lines[2:6]]
    assert [row[:3] for row in table] == [[0, 0, 0], [1, 0, 1], [2, 1, 0], [3, 1, 1]]
    assert [row[4:] for row in table] == [[100, table[0][5]]] * 4
    assert lines[6] == "samples seen: 400 of 400"

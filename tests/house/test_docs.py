"""The guide, followed as a reader would: its commands are run and its diffs applied in their order, on two ranks."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ddpshim
from ddpshim.job.world import World
from evidence.equivalence import copy_release, make_run_config
from tests.house.test_printed import all_messages, markdown
from tests.preloaded import environment, start_afresh

ROOT = Path(__file__).parents[2]
RELEASE = "0.3.0"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# In a message of the guide: what the library puts in.
_VALUE = re.compile(r"'[^']*'|\bcuda:\d|\bepoch \d|\d+|\bX\b|\bPolicy\b|\b[A-Z_]{4,}=?|\[.*?\]|\.\.\.")
_EXPECTED = re.compile(r"^(.*\S)\s+# exit code (\d+)$", re.MULTILINE)


def _blocks(title: str, language: str) -> list[str]:
    """The texts of the blocks in a section of the guide."""
    sections = re.split(r"^## ", (ROOT / "MIGRATION.md").read_text(), flags=re.MULTILINE)
    (found,) = (section for section in sections if section.startswith(title))
    return [text for kind, text in _BLOCK.findall(found) if kind == language]


def _run(commands: str, folder: Path, tree: Optional[Path] = None) -> str:
    """What a shell prints that stops at the first command with another exit code than is written behind it."""
    checked = _EXPECTED.sub(r"code=0; \1 || code=$?; [ $code = \2 ] || { echo exit code $code; exit 1; }", commands)
    bash = "import os, sys; os.execvp('bash', ['bash', '-euo', 'pipefail', '-c', sys.argv[1]])"
    code, said = start_afresh(["-c", bash, checked], environment(tree), folder, 300)
    assert code == 0, f"{commands}\nended with {code}:\n{said[-6000:]}"
    return said


def _apply(diff: str, source: str) -> str:
    """`source` after the hunks of a diff, which `...` separates; each must fit in exactly one place."""
    for hunk in diff.split("...\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert source.count(old) == 1, f"fits in {source.count(old)} places:\n{hunk}"
        source = source.replace(old, new)
    return source


def _losses(said: str) -> list[float]:
    """Of training and of validation in each epoch, as a trainer prints them."""
    return [float(loss) for loss in re.findall(r"(?:loss|validation) ([\d.]+)", said)]


@pytest.mark.launch
@pytest.mark.robomimic
def test_robomimic_as_released(tmp_path: Path) -> None:
    tree = copy_release(RELEASE, tmp_path, "plain")
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    make_run_config(tree, RELEASE, "bc", tmp_path, 3, 1).rename(tmp_path / "bc.json")
    unedited, patched = _blocks("1.", "sh")
    _run(unedited, tmp_path, tree)
    _run(patched, tmp_path, tree)
    assert len(list(tmp_path.glob("out/*/*/models/*.pth"))) == 3
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before


@pytest.mark.launch
@pytest.mark.robomimic
def test_a_fork_of_robomimic(tmp_path: Path) -> None:
    plain = copy_release(RELEASE, tmp_path, "plain").rename(tmp_path / "pristine")
    shutil.copytree(plain, tmp_path / "fork")
    edited = tmp_path / "fork" / "robomimic" / "scripts" / "train.py"
    source = edited.read_text()
    edited.write_text(source.replace("def train(config, device):", "print('my fork')\n\n\ndef train(config, device):"))
    assert edited.read_text() != source
    make_run_config(plain, RELEASE, "bc", tmp_path, 3, 1).rename(tmp_path / "bc.json")
    status, merge, train = _blocks("2.", "sh")
    assert "unknown   " in _run(status, tmp_path)
    _run(merge, tmp_path)
    merged = edited.read_text()
    assert "print('my fork')" in merged
    assert "ddpshim" in merged
    assert "<<<<" not in merged
    said = _run(train, tmp_path, tmp_path / "fork")
    assert "ddpshim: 2 ranks on this machine" in said
    assert "my fork" in said
    assert "is not a release" not in said, "it calls ddpshim itself"


MIGRATION = ROOT / "examples" / "migration"


@pytest.mark.launch
def test_a_trainer_goes_through_both_doors(tmp_path: Path) -> None:
    source = (MIGRATION / "trainer.py").read_text()
    (tmp_path / "trainer.py").write_text(source)
    on_three, (alone, on_two) = (text.splitlines() for text in _blocks("3.", "sh"))
    three_lines, shares = _blocks("3.", "diff")
    assert len([line for line in three_lines.splitlines() if line[0] in "+-"]) <= 5
    for name, diff in (("whole_batches.py", three_lines), ("shares.py", shares)):
        made, example = (text.split("\n", 1)[1] for text in (_apply(diff, source), (MIGRATION / name).read_text()))
        assert made == example, f"the diff of MIGRATION.md does not make {name}"
        shutil.copy(MIGRATION / name, tmp_path)
    before = _losses(_run("python trainer.py", tmp_path))
    assert len(before) == 6
    assert _losses(_run("python whole_batches.py", tmp_path)) == before
    assert _losses(_run(alone, tmp_path)) == before
    assert _losses(_run(*on_three, tmp_path)) == pytest.approx(before, abs=2e-6)
    torchrun = "torchrun --standalone --nproc_per_node=2 whole_batches.py"
    assert sorted(_losses(_run(torchrun, tmp_path))) == pytest.approx(sorted(2 * before), abs=2e-6)
    ddp = _losses(_run(on_two, tmp_path))
    assert set(ddp).isdisjoint(before), "another order"
    assert ddp == pytest.approx(before, rel=0.25)
    argument = (MIGRATION / "shares.py").read_text().replace("setup(seed=1)", 'setup(seed=1, batch="global")')
    (tmp_path / "shares.py").write_text(argument)
    assert _losses(_run(on_two, tmp_path)) == pytest.approx(before, abs=2e-6)
    best = torch.load(max(tmp_path.glob("runs/*/best.pth"), key=lambda path: path.stat().st_mtime))
    assert list(best["policy"]) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


@pytest.mark.launch
def test_a_migration_by_hand_is_found(tmp_path: Path) -> None:
    for name in ("whole_batches.py", "by_hand.py"):
        shutil.copy(MIGRATION / name, tmp_path)
    (commands,) = _blocks("4.", "sh")
    for command, verdict in zip(commands.splitlines(), ("yes", "no")):
        assert f"the same experiment: {verdict}" in _run(command, tmp_path)


def test_the_lines_on_checkpoints_run(tmp_path: Path) -> None:
    (lines,) = (text for text in _blocks("Common pitfalls", "python") if "checkpoint.save(" in text)
    policy = torch.nn.Linear(2, 2)
    names: dict[str, Any] = {"policy": policy, "epoch": 3, "folder": tmp_path, "world": World()}
    exec(lines, names)
    assert names["newest"] == tmp_path / "epoch_3.pth"
    assert torch.load(names["newest"])["epoch"] == 3


@pytest.mark.parametrize("is_main", [True, False])
def test_the_lines_on_bars_and_loggers_run(tmp_path: Path, is_main: bool) -> None:
    (lines,) = (text for text in _blocks("Common pitfalls", "python") if "wandb.init" in text)
    policy, calls = torch.nn.Linear(2, 1), mock.MagicMock()
    loader = ddpshim.make_loader(torch.utils.data.TensorDataset(torch.ones(6, 2), torch.ones(6, 1)), batch_size=2)
    world = mock.Mock(is_main=is_main, mean_over=World().mean_over)
    names: dict[str, Any] = {"policy": policy, "folder": tmp_path, "world": world, "loader": loader, "num_epochs": 2}
    names.update(optimizer=torch.optim.SGD(policy.parameters(), 0.1), ddpshim=ddpshim, wandb=calls.wandb)
    names.update(SummaryWriter=calls.SummaryWriter, train_on=lambda x, y: (policy(x) - y).square().mean().detach())
    calls.tqdm.side_effect = lambda steps, total, disable: steps
    exec(lines, {**names, "tqdm": calls.tqdm})
    assert calls.wandb.init.call_args.kwargs["mode"] == ("online" if is_main else "disabled")
    assert [call.kwargs for call in calls.tqdm.call_args_list] == 2 * [{"total": 3, "disable": not is_main}]
    assert calls.wandb.init.return_value.log.call_count == 6
    assert calls.SummaryWriter.return_value.add_scalar.call_count == 6 * is_main


def test_the_messages_of_the_guide_are_those_of_the_library() -> None:
    page = (ROOT / "MIGRATION.md").read_text()
    rows = page[page.index("Messages from ddpshim") : page.index("Messages from torch, NCCL")].splitlines()
    firsts = [row.split(" | ")[0] for row in rows if row.startswith("| `")]
    messages = [message for first in firsts for message in re.findall("`(.+?)`", first) if " " in message]
    assert len(messages) == 2
    texts = [text for _, text in all_messages()]
    for message in messages:
        between_values = _VALUE.split(message)
        parts = [re.escape(part.strip()) for part in between_values]
        pattern = re.compile(".*".join(part for part in parts if part), re.DOTALL)
        assert any(map(pattern.search, texts)), message


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: the second of the same name ends in -1."""
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        seen[re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")] += 1
    return {f"{name}-{number}" if number else name for name, times in seen.items() for number in range(times)}


def test_links_lead_somewhere() -> None:
    lost = []
    course = [f"examples/course/{script.name}" for script in (ROOT / "examples" / "course").glob("[0-9]_*.py")]
    for page in [*markdown(), "examples/quick_start.py", *course]:
        here = ROOT / page
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", here.read_text()):
            path, _, anchor = target.partition("#")
            there = (here.parent / path).resolve() if path else here
            there = there.with_suffix(".py") if there.suffix == ".ipynb" else there  # the site makes it from the script
            if not there.exists() or (anchor and anchor not in _anchors(there)):
                lost.append(f"{page}: {target}")
    assert lost == []
    for page in ("CONTRIBUTING.md", "docs/decisions.md"):  # files that it walks through
        files = r"(?<=`)(?:[\w/]+/\w+\.py|\w+(?:/\w+)*/)(?=`)|^[\w/]+/\w+\.py(?=,| {3})"
        named = re.findall(files, (ROOT / page).read_text(), re.MULTILINE)
        assert len(named) > 8
        assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "ddpshim" / path).exists()] == []


def test_pages_written_by_hand_have_at_most_1600_lines() -> None:
    others = {"decisions.md", "from_other_guides.md", "options.md", "api.md"}  # appendices; of the site
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in others]
    pages += [ROOT / f"{page}.md" for page in ("README", "MIGRATION", "CONTRIBUTING")]
    assert sum(len(page.read_text().splitlines()) for page in pages) <= 1600
    upstream = [page.read_text() for page in (ROOT / "docs" / "upstream").glob("*.md")]
    assert max(len(text.splitlines()) for text in upstream) <= 15


OTHER_GUIDES = ROOT / "docs" / "from_other_guides.md"


def test_the_loop_with_all_options_gives_what_one_by_hand_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)
            self.dropout = torch.nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda x: self.dropout(torch.tanh(self.first(x))), x, use_reentrant=False)
            return self.last(hidden)  # type: ignore[no-any-return]

    (loop,) = (block for block in _BLOCK.findall(OTHER_GUIDES.read_text()) if block[0] == "python")
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 72).view(24, 3), torch.linspace(0, 1, 48).view(24, 2))
    names = {"ddpshim": ddpshim, "torch": torch, "make_network": Network, "dataset": data, "folder": tmp_path / "out"}
    monkeypatch.setattr(torch, "compile", lambda net: net)  # what a compiler makes is tested elsewhere
    try:
        exec(loop[1], names)
    finally:
        ddpshim.cleanup()
    torch.manual_seed(1)
    net = Network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(data, 8, shuffle=True):
            optimizer.zero_grad()
            for x, y in zip(*(part.chunk(2) for part in batch)):
                with torch.autocast("cpu", torch.bfloat16):
                    out = net(x)
                ((out - y).square().mean() / 2).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    for ours, by_hand in zip(names["policy"].parameters(), net.parameters()):
        assert torch.equal(ours, by_hand)

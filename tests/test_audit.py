"""`python -m ddpshim audit`: no finding where a trainer is right, and each mistake found where it is not.

The trainer is tests/audited.py, in raw torch DDP. Jobs are forked from a process that has torch (tests/preloaded.py).
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import ddpshim.__main__ as command_line
from ddpshim.tools.audit import running
from ddpshim.tools.audit.fingerprints import checksums, samples_of, streams
from ddpshim.tools.audit.judging import judge
from ddpshim.tools.audit.recording import SHOW_STACK, is_program
from tests.equivalence import copy_release, make_config, make_data, source
from tests.preloaded import environment, preloaded

ROOT = Path(__file__).parent.parent
TRAINER = ROOT / "tests" / "audited.py"
DEADLINE_S = 120.0


class Ran:
    """What one job left: its exit code, what it printed, and the report of --json."""

    def __init__(self, folder: Path, command: str, program: list[str], tree: Optional[Path] = None) -> None:
        folder.mkdir(exist_ok=True)
        environ = {**environment(tree), "GLOO_SOCKET_IFNAME": "lo"}
        argv = ["ddpshim", *command.split(), *program]
        self.code = preloaded(tree).start([(argv, environ)], folder).wait(DEADLINE_S)
        self.printed, _, report = (folder / "output.txt").read_text().rpartition('{\n  "schema"')
        self.report: dict[str, Any] = json.loads('{\n  "schema"' + report) if "--json" in command else {}
        logs = sorted(folder.glob("ddpshim-logs/*/rank_*.log"))
        self.losses = [re.findall(r"^loss (.*)$", log.read_text(), re.MULTILINE) for log in logs]

    @property
    def found(self) -> dict[str, str]:
        return {each["code"] or each["name"]: each["message"] for each in self.report["findings"]}


def as_told(text: str) -> str:
    """Without the digits of sums, which another machine may round."""
    return re.sub(r"-?\d+\.\d{3,}", "N", text)


def audit(folder: Path, *mistakes: str, options: str = "--to-end") -> Ran:
    return Ran(folder, f"audit --json {options}", [str(TRAINER), str(folder), *mistakes])


@pytest.mark.launch
def test_a_correct_trainer_has_no_findings_and_computes_the_same(tmp_path: Path) -> None:
    looked_at = audit(tmp_path / "audit")
    alone = Ran(tmp_path / "run", "run --nproc 2", [str(TRAINER), str(tmp_path / "run")])
    assert (looked_at.code, looked_at.report["findings"]) == (0, [])
    assert looked_at.losses == alone.losses
    assert [len(losses) for losses in looked_at.losses] == [6, 6]
    assert looked_at.report["facts"] == {
        "ranks": "2",
        "steps": "6 on ranks 0 and 1",
        "optimizer": "Adam, learning rate 0.001",
        "batch of a step": "16 samples (8 + 8)",
        "samples": "48 on ranks 0 and 1",
        "passes": "2 begun, 2 ended on ranks 0 and 1",
        "in DistributedDataParallel": "6 of 6 parameters",
    }
    assert "body.1.running_mean" in looked_at.report["notes"][0]


@pytest.mark.launch
def test_the_job_ends_after_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    ran = audit(tmp_path, options="--steps 2")
    assert (ran.code, ran.report["findings"], ran.report["exit_code"]) == (0, [], 0)
    assert [len(losses) for losses in ran.losses] == [1, 1]  # the second step was not returned from
    assert list((tmp_path / "out").iterdir()) == []
    assert any("set_epoch" in what for what in ran.report["not_looked_at"])


@pytest.mark.launch
def test_weights_streams_order_and_files(tmp_path: Path) -> None:
    mistakes = ("own weights", "one seed", "no set_epoch", "files of all")
    ran = audit(tmp_path, *mistakes, options="--to-end --single-batch 8")
    assert ran.code == 1
    assert set(ran.found) == {"unequal-weights", "DDP203", "DDP206", "DDP301", "DDP401", "DDP403", "DDP404"}
    assert re.search(r"1 of 6 parameters differ .*'head.bias'; the first sums to -?\d", ran.found["unequal-weights"])
    assert "the same 6 batches" in ran.found["DDP203"]
    assert "16 samples (8 + 8), and on 8" in ran.found["DDP206"]
    assert "(torch in 3 of 6 steps)" in ran.found["DDP301"]  # validation draws on rank 0 alone
    place = (
        TRAINER.read_text().splitlines().index('    torch.save(policy.state_dict(), os.path.join(FOLDER, "all.pth"))')
    )
    assert f"write all.pth at {TRAINER}:{place + 1}" in ran.found["DDP401"]
    assert "append to log.txt at" in ran.found["DDP403"]
    assert "delete old at" in ran.found["DDP404"]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("mistakes", "found"),
    [
        (
            ("through module", "all data"),
            {"DDP102": "6 of 6 parameters", "DDP204": "in all of the first 12 batches"},
        ),
        (
            ("not wrapped", "own shuffle"),
            {"DDP107": "6 of 6 parameters", "DDP204": "read 47 of the same samples among the 47"},
        ),
        (
            ("no group", "all data"),
            {"no-process-group": "no process group on ranks 0 and 1", "DDP204": "first 12 batches"},
        ),
        (
            ("own rate", "late network", "iterable unsharded"),
            {
                "unequal-learning-rates": "[0.001] on rank 0, [0.002] on rank 1",
                "DDP106": "6 of 6 parameters",
                "DDP205": "first 12 batches",
            },
        ),
        (("swallows",), {"DDP503": "rank 1 ended with exit code 0 after 2 steps, within a step, and rank 0"}),
    ],
)
def test_mistakes(tmp_path: Path, mistakes: tuple[str, ...], found: dict[str, str]) -> None:
    ran = audit(tmp_path, *mistakes)
    assert ran.code == 1
    assert set(ran.found) == set(found)
    for code, said in found.items():
        assert said in ran.found[code]


@pytest.mark.launch
def test_a_job_that_hangs_is_ended_and_each_rank_named(tmp_path: Path) -> None:
    ran = audit(tmp_path, "uneven share", options="--to-end --timeout 8")
    assert ran.code == 1
    assert set(ran.found) == {"uneven-batches", "stalled"}
    assert "6 batches on rank 0, 5 batches on rank 1" in ran.found["uneven-batches"]
    places = re.findall(
        rf"rank (\d): 2 steps and (\d) batches after the last, at {TRAINER}:(\d+)", ran.found["stalled"]
    )
    lines = TRAINER.read_text().splitlines()
    at = {rank: (int(batches), lines[int(line) - 1].strip()) for rank, batches, line in places}
    assert at == {"0": (2, "loss.backward()"), "1": (1, "dist.barrier()")}


def test_a_rank_is_given_the_time_to_say_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, stack = tmp_path / "rank_0.jsonl", tmp_path / "stack_0"
    records.write_text('{"kind": "start", "pid": 7}\n{"kind": "ba')  # it is writing
    head = "{} 0x00007f0a (most recent call first):\n"
    lines = [head.format("Current thread"), '  File "/t/other.py", line 2 in hears\n', "\n"]
    lines += [
        head.format("Thread"),
        '  File "/t/train.py", line 3 in train\n',
        '  File "/t/train.py", line 9 in <mod',
        "ule>\n",
    ]

    class Looks:
        def wait(self, timeout_s: float) -> bool:
            with stack.open("a") as file:
                file.write(lines.pop(0))
            return False

    watch = running._Watch(tmp_path, 1, 0.0, "")
    stack.touch()
    sent: list[tuple[dict[int, int], int]] = []
    monkeypatch.setattr(watch, "_ended", Looks())

    def send(pids: dict[int, int], number: int) -> None:
        sent.append((pids, number))
        with records.open("a") as file:
            file.write('tch"}\n' * (number == SHOW_STACK))

    monkeypatch.setattr(running, "_signal", send)
    watch._end_ranks()
    assert sent == [({0: 7}, SHOW_STACK), ({0: 7}, signal.SIGKILL)]
    assert running._read(tmp_path, 1)[0][1:] == [{"kind": "batch"}, {"kind": "stack", "place": "/t/train.py:3"}]


@pytest.mark.launch
def test_a_trainer_that_was_migrated_with_ddpshim_has_no_findings(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "audit --json --to-end", [str(ROOT / "examples" / "train_after.py")])
    assert (ran.code, ran.report["findings"]) == (0, [])
    assert ran.report["facts"]["batch of a step"] == "100 samples (50 + 50)"


@pytest.mark.launch
@pytest.mark.robomimic
def test_the_patched_robomimic_has_no_findings(tmp_path: Path, releases: Path) -> None:
    if source("0.3.0") is None:
        pytest.skip("robomimic 0.3.0 is not installed (pip install --no-deps robomimic==0.3.0)")
    tree, data = copy_release("0.3.0", releases), make_data(tmp_path, num_demos=50)
    config = make_config(tree, "bc_gmm", data, tmp_path, 5, 2, train__data=str(data))
    ran = Ran(tmp_path, "audit --json --to-end", ["-m", "robomimic.scripts.train", "--config", str(config)], tree)
    assert (ran.code, ran.report["findings"]) == (0, [])
    assert ran.report["facts"]["steps"] == "10 on ranks 0 and 1"
    assert ran.report["facts"]["batch of a step"] == "100 samples (50 + 50)"


@pytest.mark.launch
def test_the_example_in_the_docs_prints_what_they_say(tmp_path: Path) -> None:
    _, program, printed = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "docs" / "audit.md").read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    command, _, report = printed.partition("\n")
    ran = Ran(tmp_path, command.partition("-m ddpshim ")[2], [])
    assert ran.code == 1
    assert as_told(report) in as_told((tmp_path / "output.txt").read_text())


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["audit", "absent.py"]) == 2
    assert "absent.py does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command_line.main(["audit", "--nproc", "1", "train.py"])
    assert ended.value.code == 2
    assert "must be at least 2" in capsys.readouterr().err


# What records mean


class Records:
    """The records of one rank that reads `passes` (lists of batches of samples) and steps after each batch."""

    def __init__(self, *passes: list[list[str]], **how: Any) -> None:
        about = {"sampler": "DistributedSampler", "shuffles": True, "epoch": 0, "is_iterable": False, **how}
        self.all: list[dict[str, Any]] = [
            {"kind": "start", "pid": 1},
            {"kind": "optimizer", "optimizer": 0, "names": ["w"], "is_wrapped": [True]},
        ]
        step = 0
        for number, batches in enumerate(passes):
            epoch = number if about["epoch"] == "moves" else about["epoch"]
            self.all.append({"kind": "pass", "number": number, "data": 1, "place": "", **about, "epoch": epoch})
            for samples in batches:
                step += 1
                self.all.append({"kind": "batch", "number": number, "size": len(samples), "samples": samples})
                self.all[-1]["streams"] = {"torch": step}
                self.step(step)
            self.all.append({"kind": "pass ended", "number": number})
        self.all.append({"kind": "end", "code": 0})

    def step(self, step: int) -> None:
        values = {"values": [[step, 1.0]], "gradients": [[step, 1.0]], "streams": {"torch": step}}
        self.all.append({"kind": "step", "optimizer": 0, "step": step, "type": "SGD", "lr": [0.1], "place": "t.py:1"})
        self.all[-1].update(values, buffers={}, group_size=2)

    def without(self, *kinds: str) -> list[dict[str, Any]]:
        return [record for record in self.all if record["kind"] not in kinds]


def codes(*ranks: list[dict[str, Any]], **how: Any) -> list[str]:
    return [finding.code or finding.name for finding in judge(dict(enumerate(ranks)), **how).findings]


def batches(first: int, count: int, size: int = 10) -> list[list[str]]:
    """Batches of samples that are numbered from `first` on."""
    return [[str(first + size * i + j) for j in range(size)] for i in range(count)]


def both(mine: list[list[list[str]]], theirs: list[list[list[str]]], **how: Any) -> list[str]:
    return codes(Records(*mine, **how).all, Records(*theirs, **how).all)


def test_shares() -> None:
    assert both([batches(0, 5)], [batches(50, 5)]) == []
    assert both([batches(0, 5)], [batches(48, 5)]) == []  # filled up
    assert both([batches(0, 5)], [batches(40, 5)]) == ["DDP204"]
    assert both([batches(0, 5)], [batches(0, 5)], is_iterable=True) == ["DDP205"]
    alike = [["x"] * 10] * 5
    assert both([alike], [alike]) == []  # nothing to tell samples apart by


def test_drawing_with_replacement_is_no_missing_share() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 100, (10, 10), generator=generator) for _ in range(2)]
    mine, theirs = ([list(map(str, batch)) for batch in draw.tolist()] for draw in drawn)
    assert both([mine], [theirs], sampler="WeightedRandomSampler", shuffles=None) == []


def test_orders() -> None:
    def orders(second: int, **how: Any) -> list[str]:
        return both([batches(0, 3), batches(second, 3)], [batches(100, 3), batches(100 + second, 3)], **how)

    assert orders(0) == ["DDP203"]
    assert orders(0, shuffles=False) == ["DDP202"]
    assert orders(0, sampler="RandomSampler", shuffles=None) == ["DDP302"]
    assert orders(0, sampler="SequentialSampler", shuffles=None) == []
    assert orders(30) == ["DDP203"]  # other samples, as augmentation makes them, of the same epoch
    assert orders(30, epoch="moves") == []
    assert orders(30, epoch=None) == []
    assert orders(10) == []  # known samples in another order, whatever the epoch says


def test_lengths_and_ends() -> None:
    whole, short = Records(batches(0, 5)), Records(batches(50, 4))
    assert codes(whole.all, short.all) == ["uneven-batches", "uneven-steps"]
    assert codes(whole.all, whole.without("end")[:-1], is_stalled=True)[-1] == "stalled"
    assert codes([{"kind": "end", "code": 0}], [{"kind": "end", "code": 0}]) == ["no-steps"]
    assert codes([{"kind": "end", "code": 1}], []) == []  # the trainer failed by itself
    failed = [*Records(batches(50, 4)).without("end"), {"kind": "end", "code": 1}]
    assert "DDP503" not in codes(short.all, failed)
    assert "DDP503" in codes(Records(batches(0, 3)).all, failed)


def test_weights_are_blamed_on_what_came_first() -> None:
    def rank(shift: int, what: str, step: int, names: Optional[list[str]] = None, wrapped: bool = True) -> Any:
        out = Records(batches(50 * shift, 5)).all
        for record in out:
            if record["kind"] == "step" and record["step"] >= step:
                record[what] = [[99 * shift, 2.0 * shift]]
            if record["kind"] == "optimizer":
                record["is_wrapped"] = [wrapped]
        return out

    plain = Records(batches(0, 5)).all
    assert codes(plain, rank(1, "gradients", 2)) == ["DDP102"]
    assert codes(*(rank(i, "gradients", 2, wrapped=False) for i in range(2))) == ["DDP107"]
    assert codes(plain, rank(1, "values", 2)) == ["unequal-weights"]
    message = judge({0: plain, 1: rank(1, "values", 2)}).findings[0].message
    assert (
        "after step 2 of SGD (t.py:1) 1 of 1 parameters differ between ranks ('w'; the first sums to 1 on rank 0, 2"
        in message
    )


def test_equal_noise() -> None:
    def rank(first: int, state: int) -> Any:
        out = Records(batches(first, 5)).all
        for record in out:
            if record["kind"] == "step":
                record["streams"] = {"torch": 100 * state + record["step"]}
        return out

    assert codes(rank(0, 0), rank(50, 0)) == []  # the streams were equal, and nothing was drawn
    assert codes(rank(0, 1), rank(50, 1)) == ["DDP301"]
    assert codes(rank(0, 1), rank(50, 2)) == []


def test_files() -> None:
    def rank(first: int, *written: tuple[str, str]) -> Any:
        files = [{"kind": "file", "what": what, "path": path, "place": "t.py:9"} for what, path in written]
        return [*Records(batches(first, 2)).all, *files]

    assert codes(rank(0, ("write", "/r/a")), rank(50, ("write", "/r/b"))) == []
    assert codes(rank(0, ("write", "/r/a")), rank(50, ("write", "/r/a"))) == ["DDP401"]
    assert codes(rank(0, ("delete", "/r/a")), rank(50, ("delete", "/r/a"))) == ["DDP404"]
    events = (("write", f"/r/tb/events.out.tfevents.{i}") for i in (1, 2))
    assert codes(*(rank(50 * i, event) for i, event in enumerate(events))) == ["DDP403"]


def test_folders() -> None:
    def rank(first: int, *folders: str) -> Any:
        made = [{"kind": "file", "what": "mkdir", "path": folder, "place": "t.py:9"} for folder in folders]
        return [*Records(batches(first, 2)).all, *made]

    assert codes(rank(0, "runs/12-59-59"), rank(50, "runs/12-59-59")) == []
    assert codes(rank(0, "runs/12-59-59"), rank(50, "runs/13-00-00")) == ["DDP405"]
    assert codes(rank(0, "runs/rank0/10"), rank(50, "runs/rank1/10")) == []
    assert codes(rank(0, "runs", "runs/12"), rank(50, "runs", "runs/13")) == ["DDP405"]
    assert codes(rank(0, "runs/12/logs", "runs/12/models"), rank(50, "runs/12/logs")) == []


# Fingerprints


def test_samples_are_told_apart_by_all_their_numbers() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    size, names = samples_of({"obs": x, "goal": [torch.zeros(3, 2, dtype=torch.uint8)], "task": "lift"})
    assert (size, len(set(names or ()))) == (3, 3)
    assert samples_of([x.flip(0)])[1] == list(reversed(samples_of([x])[1] or ()))
    assert samples_of(x[:, [1, 0, 2, 3]])[1] != samples_of(x)[1]
    assert samples_of(x.to(torch.complex64)) != samples_of(x)
    assert samples_of(torch.zeros(3, 0))[0] == 3
    assert samples_of({"text": ["a", "b"]}) == (0, None)
    assert samples_of(torch.zeros(0, 4)) == (0, None)


def test_checksums() -> None:
    one, none, other = checksums([torch.ones(3), None, torch.full((3,), 2.0)])
    assert (one[1], none, other[1]) == (3.0, None, 6.0)
    assert one[0] != other[0]


def test_streams_are_read_without_a_draw() -> None:
    state = torch.get_rng_state()
    first = streams()
    assert streams() == first
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert {name for name, value in streams().items() if value != first[name]} == {"torch"}


def test_places_are_the_programs() -> None:
    assert is_program("/home/me/train.py", "")
    assert not is_program(torch.__file__, "")
    assert not is_program(str(ROOT / "ddpshim" / "audit" / "running.py"), "")
    assert is_program(torch.__file__, "torch")  # run with -m

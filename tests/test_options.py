"""Options: where a value may come from, what is refused and how, and that each one has its effect."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpshim
from ddpshim import config_files, options
from ddpshim.errors import DataError, OptionsError
from ddpshim.job.job import current
from ddpshim.job.meter import PARTS
from ddpshim.observe.report.run import load
from ddpshim.options import Options
from ddpshim.tools import options as listing
from tests.equivalence import (
    Run,
    batches,
    copy_release,
    largest_difference,
    make_config,
    make_data,
    source,
    train_all,
)
from tests.preloaded_commands import patience
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in options.names():
        monkeypatch.delenv(f"DDPSHIM_{name.upper()}", raising=False)


# Reading


def test_an_argument_wins_over_its_variable_that_over_the_section_that_over_the_default() -> None:
    section = {"timeout_s": 10, "side_timeout_s": 20, "bucket_cap_mb": 30}
    environ = {"DDPSHIM_TIMEOUT_S": "11", "DDPSHIM_SIDE_TIMEOUT_S": "21"}
    read = Options.read(section, environ, timeout_s=12)
    assert (read.timeout_s, read.side_timeout_s, read.bucket_cap_mb, read.keep_checkpoints) == (12, 21, 30, 2)
    assert Options.read({}, {}, timeout_s=None) == Options()


def test_the_environment_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPSHIM_GUARD", "0")
    assert Options.read().guard is False


@pytest.mark.parametrize("text", ["true", "yes", "on", "1", " True ", "YES"])
def test_words_for_true(text: str) -> None:
    assert Options.read({}, {"DDPSHIM_BACKGROUND_SAVE": text}).background_save is True


@pytest.mark.parametrize("text", ["false", "no", "off", "0", "False"])
def test_words_for_false(text: str) -> None:
    assert Options.read({}, {"DDPSHIM_GUARD": text}).guard is False


ALLOWED: list[tuple[str, Any, Any]] = [
    ("timeout_s", "1.5", 1.5),
    ("timeout_s", 600, 600.0),
    ("accumulation_steps", "4", 4),
    ("bucket_cap_mb", "none", None),
    ("bucket_cap_mb", "null", None),
    ("bucket_cap_mb", "12.5", 12.5),
    ("backend", "NCCL", "nccl"),
    ("backend", None, None),
    ("precision", "bf16", "bf16"),
    ("logs", Path("logs"), "logs"),
    ("guard", False, False),
]


@pytest.mark.parametrize(("name", "raw", "value"), ALLOWED)
def test_what_is_allowed(name: str, raw: Any, value: Any) -> None:
    found = getattr(Options.read({name: raw}, {}), name)
    assert found == value
    assert type(found) is type(value)
    assert getattr(Options(**{name: raw}), name) == value


REFUSED: list[tuple[str, Any]] = [
    ("timeout_s", "soon"),
    ("timeout_s", 0),
    ("timeout_s", "-1"),
    ("timeout_s", "inf"),
    ("timeout_s", math.nan),
    ("timeout_s", True),
    ("timeout_s", None),
    ("accumulation_steps", "2.0"),
    ("accumulation_steps", 2.0),
    ("accumulation_steps", 0),
    ("accumulation_steps", True),
    ("metrics_every_n_epochs", -1),
    ("keep_checkpoints", 0),
    ("checkpoint_every_n_steps", 0),
    ("guard", "maybe"),
    ("guard", 1),
    ("guard", None),
    ("backend", "nccll"),
    ("lr_rule", "cubic"),
    ("lr_rule", None),
    ("precision", "fp8"),
    ("logs", 3),
    ("resume", True),
    ("rollouts", "some"),
    ("rollouts", ["all"]),
]


@pytest.mark.parametrize(("name", "raw"), REFUSED)
def test_what_is_refused(name: str, raw: Any) -> None:
    for refuse in (lambda: Options(**{name: raw}), lambda: Options.read({name: raw}, {})):
        with pytest.raises(OptionsError) as caught:
            refuse()
        assert f"{name}: {raw!r}; allowed: " in str(caught.value)
        assert isinstance(caught.value, ValueError)


def test_all_that_is_wrong_is_told_in_one_message() -> None:
    section = {"backed": "gloo", "guard": 3, "record": "yes"}
    environ = {"DDPSHIM_TIMEOUT_S": "soon", "DDPSHIM_GAURD": "0", "DDPSHIM_LAUNCHER": "none", "PATH": "/bin"}
    with pytest.raises(OptionsError) as caught:
        Options.read(section, environ, lr_rule="cubic", rollout="all")
    *lines, last = str(caught.value).splitlines()
    assert lines == [
        "6 options are wrong:",
        "  - section ddpshim: no option 'backed'; did you mean backend?",
        "  - variable DDPSHIM_GAURD: no such option; did you mean DDPSHIM_GUARD?",
        "  - argument: no option 'rollout'; did you mean rollouts?",
        "  - variable DDPSHIM_TIMEOUT_S: 'soon'; allowed: a number above 0",
        "  - argument lr_rule: 'cubic'; allowed: linear, sqrt or none",
        "  - section ddpshim, guard: 3; allowed: true or false (yes/no, on/off, 1/0)",
    ]
    assert last.startswith("Nothing was started")


def test_a_value_that_another_source_overrides_is_not_looked_at() -> None:
    assert Options.read({"guard": "maybe"}, {"DDPSHIM_GUARD": "0"}).guard is False


@pytest.mark.parametrize("variable", ["LAUNCHER", "UPSTREAM", "FAULT"])
def test_variables_that_are_no_options_are_left_alone(variable: str) -> None:
    assert Options.read({}, {f"DDPSHIM_{variable}": "x"}) == Options()


@pytest.mark.parametrize("variable", ["ROOT", "HOME", "VERSION", "LIB", "MODULE_TIMEOUT_S", "MODULE_GUARD"])
def test_variables_of_module_files_are_not_looked_at(variable: str) -> None:
    assert Options.read({}, {f"DDPSHIM_{variable}": "/apps/ddpshim"}) == Options()


@pytest.mark.parametrize("variable", ["QUEUE", "CLUSTER_NAME", "FOO", "INSTALL_DIR"])
def test_a_variable_like_no_option_is_warned_of(variable: str) -> None:
    with pytest.warns(UserWarning, match=f"^DDPSHIM_{variable} is not an option.*, call it DDPSHIM_MODULE_{variable}"):
        assert Options.read({}, {f"DDPSHIM_{variable}": "x"}) == Options()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        *(("TIMEOUT", "TIMEOUT_S"), ("TIMEOUT_SECONDS", "TIMEOUT_S"), ("BATCH_PER_RANK", "PER_RANK_BATCH")),
        *(("LOG_DIR", "LOGS"), ("CONFIG_PATH", "CONFIG"), ("LAUCHER", "LAUNCHER"), ("NUM_CHECKPOINTS", "KEEP_CHECK")),
    ],
)
def test_a_variable_like_an_option_is_an_error_that_names_it(variable: str, meant: str) -> None:
    with pytest.raises(
        OptionsError, match=f"variable DDPSHIM_{variable}: no such option; did you mean DDPSHIM_{meant}"
    ):
        Options.read({}, {f"DDPSHIM_{variable}": "1"})


def test_a_variable_that_is_empty_is_not_set() -> None:
    assert Options.read({}, {"DDPSHIM_TIMEOUT_S": "", "DDPSHIM_CONFIG": "", "DDPSHIM_NONSENSE": " "}) == Options()


def test_a_learning_rate_rule_needs_a_batch_for_each_rank() -> None:
    with pytest.raises(OptionsError, match="lr_rule=sqrt without per_rank_batch"):
        Options.read({"lr_rule": "sqrt"}, {})
    assert Options.read({"lr_rule": "sqrt"}, {"DDPSHIM_PER_RANK_BATCH": "1"}).lr_rule == "sqrt"


# Files


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("content", [{"ddpshim": {"timeout_s": 5}, "train": {"lr": 1}}, {"timeout_s": 5}])
def test_a_file_is_named_by_a_variable(tmp_path: Path, suffix: str, content: dict[str, Any]) -> None:
    if suffix == "yaml":
        pytest.importorskip("yaml")
    file = tmp_path / f"config.{suffix}"
    file.write_text(json.dumps(content))  # JSON is YAML
    environ = {"DDPSHIM_CONFIG": str(file)}
    assert Options.read({"timeout_s": 3, "bucket_cap_mb": 7}, environ).timeout_s == 5
    assert Options.read({"timeout_s": 3, "bucket_cap_mb": 7}, environ).bucket_cap_mb == 7
    assert Options.read({}, {**environ, "DDPSHIM_TIMEOUT_S": "9"}).timeout_s == 9


BROKEN = {"no such file": None, "no JSON": "{", "a list where its options should be": '{"ddpshim": []}'}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_cannot_be_read_is_one_of_the_problems(tmp_path: Path, what: str) -> None:
    file = tmp_path / "config.json"
    if BROKEN[what] is not None:
        file.write_text(BROKEN[what])
    with pytest.raises(OptionsError) as caught:
        Options.read({}, {"DDPSHIM_CONFIG": str(file), "DDPSHIM_TIMEOUT_S": "soon"})
    assert "2 options are wrong" in str(caught.value)
    assert str(file) in str(caught.value)
    assert "would be ignored" in str(caught.value)


def test_yaml_without_pyyaml_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("timeout_s: 5")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(OptionsError, match="Run pip install pyyaml, or write JSON"):
        config_files.read_section(file)


# What the world does with them


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ddpshim.cleanup()  # of a world that a test before has left
    yield
    ddpshim.cleanup()
    current().left = None


def test_the_world_holds_them(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPSHIM_PER_RANK_BATCH", "1")
    monkeypatch.setenv("DDPSHIM_LR_RULE", "sqrt")
    here = ddpshim.setup()
    assert here.options == Options(per_rank_batch=True, lr_rule="sqrt")
    assert ddpshim.scale_lr(0.1, world_size=4) == pytest.approx(0.2)
    assert ddpshim.scale_lr(0.1, "linear", world_size=4) == pytest.approx(0.4)
    assert ddpshim.setup(options=here.options) is here
    text = r"setup\(options='all at their defaults'\), .* with options=\"per_rank_batch=True, lr_rule='sqrt'\""
    with pytest.raises(ddpshim.WorldError, match=text):
        ddpshim.setup(options=Options())


def test_without_a_rule_scale_lr_is_linear(alone: None) -> None:
    ddpshim.setup()
    assert ddpshim.scale_lr(0.1, world_size=4) == pytest.approx(0.4)


def test_a_wrong_variable_stops_setup(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPSHIM_TIMEOUT_S", "soon")
    with pytest.raises(OptionsError, match="variable DDPSHIM_TIMEOUT_S: 'soon'"):
        ddpshim.setup()
    assert current().world is None


def test_bf16_computes_in_bf16_and_sees_weights_that_were_stepped_inside(alone: None) -> None:
    here = ddpshim.setup(options=Options(precision="bf16"), device="cpu")
    net = nn.Linear(2, 2, bias=False)
    with here.autocast():
        before = net(torch.ones(1, 2))
        with torch.no_grad():
            net.weight.fill_(1.0)
        after = net(torch.ones(1, 2))
        after.sum().backward()
    assert before.dtype == after.dtype == torch.bfloat16
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.float32
    assert after.tolist() == [[2.0, 2.0]], "a cast of the old weights was kept"


def test_logs_hold_what_a_rank_prints(alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ddpshim.setup(options=Options(logs=str(tmp_path / "logs")))
    print("to stdout")
    print("to stderr", file=sys.stderr)
    ddpshim.cleanup()
    print("later")
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "to stdout\nto stderr\n"
    assert capsys.readouterr().out == "to stdout\nlater\n"


@pytest.mark.launch
def test_logs_hold_the_traceback_that_ends_a_rank(tmp_path: Path) -> None:
    program = (
        "import ddpshim\nddpshim.setup()\ntry:\n    raise ValueError('on purpose')\nfinally:\n    ddpshim.cleanup()"
    )
    environ = {"DDPSHIM_LOGS": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, timeout=patience(300), check=False
    )
    assert ran.returncode == 1
    assert (tmp_path / "rank_0.log").read_text().endswith("ValueError: on purpose\n")


# What ranks do with them

WRAPPING = {
    "DDPSHIM_BUCKET_CAP_MB": "3",
    "DDPSHIM_FIND_UNUSED_PARAMETERS": "no",
    "DDPSHIM_STATIC_GRAPH": "yes",
    "DDPSHIM_GRADIENT_AS_BUCKET_VIEW": "no",
    "DDPSHIM_BROADCAST_BUFFERS": "no",
    "DDPSHIM_GUARD": "0",
    "DDPSHIM_PER_RANK_BATCH": "1",
    "DDPSHIM_ACCUMULATION_STEPS": "2",
    "DDPSHIM_TIMEOUT_S": "50",
}


def _seen_by_a_rank() -> dict[str, Any]:
    """What of the options arrived where they act."""
    net = ddpshim.wrap_parallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with ddpshim.shared_random_streams(0):
        another = nn.Linear(2, 2)
    asked = ddpshim.wrap_parallel(another, find_unused_parameters=True, static_graph=False)
    loader = ddpshim.make_loader(list(range(40)), batch_size=4)
    plain = ddpshim.make_loader(list(range(40)), batch_size=4, per_rank_batch=False)
    parts = list(ddpshim.accumulate(torch.arange(4), net))
    return {
        "bucket": net.bucket_bytes_cap,
        "view": net.gradient_as_bucket_view,
        "strict": (net._strict, asked._strict),
        "static": (net._same_every_time, asked._same_every_time),
        "buffers": 0 if net._buffers_to_send is None else len(net._buffers_to_send.homes),
        "guard": net._equality.is_on,
        "batch": (loader.global_batch_size, plain.global_batch_size),
        "parts": [part.tolist() for part in parts],
    }


@pytest.mark.ranks
def test_what_is_not_given_is_as_the_options_say_and_arguments_win() -> None:
    optioned, default = (run_ranks(_seen_by_a_rank, 2, environ=environ) for environ in (WRAPPING, {}))
    assert optioned[0] == {
        "bucket": 3 * 1024 * 1024,
        "view": False,
        "strict": (True, False),
        "static": (True, False),
        "buffers": 0,
        "guard": False,
        "batch": (8, 4),
        "parts": [[0, 1], [2, 3]],
    }
    assert default[0] == {
        "bucket": 1024 * 1024,
        "view": True,
        "strict": (False, False),
        "static": (False, False),
        "buffers": 3,
        "guard": True,
        "batch": (4, 4),
        "parts": [[0, 1, 2, 3]],
    }


def _differ(name: str) -> str:
    rank = ddpshim.world().rank
    ddpshim.cleanup()
    with pytest.raises(OptionsError) as caught:
        ddpshim.setup(device="cpu", options=Options(**{name: (3, 4)[rank]}))
    return str(caught.value)


@pytest.mark.ranks
def test_options_that_differ_between_ranks_are_refused_on_all() -> None:
    texts = run_ranks(_differ, 2, "accumulation_steps")
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "option accumulation_steps is 3 on rank 0 and 4 on rank 1; ranks would train differently"
    )


def _gradients(steps: int) -> list[float]:
    with ddpshim.shared_random_streams(0):
        net = ddpshim.wrap_parallel(nn.Linear(3, 1))
    x = torch.arange(36.0).reshape(12, 3)[ddpshim.world().rank :: 2]
    for part in ddpshim.accumulate({"x": [x], "name": "x"}, net, steps=steps):
        assert part["name"] == "x"
        (net(part["x"][0]).square().mean() / steps).backward()
    assert net.num_reductions == 1
    return net.weight.grad.flatten().tolist()  # type: ignore[no-any-return]


def _all_gradients() -> list[list[float]]:
    return [_gradients(steps) for steps in (1, 2, 3)]


@pytest.mark.ranks
def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    first, second = run_ranks(_all_gradients, 2)
    assert first == second
    for gradient in first[1:]:
        assert gradient == pytest.approx(first[0], rel=1e-6)


def test_a_batch_that_does_not_split_is_refused() -> None:
    with pytest.raises(DataError, match="a batch of 5 does not split into 2 equal parts"):
        next(ddpshim.accumulate(torch.zeros(5), steps=2))


# The docs


def test_the_page_has_the_table() -> None:
    assert "\n".join(listing.table()) in (ROOT / "docs" / "options.md").read_text(), (
        "paste the output of: python -m ddpshim options"
    )


def test_every_option_is_read_somewhere() -> None:
    code = "".join(p.read_text() for p in (ROOT / "ddpshim").rglob("*.py") if p.name != "options.py")
    unread = {name for name in options.names() if not re.search(rf"(options|given|chosen)\.{name}\b", code)}
    assert unread == set()


@pytest.mark.launch
def test_the_command_prints_the_table_without_torch() -> None:
    code = "import sys; from ddpshim.__main__ import main; main(['options']); print('torch' in sys.modules)"
    environ = {"PYTHONPATH": str(ROOT), "PATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=patience(120), check=True
    )
    *lines, has_torch = ran.stdout.splitlines()
    assert lines == list(listing.table())
    assert has_torch == "False"
    assert len(lines) == len(options.names()) + 2


# The adapter for robomimic


@pytest.fixture
def robomimic_config(alone: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bc config as train.py makes it, from a file with our section."""
    pytest.importorskip("robomimic")
    from robomimic.config import config_factory
    from robomimic.config.base_config import BaseConfig

    import ddpshim.robomimic.calls as adapter

    adapter._keep_the_section()

    def make(section: Any) -> Any:
        config = config_factory("bc")
        with config.values_unlocked():
            config.update({"algo_name": "bc", "train": {"seed": 3, "batch_size": 7}, "ddpshim": section})
        config.lock()
        return config

    yield make
    del BaseConfig.update  # it is Config's own again


def test_robomimics_config_file_may_have_our_section(robomimic_config: Any) -> None:
    import ddpshim.robomimic.calls as adapter

    config = robomimic_config({"record": False, "precision": "bf16"})
    assert "ddpshim" not in config
    assert config.train.batch_size == 7
    with pytest.raises(RuntimeError, match="key 'nonsense' does not exist"), config.values_unlocked():
        config.update({"nonsense": 1})
    adapter.start(config, torch.device("cpu"))
    assert ddpshim.world().options == Options(record=False, precision="bf16")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"recrod": True}, "section ddpshim: no option 'recrod'; did you mean record?"),
        ({"accumulation_steps": 2}, "accumulation_steps=2 for robomimic"),
        ({"precision": "fp16"}, "fp16 needs a loss scaler"),
        ("record", "section ddpshim holds a str"),
    ],
)
def test_robomimic_is_refused_what_it_cannot_do(robomimic_config: Any, section: Any, text: str) -> None:
    import ddpshim.robomimic.calls as adapter

    with pytest.raises(OptionsError, match=re.escape(text)):
        adapter.start(robomimic_config(section), torch.device("cpu"))


def test_learning_rates_of_optimizers_and_their_schedules_are_scaled() -> None:
    import ddpshim.robomimic.calls as adapter

    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    schedules = {
        "one": torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1 / (1 + step)),
        "two": [torch.optim.lr_scheduler.MultiStepLR(optimizers[1], [1], gamma=0.5), None],
    }
    made = {"one": optimizers[0], "two": optimizers[1:]}
    adapter._scale_learning_rates(types.SimpleNamespace(optimizers=made, lr_schedulers=schedules), 4.0)
    assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([0.4, 0.4, 0.4])
    for optimizer in optimizers:
        optimizer.step()
    schedules["one"].step()  # type: ignore[attr-defined]
    schedules["two"][0].step()  # type: ignore[index]
    assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([0.2, 0.2, 0.4])


# The patched trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> dict[str, Run]:
    """bc with options on two ranks, and in one process what should be the same by robomimic's own settings."""
    if source("0.3.0") is None:
        pytest.skip("robomimic 0.3.0 is neither installed nor under DDPSHIM_UPSTREAM (pip install --no-deps)")
    folder = tmp_path_factory.mktemp("options")
    tree = copy_release("0.3.0", releases)
    data = make_data(folder, num_demos=50)
    two = {"per_rank_batch": True, "lr_rule": "sqrt", "metrics_every_n_epochs": 2}
    lr = "algo__optim_params__policy__learning_rate__initial"
    jobs = []
    for name, num_ranks, section, settings in (
        ("two", 2, {**two, "logs": str(folder / "logs")}, {"train__batch_size": 50}),
        ("one", 1, {}, {lr: 1e-4 * math.sqrt(2)}),
        ("two in bf16", 2, {"precision": "bf16"}, {}),
        ("one in bf16", 1, {"precision": "bf16"}, {}),
    ):
        (folder / f"{name} config").mkdir()
        file = make_config(tree, "bc", data, folder / f"{name} config", 10, 2, **settings)
        file.write_text(json.dumps({**json.loads(file.read_text()), "ddpshim": section}))
        jobs.append((file, folder / name, num_ranks))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OBSERVED_CLOCK", "1")  # two clocks that are not read at once agree, whatever else runs here
        made = train_all(tree, jobs)
    assert [run.exit_code for run in made] == [0] * 4, [run.log[-2000:] for run in made]
    return {run.folder.name: run for run in made}


@pytest.mark.launch
@pytest.mark.robomimic
def test_a_batch_for_each_rank_with_a_rule_is_one_process_with_that_rate(runs: dict[str, Run]) -> None:
    one, two = runs["one"], runs["two"]
    assert batches(two) == batches(one)
    for observed in two.observed:
        assert largest_difference(observed["networks"], one.observed[0]["networks"]) < 1e-6
    assert [m["Optimizer/policy0_lr"] for m in two.metrics()] == pytest.approx([1.41421e-4] * 2, rel=1e-5)
    config = json.loads(next(two.folder.glob("out/*/*/config.json")).read_text())
    assert config["algo"]["optim_params"]["policy"]["learning_rate"]["initial"] == 1e-4
    assert "ddpshim" not in config


@pytest.mark.launch
@pytest.mark.robomimic
def test_metrics_are_averaged_as_often_as_the_option_says(runs: dict[str, Run]) -> None:
    one, two = runs["one"].losses(), runs["two"].losses()
    # In the second epoch the mean over both ranks; in the first the main rank's own, over half of the samples.
    assert two[1] == pytest.approx(one[1], rel=1e-5)
    assert two[0] != pytest.approx(one[0], rel=1e-5)
    assert two[0] == pytest.approx(one[0], rel=0.2)


@pytest.mark.launch
@pytest.mark.robomimic
def test_each_rank_has_a_log(runs: dict[str, Run]) -> None:
    logs = [runs["two"].folder.parent / "logs" / f"rank_{rank}.log" for rank in (0, 1)]
    for log in logs:
        assert log.read_text().count("\nTrain Epoch 2\n") == 1


@pytest.mark.launch
@pytest.mark.robomimic
def test_the_recorded_times_of_a_training_add_up_to_upstreams_own(runs: dict[str, Run]) -> None:
    run = runs["two"]
    rows = [load(run.folder / "out").epochs[1].training[rank].record for rank in (0, 1)]
    assert [row["steps"] for row in rows] == [10, 10]
    upstreams = run.metrics()[1]  # a mean over the ranks, in minutes
    seconds = {part: statistics.mean(row["seconds"][part] for row in rows) for part in PARTS}
    assert sum(seconds.values()) == pytest.approx(60 * upstreams["Time_Epoch"], rel=1e-3)
    assert seconds["data_wait"] == pytest.approx(60 * upstreams["Time_Data_Loading"], rel=1e-3)
    assert seconds["data_wait"] == pytest.approx(10 * 50 / 1024, rel=1e-3), "a millisecond for each sample"
    assert seconds["compute"] + seconds["communication"] + seconds["optimizer"] > 30 * upstreams["Time_Train_Batch"]
    assert min(seconds["communication"], seconds["optimizer"], seconds["compute"]) > 0


@pytest.mark.launch
@pytest.mark.robomimic
def test_bf16_on_two_ranks_is_bf16_in_one_process(runs: dict[str, Run]) -> None:
    one, two = runs["one in bf16"], runs["two in bf16"]
    weights = [observed["networks"] for observed in (*one.observed, *two.observed)]
    assert {value.dtype for held in weights for value in held.values()} == {torch.float32}
    assert largest_difference(weights[1], weights[2]) == 0
    moved = largest_difference(weights[0], one.observed[0]["initial"])
    assert largest_difference(weights[0], weights[1]) < moved / 10
    assert two.losses() == pytest.approx(one.losses(), rel=1e-2)
    assert one.losses() != pytest.approx(runs["one"].losses(), rel=1e-4), "it computed in float32"

"""Compares LeRobot's unedited trainer on N ranks with one process without a launcher, with noise.

Run it: python -m evidence.lerobot_equivalence [--policies act,vqbet] [--ranks 2,3] [--only WORDS] [--write PAGE]

It needs an environment with LeRobot (requirements/lerobot.txt). Data, and SmolVLA's backbone with random weights, are
made here: nothing is downloaded. Rows of the page that are not made again stay. Exits with 1 if a row differs: what
differs is bold. Options of VARIANTS that a release lacks, or with which it fails in one process, are left out.
"""

from __future__ import annotations

import filecmp
import functools
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest import mock

from evidence import pages
from evidence.compare import largest_difference, logs_differ, names_differ, shown
from evidence.results import ran

ROOT = Path(__file__).parent.parent
START = (
    "<!-- what follows is written by python -m evidence.lerobot_equivalence --write evidence/other_codebases.md -->\n"
)
END = "<!-- end of LeRobot -->\n"
DEADLINE_S = 300
TRAINER = ("-m", "lerobot.scripts.lerobot_train")
STEPS, LEFT_AT = 12, 5
# By name: a policy, and options of the trainer that change how data are read, judged or computed.
HALF = "automatic mixed precision (bfloat16)"  # numbers in bfloat16 differ by their rounding
VARIANTS = {
    "two workers": ("act", "--num_workers=2"),
    "augmented images": ("act", "--dataset.image_transforms.enable=true"),
    "held-out episodes": ("act", "--dataset.eval_split=0.25 --eval_steps=4"),
    "chosen episodes, few held-out samples": (
        "act",
        "--dataset.episodes=[0,1,3] --dataset.eval_split=0.4 --eval_steps=4 --max_eval_samples=10",
    ),
    "streamed data": ("act", "--dataset.streaming=true --num_workers=1"),
    "gradients of 3 batches": ("act", "--accelerator.gradient_accumulation.steps=3"),
    HALF: ("act", "--policy.use_amp=true"),
    "EMA": ("diffusion", "--ema.enable=true"),
    "weighted samples (RA-BC)": (
        "smolvla",
        "--sample_weighting.type=rabc --sample_weighting.progress_path=progress.parquet --sample_weighting.kappa=0.05",
    ),
    "LoRA": ("smolvla", f"--policy.path=smolvla-plain/checkpoints/{STEPS:06d}/pretrained_model --peft.r=4"),
}
POLICIES = {
    "act": (
        "--policy.pretrained_backbone_weights=null --policy.chunk_size=20 --policy.n_action_steps=20 "
        "--policy.dim_model=16 --policy.n_heads=2 --policy.dim_feedforward=32 --policy.n_encoder_layers=1 "
        "--policy.n_vae_encoder_layers=1"
    ),
    "diffusion": (
        "--policy.pretrained_backbone_weights=null --policy.use_group_norm=true --policy.horizon=8 "
        "--policy.n_action_steps=4 --policy.down_dims=[16,32] --policy.n_groups=4 "
        "--policy.diffusion_step_embed_dim=16 --policy.crop_shape=[28,28] --policy.spatial_softmax_num_keypoints=4"
    ),
    "vqbet": (
        "--policy.pretrained_backbone_weights=null --policy.use_group_norm=true --policy.crop_shape=[28,28] "
        "--policy.n_vqvae_training_steps=6 --policy.vqvae_n_embed=4 --policy.vqvae_embedding_dim=8 "
        "--policy.vqvae_enc_hidden_dim=16 --policy.gpt_n_layer=1 "
        "--policy.gpt_n_head=2 --policy.gpt_hidden_dim=16 --policy.gpt_input_dim=16 "
        "--policy.gpt_output_dim=16 --policy.spatial_softmax_num_keypoints=4 "
        '--policy.input_features={"observation.state":{"type":"STATE","shape":[4]},'
        '"observation.images.front":{"type":"VISUAL","shape":[3,32,32]}}'
    ),
    "smolvla": (
        "--policy.vlm_model_name=backbone --policy.chunk_size=6 --policy.n_action_steps=6 --policy.num_vlm_layers=2 "
        "--policy.resize_imgs_with_padding=[32,32] --policy.tokenizer_max_length=8 --policy.max_state_dim=8 "
        "--policy.max_action_dim=4"
    ),
}


def make_data(folder: Path) -> None:
    """Write four episodes of 13 frames to `folder`/data, with states, small images, and tasks of different lengths.

    `folder`/progress.parquet gets a random progress of each frame, from which RA-BC computes the weights of samples.
    """
    import numpy as np
    import pandas
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    sizes = {"observation.state": 4, "observation.environment_state": 3, "action": 2}
    features: dict[str, Any] = {
        name: {"dtype": "float32", "shape": (size,), "names": None} for name, size in sizes.items()
    }
    image = {"dtype": "image", "shape": (32, 32, 3), "names": ["height", "width", "channels"]}
    features["observation.images.front"] = image
    data = LeRobotDataset.create("local/toy", fps=10, root=folder / "data", features=features, use_videos=False)
    draws = np.random.default_rng(0)
    for episode in range(4):
        for _ in range(13):
            frame = {name: draws.normal(size=size).astype("float32") for name, size in sizes.items()}
            picture = draws.integers(0, 255, size=(32, 32, 3)).astype("uint8")
            task = ("push it", "push it to the left")[episode % 2]
            data.add_frame({**frame, "observation.images.front": picture, "task": task})
        data.save_episode()
    data.finalize()
    frames = {"index": range(4 * 13), "episode_index": [frame // 13 for frame in range(4 * 13)]}
    pandas.DataFrame({**frames, "progress_sparse": draws.random(4 * 13)}).to_parquet(folder / "progress.parquet")


def make_backbone(folder: Path) -> None:
    """Write the config and the processor of a SmolVLM of 30 thousand weights to `folder`/backbone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    special = {
        "fake_image_token": "<fake>",
        "image_token": "<image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end>",
    }
    words = ["<unk>", "<pad>", "<s>", "</s>", *special.values(), "push", "it", "to", "the", "left", "\n"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    marks = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=special, **marks)
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
        chat_template="{{ messages }}",
    )
    processor.save_pretrained(folder / "backbone")
    sees = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    reads = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    reads.update(num_key_value_heads=2, head_dim=8, vocab_size=len(words), pad_token_id=1)
    SmolVLMConfig(
        vision_config={**sees, "image_size": 32, "patch_size": 8},
        text_config={**reads, "model_type": "llama", "attention_bias": False},
        scale_factor=2,
        image_token_id=words.index("<image>"),
        pad_token_id=1,
    ).save_pretrained(folder / "backbone")


class Run(NamedTuple):
    """The results of a training: its folder, its output, and the lines of its log without the times."""

    folder: Path
    said: str
    log: list[str]

    def checkpoint(self, step: int = STEPS) -> Path:
        return self.folder / "checkpoints" / f"{step:06d}"

    def files(self) -> set[str]:
        """Return the names of all files in the last checkpoint."""
        return {str(path.relative_to(self.checkpoint())) for path in self.checkpoint().rglob("*") if path.is_file()}


@functools.cache
def start(folder: Path, name: str, before: tuple[str, ...], *arguments: str) -> Run:
    """Run `python BEFORE ARGUMENTS` in `folder`, once; its files go to `folder`/`name`."""
    said = ran([*before, *arguments, f"--output_dir={name}"], folder, DEADLINE_S, {"HF_HUB_OFFLINE": "1"})
    lines = re.findall(r"(?:step:\d+ smpl|step \d+: eval_loss).*", said)
    return Run(
        folder / name,
        said,
        [re.sub(r" (?:updt_s|data_s|prep_s|step_s|smp/s|mem_gb):\S+", "", line) for line in lines],
    )


def settings(policy: str, *more: str) -> list[str]:
    """Return the arguments of a training of 12 steps of 8 samples; a pass over the data has 7 steps, the last of 4."""
    return [
        *("--dataset.repo_id=local/toy", "--dataset.root=data", "--num_workers=0", "--batch_size=8"),
        *("--log_freq=1", "--seed=5", f"--steps={STEPS}", f"--save_freq={LEFT_AT}"),
        *("--policy.device=cpu", "--policy.push_to_hub=false"),
        *([] if any("--policy.path" in option for option in more) else [f"--policy.type={policy}"]),
        *(*POLICIES[policy].split(), *more),
    ]


def under_run(num_ranks: int) -> tuple[str, ...]:
    """Return the arguments before the trainer's, to start it on `num_ranks` ranks."""
    return ("-m", "ddpshim", "run", f"--nproc={num_ranks}", "--log-dir=logs", *TRAINER)


def read(checkpoint: Path, file: str, without_key_biases: bool = False) -> dict[str, Any]:
    """Return the tensors of a safetensors file, perhaps without the biases of an attention's keys."""
    import torch
    from safetensors.torch import load_file

    found = load_file(checkpoint / file)
    for name in found if without_key_biases else ():
        if name.endswith("in_proj_bias"):
            queries, _, values = found[name].chunk(3)
            found[name] = torch.cat([queries, values])
    return found


MOMENTS, STREAMS = "training_state/optimizer_state.safetensors", "training_state/rng_state.safetensors"


def weights_differ(one: Path, other: Path, without_key_biases: bool = False) -> float:
    """Return the largest difference of any weight, trained or averaged, in two checkpoints."""
    names = [str(path.relative_to(other)) for path in sorted(other.glob("pretrained_model*/*model.safetensors"))]
    both = ([read(at, name, without_key_biases) for name in names] for at in (one, other))
    return max(map(largest_difference, *both))


def compare(run: Run, plain: Run, rounded: Optional[Run] = None) -> dict[str, str]:
    """Compare `run` with `plain`, the run of one process; `rounded` is another that rounds otherwise."""
    one, other = run.checkpoint(), plain.checkpoint()
    moved, weights = (weights_differ(checkpoint, other) for checkpoint in (plain.checkpoint(LEFT_AT), one))
    log = logs_differ(run.log, plain.log)
    # The gradient of a key's bias is zero but for rounding, of which Adam makes steps.
    judged = weights_differ(one, other, without_key_biases=True) if rounded is None else weights
    most = 0.1 * moved if rounded is None else 3 * weights_differ(rounded.checkpoint(), other)
    return {
        "moved by training": f"{moved:.0e}",
        "weights": shown(weights, weights if judged <= most else 0.0),
        "optimizer": f"{largest_difference(read(one, MOMENTS), read(other, MOMENTS)):.0e}",
        "log": log if rounded is None or "differs" in log else log.strip("*"),
        "random streams": "same" if filecmp.cmp(one / STREAMS, other / STREAMS, shallow=False) else "**differ**",
        "files": names_differ(run.files(), plain.files()),
    }


def resume(run: Run, name: str, before: tuple[str, ...]) -> Run:
    """Resume, in the way of the arguments `before`, from the checkpoint that `run` wrote in the middle of a pass."""
    copy = run.folder.parent / name
    shutil.copytree(run.folder, copy, symlinks=True)
    config = copy / "checkpoints" / f"{LEFT_AT:06d}" / "pretrained_model" / "train_config.json"
    return start(run.folder.parent, name, before, f"--config_path={config}", "--resume=true")


def rows(policy: str, folder: Path, ranks: list[int], only: str) -> Iterator[list[str]]:
    """Train `policy` in all ways that have `only` in their name, and yield the rows of its table."""
    from lerobot.configs.train import TrainPipelineConfig

    def one() -> Run:
        return start(folder, f"{policy}-plain", TRAINER, *settings(policy))

    def on(n: int) -> Run:
        return start(folder, f"{policy}-{n}", under_run(n), *settings(policy))

    for n in ranks:
        if only in (what := f"{n} ranks"):
            yield [policy, what, *compare(on(n), one()).values()]
    if only in (what := f"{ranks[0]} ranks to step {LEFT_AT}, resumed on {ranks[-1]}; one process resumed"):
        resumed = resume(on(ranks[0]), f"{policy}-resumed-{ranks[-1]}", under_run(ranks[-1]))
        yield [policy, what, *compare(resumed, resume(one(), f"{policy}-resumed", TRAINER)).values()]
    for name, (of, options) in VARIANTS.items():
        field, what = options.lstrip("-").partition(".")[0].partition("=")[0], f"{ranks[-1]} ranks, {name}"
        if of != policy or only not in what or field not in TrainPipelineConfig.__dataclass_fields__:
            continue
        if "--policy.path" in options:
            one()
        given, rounded, short = settings(policy, *options.split()), None, re.sub(r"\W+", "-", name)
        try:
            alone = start(folder, short, TRAINER, *given)
        except RuntimeError as error:
            yield [policy, what, f"fails in one process: {str(error).splitlines()[-1]}", *[""] * 5]
            continue
        run = start(folder, f"{short}-{ranks[-1]}", under_run(ranks[-1]), *given)
        if name == HALF or "*" in compare(run, alone)["weights"]:  # is it more than what rounding makes?
            with mock.patch.dict(os.environ, ATEN_CPU_CAPABILITY="default"):
                rounded = start(folder, f"{short}-rounded", TRAINER, *given)
            same = f"one process with other CPU instructions, {name}"
            yield [policy, same, *compare(rounded, alone, rounded).values()]
        yield [policy, what, *compare(run, alone, rounded).values()]
    if policy == "act" and only in (what := f"{ranks[0]} ranks, torchrun"):
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks[0]}")
        run = start(folder, "act-line", (*torchrun, "-m", "ddpshim.launch.rank", *TRAINER), *settings(policy))
        run = run._replace(log=[*dict.fromkeys(run.log)])  # all ranks print
        yield [policy, what, *compare(run, one()).values()]


def with_kept(lines: list[str], page: Path) -> list[str]:
    """Return the lines of a table with the other rows of the page's, by release and policy."""
    old = page.read_text().partition(START)[2].partition(END)[0]
    found = {}
    for line in [*(line for line in old.splitlines() if line.startswith("| "))][1:] + lines[2:]:
        release, policy, run, *_ = line.strip("| ").split(" | ")
        found[release, list(POLICIES).index(policy), run] = line
    return [*lines[:2], *(found[key] for key in sorted(found, key=lambda key: key[:2]))]


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--only", default="", metavar="WORDS", help="only rows with these words in their name")
    parser.add_argument("--commit", default="", help="of LeRobot's repository, if this is no release")
    args = parser.parse_args()
    if importlib.util.find_spec("lerobot") is None:
        parser.exit(1, "LeRobot is not installed; requirements/lerobot.txt says how to get it\n")
    import torch
    from lerobot import __version__

    version = f"{__version__} at {args.commit}" if args.commit else __version__
    release = f"{version}, torch {torch.__version__.partition('+')[0]}"
    columns = ["LeRobot", "policy", "run", "moved by training", "weights", "optimizer", "log"]
    columns += ["random streams", "files"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder)
        make_backbone(folder)
        ranks = [int(n) for n in args.ranks.split(",")]
        all_rows = (row for policy in args.policies.split(",") for row in rows(policy, folder, ranks, args.only))
        lines = pages.table(columns, ([release, *row] for row in all_rows))
    if len(lines) == 2:
        parser.exit(1, f"no row has {args.only!r} in its name\n")
    if args.write:
        lines = with_kept(lines, args.write)
    made = f"{STEPS} steps of 8 samples, gloo on CPU."
    pages.finish([*lines, "", made], args.write, START, END)


if __name__ == "__main__":
    main()

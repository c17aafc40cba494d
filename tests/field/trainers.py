"""The trainers: each one's source, tiny data and command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.field import data

DIFFUSION_POLICY = ("real-stanford/diffusion_policy", "5ba07ac6661db573af695b419a7947ecb704690f")
DP3 = ("YanjieZe/3D-Diffusion-Policy", "47385d9d6f5bde3f2ebdf2400ecb8261cc9e6b97")
ACT = ("tonyzhaozh/act", "742c753c0d4a5d87076c8f69e5628c79a8cc5488")
VISUALNAV = ("robodhruv/visualnav-transformer", "dca79815b704e5aa9c6bdc3082351f9e3b2848c2")
UMI = ("real-stanford/universal_manipulation_interface", "d095ba9590df789df5189eea5ee7e431689038a6")
LIBERO = ("Lifelong-Robot-Learning/LIBERO", "8f1084e3132a39270c3a13ebe37270a43ece2a01")
EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
WANDB_STUB = str(Path(__file__).parent / "wandb_stub")


@dataclass(frozen=True)
class Trainer:
    """One public trainer at one commit."""

    name: str
    source: tuple[str, str]  # owner/name on GitHub, commit
    command: list[str]  # the arguments after `python`, or after `python -m ddpshim run --nproc 2`
    make_data: Callable[[Path], None]  # writes data into the folder of the trainer's sources
    folder: str = "."  # the working directory, in those sources
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages beyond torch
    stubs: tuple[str, ...] = ()  # parts that have a stand-in; the page lists them
    losses: str = ""  # a pattern of the printed lines whose numbers are compared; else files of JSON lines
    path: tuple[str, ...] = ()  # folders for PYTHONPATH: of these sources, or others beside them

    @property
    def upstream(self) -> str:
        return self.source[0].replace("/", "+")


def workspace(name: str, config: str, *overrides: str, **more: object) -> Trainer:
    """Return a workspace of diffusion_policy: small, on the CPU, without a simulator, with its version of robomimic."""
    command = [
        "train.py",
        f"--config-name={config}",
        "training.device=cpu",
        "training.num_epochs=3",
        "training.rollout_every=1",
        "training.checkpoint_every=1",
        "++training.sample_every=1",
        "dataloader.batch_size=16",
        "val_dataloader.batch_size=16",
        "task.dataset.val_ratio=0.3",
        "logging.mode=disabled",
        "checkpoint.topk.k=2",
        *overrides,
    ]
    arguments: dict[str, object] = {
        "source": DIFFUSION_POLICY,
        "make_data": data.pusht,
        "path": ("robomimic-0.2.0",),
        "needs": ("hydra", "zarr", "numba", "diffusers", "einops", "dill", "pandas", "wandb"),
        "stubs": ("simulator",),
        **more,
    }
    return Trainer(name, command=command, **arguments)  # type: ignore[arg-type]


def runner(kind: str, **shapes: list[int]) -> list[str]:
    """Return the overrides that replace the simulator by tests/field/stubs/field_runner.py."""
    shown = ",".join(f"{name}:{shape}" for name, shape in shapes.items()).replace(" ", "")
    return [f"task.env_runner._target_=field_runner.{kind}", f"+task.env_runner.shapes={{{shown}}}"]


PUSHT = ["task=pusht_lowdim", *runner("lowdim", obs=[20])]
BLOCKPUSH = ["task=blockpush_lowdim_seed", *runner("lowdim", obs=[16])]
PUSHT_IMAGE = ["task=pusht_image", *runner("image", image=[3, 96, 96], agent_pos=[2])]
SMALL_UNET = ["policy.down_dims=[16,32]", "policy.n_groups=4", "policy.diffusion_step_embed_dim=16"]
WARM = ["training.lr_warmup_steps=2"]


def visualnav(name: str) -> Trainer:
    """Return the trainer of ViNT, GNM or NoMaD, with tests/field/configs/NAME.yaml."""
    return Trainer(
        name,
        VISUALNAV,
        ["train.py", "--config", str(Path(__file__).parent / "configs" / f"{name}.yaml")],
        data.trajectories,
        folder="train",
        environment={"MPLBACKEND": "Agg"},
        needs=("efficientnet_pytorch", "warmup_scheduler", "lmdb", "prettytable", "vit_pytorch", "cv2"),
        stubs=("wandb",),
        path=("train", "real-stanford+diffusion_policy", WANDB_STUB),
    )


TRAINERS = [
    workspace(
        "unet_lowdim",
        "train_diffusion_unet_lowdim_workspace",
        *PUSHT,
        *WARM,
        "policy.model.down_dims=[16,32]",
        "policy.model.n_groups=4",
        "policy.model.diffusion_step_embed_dim=16",
        "policy.num_inference_steps=3",
    ),
    workspace(
        "transformer_lowdim",
        "train_diffusion_transformer_lowdim_workspace",
        *BLOCKPUSH,
        *WARM,
        "policy.model.n_layer=2",
        "policy.model.n_emb=32",
        "policy.num_inference_steps=3",
        make_data=data.blockpush,
    ),
    workspace(
        "bet_lowdim",
        "train_bet_lowdim_workspace",
        *BLOCKPUSH,
        "policy.action_ae.num_bins=6",
        "policy.state_prior.n_layer=2",
        "policy.state_prior.n_embd=32",
        make_data=data.blockpush,
    ),
    workspace(
        "ibc_lowdim",
        "train_ibc_dfo_lowdim_workspace",
        *PUSHT,
        *WARM,
        "policy.train_n_neg=32",
        "policy.pred_n_samples=32",
    ),
    workspace(
        "robomimic_lowdim",
        "train_robomimic_lowdim_workspace",
        *PUSHT,
    ),
    workspace(
        "unet_image",
        "train_diffusion_unet_image_workspace",
        *PUSHT_IMAGE,
        *WARM,
        *SMALL_UNET,
        "policy.num_inference_steps=3",
        "policy.obs_encoder.crop_shape=[84,84]",
        "training.num_epochs=2",
    ),
    workspace(
        "unet_hybrid",
        "train_diffusion_unet_hybrid_workspace",
        *PUSHT_IMAGE,
        *WARM,
        *SMALL_UNET,
        "policy.num_inference_steps=3",
        "policy.crop_shape=[84,84]",
        "training.num_epochs=2",
    ),
    workspace(
        "transformer_hybrid",
        "train_diffusion_transformer_hybrid_workspace",
        *PUSHT_IMAGE,
        *WARM,
        "policy.n_layer=2",
        "policy.n_emb=32",
        "policy.num_inference_steps=3",
        "policy.crop_shape=[84,84]",
        "training.num_epochs=2",
    ),
    workspace(
        "ibc_hybrid",
        "train_ibc_dfo_hybrid_workspace",
        *PUSHT_IMAGE,
        *WARM,
        "policy.train_n_neg=16",
        "policy.pred_n_samples=16",
        "training.num_epochs=2",
    ),
    workspace(
        "robomimic_image",
        "train_robomimic_image_workspace",
        *PUSHT_IMAGE,
        "policy.crop_shape=[84,84]",
        "training.num_epochs=2",
    ),
    Trainer(
        "dp3",
        DP3,
        [
            "train.py",
            "--config-name=simple_dp3.yaml",
            "task=adroit_pen",
            *runner("points", point_cloud=[512, 3], agent_pos=[24]),
            "training.device=cpu",
            "training.num_epochs=3",
            "training.rollout_every=1",
            "training.checkpoint_every=1",
            "training.sample_every=1",
            "training.lr_warmup_steps=2",
            "dataloader.batch_size=16",
            "dataloader.num_workers=1",
            "val_dataloader.num_workers=1",
            "policy.down_dims=[16,32]",
            "policy.n_groups=4",
            "policy.diffusion_step_embed_dim=16",
            "policy.num_inference_steps=3",
            "checkpoint.save_ckpt=True",
            "logging.mode=disabled",
        ],
        data.adroit,
        folder="3D-Diffusion-Policy",
        needs=("hydra", "zarr", "numba", "diffusers", "einops", "dill"),
        stubs=("pytorch3d", "simulator", "wandb"),
        path=(WANDB_STUB,),
    ),
    Trainer(
        "act",
        ACT,
        [
            "imitate_episodes.py",
            "--task_name",
            "sim_transfer_cube_scripted",
            "--ckpt_dir",
            "checkpoints",
            "--policy_class",
            "ACT",
            "--kl_weight",
            "10",
            "--chunk_size",
            "6",
            "--hidden_dim",
            "32",
            "--dim_feedforward",
            "32",
            "--batch_size",
            "8",
            "--num_epochs",
            "2",
            "--lr",
            "1e-4",
            "--seed",
            "0",
        ],
        data.aloha,
        environment={"FIELD_CUDA": "cpu", "MPLBACKEND": "Agg", "TORCH_HOME": "{sources}/torch_home"},
        needs=("h5py", "einops", "cv2"),
        stubs=("CUDA", "dm_control", "IPython", "ResNet's weights"),
        losses=r"^(Val loss|Train loss|loss|l1)",
        path=("detr",),
    ),
    Trainer(
        "libero",
        LIBERO,
        [
            "home/lifelong.main",
            "lifelong=multitask",
            "lifelong.eval_in_train=true",
            "device=cpu",
            "seed=0",
            "train.n_epochs=2",
            "train.batch_size=16",
            "train.num_workers=1",
            "eval.eval_every=1",
            "eval.n_eval=2",
            "eval.use_mp=false",
            "eval.max_steps=2",
            "eval.num_workers=1",
            "eval.batch_size=16",
            "data.seq_len=2",
            "policy/data_augmentation@policy.color_aug=identity_aug",
            "policy.embed_size=16",
            "policy.transformer_num_layers=1",
            "policy.transformer_num_heads=2",
            "policy.transformer_head_output_size=16",
            "policy.transformer_mlp_hidden_size=16",
            "policy.transformer_max_seq_len=2",
        ],
        data.libero,
        environment={
            "LIBERO_CONFIG_PATH": "{sources}/home",
            "FIELD_INSTEAD": "libero.libero.envs:field_libero",
            "FIELD_NUMPY": "1.22",
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        },
        needs=("hydra", "h5py", "einops", "easydict", "thop"),
        stubs=("simulator", "transformers"),
        losses=r"^.info. Epoch|All task",
        path=(".", "robomimic-0.2.0", str(Path(__file__).parent / "transformers_stub"), WANDB_STUB),
    ),
    Trainer(
        "umi",
        UMI,
        [
            "train.py",
            "--config-name=train_diffusion_unet_timm_umi_workspace",
            "task.shape_meta.obs.camera0_rgb.shape=[3,64,64]",
            "task.action_horizon=4",
            "task.obs_down_sample_steps=1",
            "task.dataset.val_ratio=0.3",
            "policy.obs_encoder.model_name=resnet18",
            "policy.obs_encoder.pretrained=False",
            "policy.num_inference_steps=2",
            *SMALL_UNET,
            *WARM,
            "training.num_epochs=2",
            "training.rollout_every=1",
            "training.checkpoint_every=1",
            "training.sample_every=1",
            "dataloader.batch_size=8",
            "dataloader.num_workers=1",
            "val_dataloader.batch_size=8",
            "val_dataloader.num_workers=1",
            "checkpoint.topk.k=2",
            "logging.mode=disabled",
            "hydra.run.dir=data/outputs/run",
        ],
        data.umi,
        environment={"ACCELERATE_USE_CPU": "true"},
        needs=("hydra", "zarr", "numba", "diffusers", "einops", "dill", "wandb", "accelerate", "timm", "imagecodecs"),
    ),
    visualnav("gnm"),
    visualnav("vint"),
    visualnav("nomad"),
    Trainer(
        "dcgan",
        EXAMPLES,
        [
            *("main.py", "--dataset", "fake", "--batchSize", "64", "--imageSize", "64", "--ngf", "4", "--ndf", "4"),
            *("--niter", "1", "--manualSeed", "1", "--outf", "out"),
        ],
        lambda root: None,
        folder="dcgan",
        losses=r"Loss_D",
    ),
    Trainer(
        "vae",
        EXAMPLES,
        ["main.py", "--batch-size", "16", "--epochs", "2", "--log-interval", "4"],
        data.mnist_and_results,
        folder="vae",
        losses=r"Epoch|Test set",
    ),
    Trainer(
        "mnist",
        EXAMPLES,
        ["main.py", "--batch-size", "16", "--epochs", "2", "--log-interval", "4", "--save-model"],
        data.mnist,
        folder="mnist",
        losses=r"Epoch|Test set",
    ),
]

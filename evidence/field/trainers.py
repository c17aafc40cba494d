"""The trainers: each one's source, tiny data and command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.field import data

DIFFUSION_POLICY = ("real-stanford/diffusion_policy", "5ba07ac6661db573af695b419a7947ecb704690f")
DP3 = ("YanjieZe/3D-Diffusion-Policy", "47385d9d6f5bde3f2ebdf2400ecb8261cc9e6b97")
ACT = ("tonyzhaozh/act", "742c753c0d4a5d87076c8f69e5628c79a8cc5488")
VISUALNAV = ("robodhruv/visualnav-transformer", "dca79815b704e5aa9c6bdc3082351f9e3b2848c2")
UMI = ("real-stanford/universal_manipulation_interface", "d095ba9590df789df5189eea5ee7e431689038a6")
LIBERO = ("Lifelong-Robot-Learning/LIBERO", "8f1084e3132a39270c3a13ebe37270a43ece2a01")
EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
MINGPT = ("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26")
MAKEMORE = ("karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4")
NANOGPT = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")
DECISION_TRANSFORMER = ("kzl/decision-transformer", "e2d82e68f330c00f763507b3b01d774740bee53f")
CORL = ("tinkoff-ai/CORL", "6afec90484bbf47dee05fdf525e26a3ebe028e9b")
CLEANRL = ("vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb")
DIFFUSER = ("jannerm/diffuser", "7ea422860cc0106e5ca5949d980f04b799d5462c")
VQ_BET = ("jayLEE0301/vq_bet_official", "09d4851288ca5deaaa1ab367a208e520f8ee9a84")
MINIBET = ("notmahi/miniBET", "641df6191228764f5e57e009a394d1d6c9eef28f")
ACT_PLUS_PLUS = ("MarkFzp/act-plus-plus", "26bab0789d05b7496bacef04f5c6b2541a4403b5")
DPPO = ("irom-princeton/dppo", "cc7234ad7ff39a8f32de3af903606723a16f0648")
D3IL = ("ALRhub/d3il", "0046bec6cd800ebf9f3a02003007be8bfad59357")
WANDB_STUB, GYM_STUB = (str(Path(__file__).parent / name) for name in ("wandb_stub", "gym_stub"))


@dataclass(frozen=True)
class Trainer:
    """One public trainer at one commit."""

    name: str
    source: tuple[str, str]  # owner/name on GitHub, commit
    typed: str  # the arguments after `python`, or after `python -m ddpshim run --nproc 2`
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


def workspace(name: str, kind: str, overrides: str, **more: object) -> Trainer:
    """Return a workspace of diffusion_policy: small, on the CPU, without a simulator, with its version of robomimic."""
    command = (
        f"train.py --config-name=train_{kind}_workspace training.device=cpu training.num_epochs=3 "
        "training.rollout_every=1 training.checkpoint_every=1 ++training.sample_every=1 dataloader.batch_size=16 "
        "val_dataloader.batch_size=16 task.dataset.val_ratio=0.3 logging.mode=disabled checkpoint.topk.k=2 "
    )
    arguments: dict[str, object] = {
        "source": DIFFUSION_POLICY,
        "make_data": data.pusht,
        "path": ("robomimic-0.2.0",),
        "needs": ("hydra", "zarr", "numba", "diffusers", "einops", "dill", "pandas", "wandb"),
        "stubs": ("simulator",),
        **more,
    }
    return Trainer(name, typed=command + overrides, **arguments)  # type: ignore[arg-type]


def runner(kind: str, **shapes: list[int]) -> str:
    """Return the overrides that replace the simulator by evidence/field/stubs/field_runner.py."""
    shown = ",".join(f"{name}:{shape}" for name, shape in shapes.items()).replace(" ", "")
    return f"task.env_runner._target_=field_runner.{kind} +task.env_runner.shapes={{{shown}}} "


PUSHT = f"task=pusht_lowdim {runner('lowdim', obs=[20])}"
BLOCKPUSH = f"task=blockpush_lowdim_seed {runner('lowdim', obs=[16])}"
PUSHT_IMAGE = f"task=pusht_image {runner('image', image=[3, 96, 96], agent_pos=[2])}training.num_epochs=2 "
POINTS = runner("points", point_cloud=[512, 3], agent_pos=[24])
SMALL_UNET = "policy.down_dims=[16,32] policy.n_groups=4 policy.diffusion_step_embed_dim=16 "
WARM = "training.lr_warmup_steps=2 "


def example(
    folder: str, options: str, make_data: Callable[[Path], None], losses: str = r"Epoch|Test set", **more: Any
) -> Trainer:
    """Return one of pytorch/examples."""
    name, script = more.pop("name", folder), more.pop("script", "main.py")
    return Trainer(name, EXAMPLES, f"{script} {options}", make_data, folder=folder, losses=losses, **more)


def visualnav(name: str) -> Trainer:
    """Return the trainer of ViNT, GNM or NoMaD, with evidence/field/configs/NAME.yaml."""
    return Trainer(
        name,
        VISUALNAV,
        f"train.py --config {Path(__file__).parent / 'configs' / name}.yaml",
        data.trajectories,
        folder="train",
        environment={"MPLBACKEND": "Agg"},
        needs=("efficientnet_pytorch", "warmup_scheduler", "lmdb", "prettytable", "vit_pytorch", "cv2"),
        stubs=("wandb",),
        path=("train", "real-stanford+diffusion_policy", WANDB_STUB),
    )


def corl(name: str) -> Trainer:
    """Return one of CORL's offline algorithms."""
    return Trainer(
        f"corl_{name}",
        CORL,
        f"algorithms/offline/{name}.py --device cpu --seed 0 --buffer_size 200 --batch_size 64 --max_timesteps 20 "
        "--eval_freq 10 --n_episodes 2 --checkpoints_path checkpoints",
        data.nothing,
        needs=("pyrallis",),
        stubs=("gym", "wandb"),
        path=(WANDB_STUB, GYM_STUB),
    )


def cleanrl(name: str, options: str) -> Trainer:
    """Return one of cleanrl's algorithms, with the simulator that it uses."""
    return Trainer(
        f"cleanrl_{name.split('_')[0]}",
        CLEANRL,
        f"cleanrl/{name}.py --seed 1 {options}",
        data.nothing,
        environment={"FIELD_INSTEAD": "torch.utils.tensorboard:field_tensorboard"},
        needs=("gymnasium", "tyro"),
        stubs=("tensorboard",),
        path=(".",),
    )


def d3il(agent: str, options: str = "") -> Trainer:
    """Return one of d3il's agents."""
    return Trainer(
        f"d3il_{agent}",
        D3IL,
        f"run.py agents={agent}_agent agent_name={agent} data_directory=walks device=cpu epoch=2 train_batch_size=16 "
        f"val_batch_size=16 num_workers=1 hidden_dim=32 num_hidden_layers=2 n_layer=2 n_embd=24 {options}",
        data.avoiding,
        environment={
            "FIELD_INSTEAD": "simulation.avoiding_sim:field_d3il",
            "FIELD_EMPTY": "sklearn,sklearn.neighbors",
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        },
        needs=("hydra", "einops", "cv2"),
        stubs=("simulator", "wandb"),
        path=(WANDB_STUB, "."),
    )


TRAINERS = [
    workspace(
        "unet_lowdim",
        "diffusion_unet_lowdim",
        f"{PUSHT}{WARM}policy.model.down_dims=[16,32] policy.model.n_groups=4 "
        "policy.model.diffusion_step_embed_dim=16 policy.num_inference_steps=3",
    ),
    workspace(
        "transformer_lowdim",
        "diffusion_transformer_lowdim",
        f"{BLOCKPUSH}{WARM}policy.model.n_layer=2 policy.model.n_emb=32 policy.num_inference_steps=3",
        make_data=data.blockpush,
    ),
    workspace(
        "bet_lowdim",
        "bet_lowdim",
        f"{BLOCKPUSH}policy.action_ae.num_bins=6 policy.state_prior.n_layer=2 policy.state_prior.n_embd=32",
        make_data=data.blockpush,
    ),
    workspace("ibc_lowdim", "ibc_dfo_lowdim", f"{PUSHT}{WARM}policy.train_n_neg=32 policy.pred_n_samples=32"),
    workspace("robomimic_lowdim", "robomimic_lowdim", PUSHT),
    workspace(
        "unet_image",
        "diffusion_unet_image",
        f"{PUSHT_IMAGE}{WARM}{SMALL_UNET}policy.num_inference_steps=3 policy.obs_encoder.crop_shape=[84,84]",
    ),
    workspace(
        "unet_hybrid",
        "diffusion_unet_hybrid",
        f"{PUSHT_IMAGE}{WARM}{SMALL_UNET}policy.num_inference_steps=3 policy.crop_shape=[84,84]",
    ),
    workspace(
        "transformer_hybrid",
        "diffusion_transformer_hybrid",
        f"{PUSHT_IMAGE}{WARM}policy.n_layer=2 policy.n_emb=32 policy.num_inference_steps=3 policy.crop_shape=[84,84]",
    ),
    workspace("ibc_hybrid", "ibc_dfo_hybrid", f"{PUSHT_IMAGE}{WARM}policy.train_n_neg=16 policy.pred_n_samples=16"),
    workspace("robomimic_image", "robomimic_image", f"{PUSHT_IMAGE}policy.crop_shape=[84,84]"),
    Trainer(
        "dp3",
        DP3,
        f"train.py --config-name=simple_dp3.yaml task=adroit_pen {POINTS}{WARM}{SMALL_UNET}training.device=cpu "
        "training.num_epochs=3 training.rollout_every=1 training.checkpoint_every=1 training.sample_every=1 "
        "dataloader.batch_size=16 dataloader.num_workers=1 val_dataloader.num_workers=1 "
        "policy.num_inference_steps=3 checkpoint.save_ckpt=True logging.mode=disabled",
        data.adroit,
        folder="3D-Diffusion-Policy",
        needs=("hydra", "zarr", "numba", "diffusers", "einops", "dill"),
        stubs=("pytorch3d", "simulator", "wandb"),
        path=(WANDB_STUB,),
    ),
    Trainer(
        "act",
        ACT,
        "imitate_episodes.py --task_name sim_transfer_cube_scripted --ckpt_dir checkpoints --policy_class ACT "
        "--kl_weight 10 --chunk_size 6 --hidden_dim 32 --dim_feedforward 32 --batch_size 8 --num_epochs 2 --lr 1e-4 "
        "--seed 0",
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
        "home/lifelong.main lifelong=multitask lifelong.eval_in_train=true device=cpu seed=0 train.n_epochs=2 "
        "train.batch_size=16 train.num_workers=1 eval.eval_every=1 eval.n_eval=2 eval.use_mp=false eval.max_steps=2 "
        "eval.num_workers=1 eval.batch_size=16 data.seq_len=2 policy/data_augmentation@policy.color_aug=identity_aug "
        "policy.embed_size=16 policy.transformer_num_layers=1 policy.transformer_num_heads=2 "
        "policy.transformer_head_output_size=16 policy.transformer_mlp_hidden_size=16 "
        "policy.transformer_max_seq_len=2",
        data.libero,
        environment={
            "LIBERO_CONFIG_PATH": "{sources}/home",
            "FIELD_INSTEAD": "libero.libero.envs:field_libero",
            "FIELD_OLDER": "1",
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
        f"train.py --config-name=train_diffusion_unet_timm_umi_workspace {SMALL_UNET}{WARM}"
        "task.shape_meta.obs.camera0_rgb.shape=[3,64,64] task.action_horizon=4 task.obs_down_sample_steps=1 "
        "task.dataset.val_ratio=0.3 policy.obs_encoder.model_name=resnet18 policy.obs_encoder.pretrained=False "
        "policy.num_inference_steps=2 training.num_epochs=2 training.rollout_every=1 training.checkpoint_every=1 "
        "training.sample_every=1 dataloader.batch_size=8 dataloader.num_workers=1 val_dataloader.batch_size=8 "
        "val_dataloader.num_workers=1 checkpoint.topk.k=2 logging.mode=disabled hydra.run.dir=data/outputs/run",
        data.umi,
        environment={"ACCELERATE_USE_CPU": "true"},
        needs=("hydra", "zarr", "numba", "diffusers", "einops", "dill", "wandb", "accelerate", "timm", "imagecodecs"),
    ),
    visualnav("gnm"),
    visualnav("vint"),
    visualnav("nomad"),
    example(
        "dcgan",
        "--dataset fake --batchSize 64 --imageSize 64 --ngf 4 --ndf 4 --niter 1 --manualSeed 1 --outf out",
        data.nothing,
        r"Loss_D",
    ),
    example("vae", "--batch-size 16 --epochs 2 --log-interval 4", data.mnist_and_results),
    example("mnist", "--batch-size 16 --epochs 2 --log-interval 4 --save-model", data.mnist),
    example("mnist_rnn", "--batch-size 16 --epochs 2 --log-interval 4 --save-model", data.mnist),
    example(
        "mnist_forward_forward",
        "--epochs 6 --train_size 100 --save_model",
        data.mnist_of_its_own,
        r"Loss|error",
        environment={"FIELD_SEED": "torchvision"},
        stubs=("seed",),
    ),
    example("imagenet", "--batch-size 8 --epochs 2 --workers 1 --print-freq 1 --seed 1", data.pictures, r"Acc@1"),
    example(
        "super_resolution", "--upscale_factor 2 --batchSize 4 --threads 1", data.pictures, path=("super_resolution",)
    ),
    *(
        example(
            "word_language_model",
            f"--data ../words --model {kind} --emsize 16 --nhid 16 --batch_size 6 --bptt 9 --epochs 1 --log-interval 4 "
            "--use-optimizer --lr 0.01",
            data.text,
            r"loss",
            name=f"word_{kind.lower()}",
            path=("word_language_model",),
        )
        for kind in ("LSTM", "Transformer")
    ),
    example(
        "time_sequence_prediction",
        "--steps 2",
        data.waves,
        r"loss",
        script="train.py",
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
    *(
        Trainer(
            name,
            MINGPT,
            f"projects/{name}/{name}.py --trainer.max_iters=20 --trainer.batch_size=12 --trainer.num_workers=1 "
            f"{options}",
            make_data,
            losses=r"train loss",
            path=(".",),
        )
        for name, make_data, options in (
            ("adder", data.nothing, ""),
            ("chargpt", data.input_text, "--data.block_size=16 --model.model_type=gpt-nano"),
        )
    ),
    Trainer(
        "makemore",
        MAKEMORE,
        "makemore.py --max-steps 21 --batch-size 12 --num-workers 1 --n-layer 2 --n-embd 32",
        data.nothing,
        environment={"FIELD_INSTEAD": "torch.utils.tensorboard:field_tensorboard"},
        stubs=("tensorboard",),
        losses=r"^step",
    ),
    Trainer(
        "nanogpt",
        NANOGPT,
        "train.py --dataset=tiny --device=cpu --dtype=float32 --compile=False --wandb_log=True --n_layer=2 "
        "--n_head=2 --n_embd=32 --block_size=16 --batch_size=12 --dropout=0.1 "
        "--gradient_accumulation_steps=2 --max_iters=12 --warmup_iters=2 --lr_decay_iters=12 "
        "--eval_interval=3 --eval_iters=3 --log_interval=100",
        data.tokens,
        stubs=("wandb",),
        path=(WANDB_STUB,),
    ),
    Trainer(
        "dt_gym",
        DECISION_TRANSFORMER,
        "experiment.py --device cpu --K 6 --batch_size 16 --embed_dim 32 --warmup_steps 4 "
        "--num_eval_episodes 1 --max_iters 2 --num_steps_per_iter 8 --log_to_wandb True",
        data.hopper,
        folder="gym",
        environment={"FIELD_SEED": "wandb"},
        stubs=("gym", "wandb", "seed"),
        path=(WANDB_STUB, GYM_STUB, "transformers-4.5.1"),
    ),
    corl("td3_bc"),
    corl("iql"),
    corl("cql"),
    cleanrl("ppo", "--total-timesteps 256 --num-envs 4 --num-steps 32 --num-minibatches 2"),
    cleanrl(
        "sac_continuous_action",
        "--env-id Pendulum-v1 --total-timesteps 220 --learning-starts 190 --batch-size 64",
    ),
    Trainer(
        "diffuser",
        DIFFUSER,
        "scripts/train.py --dataset hopper-medium-expert-v2 --device cpu --seed 1 --horizon 8 "
        "--n_diffusion_steps 4 --max_path_length 12 --batch_size 8 --n_train_steps 8 --n_steps_per_epoch 8 "
        "--n_saves 4 --save_freq 2 --sample_freq 4",
        data.nothing,
        environment={
            "FIELD_CUDA": "cpu",
            "FIELD_OLDER": "1",
            "FIELD_INSTEAD": "diffuser.utils.rendering:field_diffuser",
            "FIELD_EMPTY": "skvideo,skvideo.io",
        },
        needs=("tap", "git", "einops"),
        stubs=("CUDA", "gym", "renderer"),
        losses=r"^\d+: ",
        path=(".", GYM_STUB),
    ),
    Trainer(
        "vq_bet_vqvae",
        VQ_BET,
        "pretrain_vqvae.py --config-name=pretrain_kitchen env_vars.dataset_path=.. device=cpu "
        "env_vars.datasets.relay_kitchen=../kitchen env_vars.save_path=. action_window_size=3 "
        "window_size=5 goal_window_size=5 batch_size=16 epochs=2 vqvae_model.n_latent_dims=32 "
        "vqvae_model.vqvae_n_embed=8",
        data.kitchen,
        folder="examples",
        environment={"FIELD_CUDA": "cpu", "FIELD_OLDER": "1", "FIELD_SEED": "wandb"},
        needs=("hydra", "zarr", "h5py", "einops"),
        stubs=("CUDA", "wandb", "seed"),
        path=(".", WANDB_STUB),
    ),
    Trainer(
        "minibet",
        MINIBET,
        "train.py env_vars.datasets.relay_kitchen=../kitchen device=cpu window_size=5 epochs=3 "
        "batch_size=16 eval_freq=1 eval_on_env_freq=1 num_env_evals=1 num_final_evals=1 "
        "num_final_eval_per_goal=1 save_every=1 model.n_clusters=6 model.kmeans_fit_steps=3 "
        "model.gpt_model.config.n_layer=2 model.gpt_model.config.n_embd=24",
        data.kitchen,
        folder="examples",
        environment={"FIELD_OLDER": "1", "FIELD_INSTEAD": "kitchen_env:field_kitchen"},
        needs=("hydra", "einops"),
        stubs=("simulator", "gym", "wandb"),
        path=(".", WANDB_STUB, GYM_STUB),
    ),
    Trainer(
        "act_plus_plus",
        ACT_PLUS_PLUS,
        "imitate_episodes.py --task_name sim_transfer_cube_human --ckpt_dir checkpoints --policy_class ACT "
        "--no_encoder --kl_weight 10 --chunk_size 6 --hidden_dim 32 --dim_feedforward 32 --batch_size 4 "
        "--num_steps 4 --validate_every 4 --save_every 2 --lr 1e-4 --seed 0",
        data.aloha_human,
        environment={
            "FIELD_CUDA": "cpu",
            "FIELD_INSTEAD": "constants:field_aloha",
            "FIELD_EMPTY": "robomimic,robomimic.models,robomimic.models.base_nets,robomimic.algo,"
            "robomimic.algo.diffusion_policy",
            "MPLBACKEND": "Agg",
            "TORCH_HOME": "{sources}/torch_home",
        },
        needs=("h5py", "einops", "cv2", "diffusers"),
        stubs=("CUDA", "dm_control", "IPython", "ResNet's weights", "wandb"),
        path=("detr", WANDB_STUB),
    ),
    Trainer(
        "dppo",
        DPPO,
        "script/run.py --config-dir=cfg/gym/pretrain/hopper-medium-v2 --config-name=pre_diffusion_mlp "
        "device=cpu denoising_steps=5 train.n_epochs=3 train.batch_size=16 train.save_model_freq=1 "
        "+train.epoch_start_ema=2 +train.update_ema_freq=1 model.network.mlp_dims=[32,32,32]",
        data.stitched,
        environment={
            "FIELD_CUDA": "cpu",
            "FIELD_EMPTY": "pretty_errors,gdown",
            "DPPO_DATA_DIR": "data",
            "DPPO_LOG_DIR": "logs",
            "DPPO_WANDB_ENTITY": "none",
        },
        needs=("hydra", "einops"),
        stubs=("CUDA", "wandb"),
        path=(".", WANDB_STUB),
    ),
    d3il("ddpm"),
    d3il("act", "window_size=3"),
    d3il("bet", "window_size=3"),
    d3il("ibc", "agents.sampler.train_iterations=5"),
]

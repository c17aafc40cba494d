"""robomimic's algorithms, heads and kinds of observation, as settings for its own templates."""

from __future__ import annotations

from typing import Any, Optional

LOW_DIM = ["robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object"]
IMAGE_SIZE = 32
SMALL_VAE = {"encoder_layer_dims": [32], "decoder_layer_dims": [32], "prior_layer_dims": [32], "latent_dim": 4}
SMALL_RNN = {"horizon": 5, "hidden_dim": 32}
SMALL_TRANSFORMER = {"enabled": True, "context_length": 5, "embed_dim": 32, "num_layers": 2, "num_heads": 2}
SMALL_ACT = {"hidden_dim": 32, "dim_feedforward": 32, "enc_layers": 1, "dec_layers": 2, "nheads": 2, "latent_dim": 4}
IMAGE_KEY = "agentview_image"


def _under(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {f"{path}.{key}": value for key, value in settings.items()}


def _images(backbone: str, pool: Optional[str], feature_dimension: Optional[int]) -> dict[str, Any]:
    core = {
        "feature_dimension": feature_dimension,
        "flatten": True,
        "backbone_class": backbone,
        "backbone_kwargs": {},
        "pool_class": pool,
        "pool_kwargs": {"num_kp": 8, "learnable_temperature": False, "temperature": 1.0, "noise_std": 0.0},
    }
    crop = {"crop_height": IMAGE_SIZE - 4, "crop_width": IMAGE_SIZE - 4, "num_crops": 1, "pos_enc": False}
    return {
        "observation.modalities.obs.rgb": [IMAGE_KEY],
        "observation.encoder.rgb.core_kwargs": core,
        "observation.encoder.rgb.obs_randomizer_class": "CropRandomizer",
        "observation.encoder.rgb.obs_randomizer_kwargs": crop,
        "train.batch_size": 20,
    }


_BC = {"algo.actor_layer_dims": [64, 64]}
_BC_VAE = {**_BC, "algo.vae.enabled": True, **_under("algo.vae", SMALL_VAE)}
_BC_RNN = {
    "algo.actor_layer_dims": [],
    "algo.rnn.enabled": True,
    **_under("algo.rnn", SMALL_RNN),
    "train.seq_length": 5,
}
_BC_TRANSFORMER = {
    "algo.actor_layer_dims": [],
    **_under("algo.transformer", SMALL_TRANSFORMER),
    "train.frame_stack": 5,
}
_ALL_STEPS = {"algo.transformer.supervise_all_steps": True, "train.seq_length": 5}
_GMM = {"algo.gmm.enabled": True}
_CRITIC = {"algo.critic.layer_dims": [32, 32]}
_BCQ = {
    **_CRITIC,
    "algo.action_sampler.actor_layer_dims": [32],
    **_under("algo.action_sampler.vae", SMALL_VAE),
    "algo.actor.layer_dims": [32],
}
_ACTOR_CRITIC = {**_CRITIC, "algo.actor.layer_dims": [32, 32]}
_TD3_BC = {
    **_ACTOR_CRITIC,
    "train.hdf5_load_next_obs": True,
    "train.hdf5_normalize_obs": False,
    "observation.modalities.obs.low_dim": LOW_DIM,
}
_GL = {"train.seq_length": 10, "algo.ae.planner_layer_dims": [32], **_under("algo.vae", SMALL_VAE)}
_HBC_ACTOR = {"algo.actor.actor_layer_dims": [], "algo.actor.rnn.hidden_dim": 32}
_HBC = {
    **_HBC_ACTOR,
    "algo.planner.ae.planner_layer_dims": [32],
    **_under("algo.planner.vae", SMALL_VAE),
}
_IRIS = {
    **_HBC_ACTOR,
    "algo.value_planner.planner.ae.planner_layer_dims": [32],
    **_under("algo.value_planner.planner.vae", SMALL_VAE),
    "algo.value_planner.value.critic.layer_dims": [32],
    "algo.value_planner.value.action_sampler.actor_layer_dims": [32],
    **_under("algo.value_planner.value.action_sampler.vae", SMALL_VAE),
}
_DIFFUSION = {"train.frame_stack": 2, "train.seq_length": 16}
_DDIM = {"algo.ddpm.enabled": False, "algo.ddim.enabled": True}
_LEARNED = {"algo.vae.prior.learn": True, "algo.vae.prior.is_conditioned": True}
_GOALS = {
    "train.goal_mode": "last",
    "train.hdf5_load_next_obs": True,
    "observation.modalities.goal.low_dim": ["object"],
}

# The settings in which a variant differs from its template, by dotted path.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bc": ("bc", _BC),
    "bc_goal": ("bc", {**_BC, **_GOALS}),
    "bc_gaussian": ("bc", {**_BC, "algo.gaussian.enabled": True}),
    "bc_gmm": ("bc", {**_BC, **_GMM}),
    "bc_vae": ("bc", _BC_VAE),
    "bc_vae_learned_prior": ("bc", {**_BC_VAE, **_LEARNED}),
    "bc_vae_gmm_prior": (
        "bc",
        {**_BC_VAE, **_LEARNED, "algo.vae.prior.use_gmm": True, "algo.vae.prior.gmm_learn_weights": True},
    ),
    "bc_vae_free_gmm_prior": (
        "bc",
        {**_BC_VAE, "algo.vae.prior.learn": True, "algo.vae.prior.use_gmm": True},
    ),
    "bc_vae_categorical_prior": ("bc", {**_BC_VAE, **_LEARNED, "algo.vae.prior.use_categorical": True}),
    "bc_rnn": ("bc", _BC_RNN),
    "bc_rnn_gru_open_loop": ("bc", {**_BC_RNN, "algo.rnn.rnn_type": "GRU", "algo.rnn.open_loop": True}),
    "bc_rnn_gmm": ("bc", {**_BC_RNN, **_GMM}),
    "bc_transformer": ("bc", _BC_TRANSFORMER),
    "bc_transformer_gmm": ("bc", {**_BC_TRANSFORMER, **_GMM}),
    "bc_transformer_all_steps": ("bc", {**_BC_TRANSFORMER, **_ALL_STEPS}),
    "bc_transformer_future": (
        "bc",
        {**_BC_TRANSFORMER, **_GMM, **_ALL_STEPS, "algo.transformer.pred_future_acs": True, "train.seq_length": 9},
    ),
    "bc_image": ("bc", {**_BC, **_images("ShallowConv", "SpatialSoftmax", 16)}),
    "bc_rnn_gmm_image": ("bc", {**_BC_RNN, **_GMM, **_images("ShallowConv", "SpatialSoftmax", 16)}),
    "bc_image_batchnorm": ("bc", {**_BC, **_images("ResNet18Conv", "SpatialSoftmax", 16)}),
    "bcq": ("bcq", _BCQ),
    "bcq_actor": ("bcq", {**_BCQ, "algo.actor.enabled": True}),
    "bcq_distributional": (
        "bcq",
        {**_BCQ, "algo.critic.distributional.enabled": True, "algo.critic.value_bounds": [-10.0, 10.0]},
    ),
    "bcq_gmm": (
        "bcq",
        {**_BCQ, "algo.action_sampler.gmm.enabled": True, "algo.action_sampler.vae.enabled": False},
    ),
    "cql": ("cql", _ACTOR_CRITIC),
    "cql_fixed_weight": ("cql", {**_ACTOR_CRITIC, "algo.critic.target_q_gap": None}),
    "iql": ("iql", _ACTOR_CRITIC),
    "iql_gmm": ("iql", {**_ACTOR_CRITIC, "algo.actor.net.type": "gmm"}),
    "td3_bc": ("td3_bc", _TD3_BC),
    "gl": ("gl", {**_GL, "algo.vae.enabled": False}),
    "gl_vae": ("gl", _GL),
    "hbc": ("hbc", _HBC),
    "hbc_random_subgoals": ("hbc", {**_HBC, "algo.actor_use_random_subgoals": True}),
    "hbc_cascade": ("hbc", {**_HBC, "algo.mode": "cascade"}),
    "hbc_latent_subgoal": ("hbc", {**_HBC, "algo.latent_subgoal.enabled": True}),
    "iris": ("iris", _IRIS),
    "iris_cascade": ("iris", {**_IRIS, "algo.mode": "cascade"}),
    "diffusion_policy": ("diffusion_policy", _DIFFUSION),
    "diffusion_policy_no_ema": ("diffusion_policy", {**_DIFFUSION, "algo.ema.enabled": False}),
    "diffusion_policy_ddim": ("diffusion_policy", {**_DIFFUSION, **_DDIM}),
    "diffusion_policy_ddim_no_ema": ("diffusion_policy", {**_DIFFUSION, **_DDIM, "algo.ema.enabled": False}),
    "diffusion_policy_image": ("diffusion_policy", {**_DIFFUSION, **_images("ResNet18Conv", "SpatialSoftmax", 16)}),
    "bc_language": ("bc", {**_BC, "algo.language_conditioned": True}),
    "diffusion_policy_language": ("diffusion_policy", {**_DIFFUSION, "algo.language_conditioned": True}),
    "act": ("act", {**_images("ResNet18Conv", None, None), "train.seq_length": 5, **_under("algo.act", SMALL_ACT)}),
}
OF_ROBOCASA = {"act", "bc_language", "diffusion_policy_language"}
SINCE_0_5 = {name for name in VARIANTS if name.startswith("diffusion_policy")} | {"bc_transformer_future"}


def is_shipped(variant: str, release: str) -> bool:
    """Whether a release supports the variant."""
    return (variant not in SINCE_0_5 or release >= "0.5") and (variant not in OF_ROBOCASA or release == "robocasa")


_SPATIAL_SOFTMAX = (
    "SpatialSoftmax cancels the bias of the convolution before it, whose gradient is rounding, which Adam scales up; "
    "`--precision float64` gives 1e-15"
)

# How much a variant may differ from one process, and why it differs more than others.
WHY = {
    "bc_image": (1e-4, _SPATIAL_SOFTMAX),
    "bc_rnn_gmm_image": (1e-4, _SPATIAL_SOFTMAX),
    "diffusion_policy_image": (1e-4, _SPATIAL_SOFTMAX),
    "act": (
        1e-4,
        "softmax cancels the bias of attention's keys, whose gradient is rounding, which Adam scales up; all other "
        "weights are within 1e-5",
    ),
}

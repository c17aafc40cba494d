"""Has diffusion_policy's rollouts played by the main rank alone: docs/diffusion_policy.md."""

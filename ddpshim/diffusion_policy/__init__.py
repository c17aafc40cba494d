"""Plays diffusion_policy's rollouts on the main rank only: docs/diffusion_policy.md."""

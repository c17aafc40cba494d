"""Plays diffusion_policy's rollouts on the main rank only: docs/other_codebases.md."""

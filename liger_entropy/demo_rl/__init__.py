"""A policy trained by GRPO on a text task that can be verified, with and without an entropy bonus."""

"""Rollout accuracy on prepared records, through the prompts, engine and rewards of training."""

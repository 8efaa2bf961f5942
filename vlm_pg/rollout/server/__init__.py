"""Rollouts from an OpenAI-compatible server. What to run, what is checked and what is not: docs/servers.md."""

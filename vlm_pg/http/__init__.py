"""Clients of OpenAI-compatible servers: bounded responses, bounded retries, API keys masked in every text."""

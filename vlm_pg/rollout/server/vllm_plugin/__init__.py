"""Folder for the PYTHONPATH of vLLM, which has not our package."""

"""Trackers: what a run logs, sent to tensorboard, wandb, swanlab or mlflow as well (``observe.trackers``)."""

"""From rollouts to updated weights: one step, the loop around it, engines, checkpoints."""

"""The training loop of the split example: the one loop of paceline, which every placement uses.

`main_ppo_split.py` assigns it to `RayPPOTrainer.fit`. That changes nothing; it shows where a loop of your own would go.
"""

from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.ray_trainer import fit as one_loop


def fit(self: RayPPOTrainer) -> None:
    """Train: actor and critic are on pools of their own, so their updates run side by side."""
    one_loop(self)

"""Where Hydra finds ppo_trainer.yaml; a package, because Hydra looks in nothing else when main is imported."""

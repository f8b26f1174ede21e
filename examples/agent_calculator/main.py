"""A small model learns to call a calculator on sums that it can't do.

    python examples/agent_calculator/main.py
    python examples/agent_calculator/main.py trainer.placement.name=split trainer.n_gpus_per_node=2

Makes and pre-trains the model, trains it with PPO on conversations, and ends with what the run measured on sums that
it was not trained on. Any key of the configuration can follow, such as actor_rollout_ref.actor.optim.lr=0.
"""

import sys
import time
from pathlib import Path

import model as example
from hydra import compose, initialize_config_dir

import paceline.trainer
from paceline.command_line import errors_as_exit_codes
from paceline.config.overrides import check_overrides
from paceline.files import replacing_folder
from paceline.log_file import configure_logging
from paceline.report.trackers import read_metrics
from paceline.trainer.main_ppo import run_ppo

SUCCESS = f"val-core/{example.DATA_SOURCE}/acc/mean@"
TRAINING, VALIDATION = 4000, 200
PRESET = (
    "data.train_batch_size=128",
    "data.max_prompt_length=12",
    "data.max_response_length=36",
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    "actor_rollout_ref.model.use_remove_padding=false",  # rows are short, and all about as long
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "algorithm.adv_estimator=gae",
    "critic.model.use_remove_padding=false",
    "critic.ppo_micro_batch_size_per_gpu=64",
    "critic.optim.lr=1e-3",
    "trainer.device=cpu",
    "trainer.threads_per_worker=1",
    "trainer.total_training_steps=40",
    "trainer.test_freq=10",
    "trainer.project_name=agent_calculator",
)


def main(overrides: list[str]) -> None:
    configure_logging()
    with errors_as_exit_codes():
        folder = Path(f"runs/agent_calculator/{time.strftime('%Y%m%d-%H%M%S')}").absolute()
        tools = Path(__file__).with_name("tools.yaml")
        material = [
            f"data.train_files={folder}/material/train.parquet",
            f"data.val_files={folder}/material/test.parquet",
            f"actor_rollout_ref.model.path={folder}/material/model",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}",
            f"trainer.default_local_dir={folder}",
        ]
        with initialize_config_dir(f"{paceline.trainer.__path__[0]}/config", version_base=None):
            config = compose("ppo_trainer", overrides=check_overrides([*PRESET, *material, *overrides]))
        make_material(folder / "material", seed=config.trainer.seed)
        run_ppo(config)
        if not config.trainer.dry_run:
            print(last_line(Path(config.trainer.default_local_dir)))


def make_material(folder: Path, seed: int) -> None:
    """Model, training and validation data."""
    tokenizer = example.build_tokenizer()
    model = example.build_model(tokenizer, seed)
    print(f"pre-training a model of {model.num_parameters() / 1e6:.2f} million parameters")
    example.pretrain(model, tokenizer, seed, print)
    sums = example.draw_sums(seed, TRAINING + VALIDATION)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished / "model")
        tokenizer.save_pretrained(unfinished / "model")
        example.write_sums(unfinished / "train.parquet", sums[:TRAINING])
        example.write_sums(unfinished / "test.parquet", sums[TRAINING:])


def last_line(run_dir: Path) -> str:
    """What the run achieved, by its own metrics."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    measured = [(line["step"], value) for line in lines for name, value in line.items() if name.startswith(SUCCESS)]
    (_, before), (steps, after) = measured[0], measured[-1]
    return f"agent_calculator: success {before:.2f} -> {after:.2f} in {steps} steps ({run_dir})"


if __name__ == "__main__":
    main(sys.argv[1:])

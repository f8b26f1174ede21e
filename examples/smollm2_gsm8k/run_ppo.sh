#!/usr/bin/env bash
# PPO with a critic, for two cores: run_ppo.sh FOLDER [key=value ...], where FOLDER is what prepare.py wrote.
set -euo pipefail
folder="${1:?usage: run_ppo.sh FOLDER [key=value ...], where FOLDER is what prepare.py wrote}"
shift
python -m paceline.trainer.main_ppo \
    data.train_files="$folder/train.parquet" \
    data.val_files="$folder/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=128 \
    data.max_response_length=32 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$folder/model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    critic.optim.lr=2e-5 \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    trainer.default_local_dir="$folder/ppo" \
    "$@"

#!/usr/bin/env bash
# GRPO, for two cores: run_grpo.sh FOLDER [key=value ...], where FOLDER is what prepare.py wrote.
set -euo pipefail
folder="${1:?usage: run_grpo.sh FOLDER [key=value ...], where FOLDER is what prepare.py wrote}"
shift
python -m paceline.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$folder/train.parquet" \
    data.val_files="$folder/test.parquet" \
    data.train_batch_size=4 \
    data.max_prompt_length=128 \
    data.max_response_length=32 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$folder/model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.rollout.n=8 \
    trainer.total_training_steps=30 \
    trainer.test_freq=10 \
    trainer.default_local_dir="$folder/grpo" \
    "$@"

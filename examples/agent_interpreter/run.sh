#!/usr/bin/env bash
# GRPO with a code interpreter, for two cores: run.sh FOLDER [key=value ...], where FOLDER is what prepare.py wrote into.
set -euo pipefail
folder="${1:?usage: run.sh FOLDER [key=value ...], where FOLDER is what prepare.py wrote into}"
shift
python -m paceline.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$folder/train_interpreter.parquet" \
    data.val_files="$folder/test_interpreter.parquet" \
    data.train_batch_size=4 \
    data.max_prompt_length=256 \
    data.max_response_length=128 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$folder/model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$(dirname "$0")/tools.yaml" \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=40 \
    trainer.total_training_steps=10 \
    trainer.test_freq=5 \
    trainer.default_local_dir="$folder/interpreter" \
    "$@"

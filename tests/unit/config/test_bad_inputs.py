"""Mistakes that users make, each with the message that it gets: the key, what was found, what to set."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from paceline.config import PPOConfig
from paceline.config.checks import unused_settings, validate
from paceline.config.keys import known_keys
from paceline.config.load import load_config, to_dict
from paceline.errors import ConfigError
from tests.stand_ins import with_changes

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
PIPELINED = {"trainer.schedule.name": "pipelined", "trainer.schedule.max_staleness": 2}
STREAMING = {"trainer.schedule.name": "streaming"}
TALKS = {f"{ROLLOUT}.multi_turn.enable": True}
REWARD_MODEL = {"reward_model.enable": True, "reward_model.model.path": "org/rm"}
GRPO = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 4}
TEACHERS = "distillation.teacher_models"
LOSS = "distillation.distillation_loss"
TAUGHT = {"distillation.enabled": True, f"{TEACHERS}.one.model_path": "org/teacher"}
ALONE = {**TAUGHT, f"{LOSS}.use_task_rewards": False}
GDPO = {**GRPO, "algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["acc", "format"]}


BAD: list[tuple[dict[str, Any], str]] = [
    # Teachers
    ({"distillation.enabled": True}, f"{TEACHERS} names no teacher, but distillation.enabled=True"),
    ({**TAUGHT, f"{TEACHERS}.one.model_path": None}, f"{TEACHERS}.one.model_path is not set"),
    ({**TAUGHT, f"{TEACHERS}.one.model_path": "/nowhere/x"}, f"{TEACHERS}.one.model_path: there is no folder /nowhere"),
    ({f"{TEACHERS}.one.modle_path": "x"}, f"{TEACHERS}.one.modle_path is not a key. Did you mean model_path?"),
    ({f"{TEACHERS}.one": 3}, f"{TEACHERS}.one wants keys below it, model_path and key; got 3 (int)."),
    ({TEACHERS: "org/teacher"}, f"{TEACHERS} wants keys below it, model_path and key; got 'org/teacher' (str)."),
    ({f"{TEACHERS}.one.key": 7}, f"{TEACHERS}.one.key wants text or null; got 7 (int)."),
    (
        {**TAUGHT, f"{TEACHERS}.one.key": "x", f"{TEACHERS}.two.model_path": "org/other", f"{TEACHERS}.two.key": None},
        f"{TEACHERS}.two.key is not set, and there are 2 teachers",
    ),
    (
        {**TAUGHT, f"{TEACHERS}.two.model_path": "a/b", f"{TEACHERS}.two.key": "x", f"{TEACHERS}.one.key": "x"},
        "2 teachers have key=x, and a row has one",
    ),
    ({**TAUGHT, "distillation.teacher_key": ""}, "distillation.teacher_key is empty"),
    ({**TAUGHT, "distillation.nnodes": 1}, "distillation.nnodes=1 without distillation.n_gpus_per_node"),
    ({**TAUGHT, f"{LOSS}.loss_mode": "k1"}, f"{LOSS}.loss_mode=k1: as a loss, its gradient does not depend on the"),
    ({**TAUGHT, f"{LOSS}.loss_mode": "kl"}, f"{LOSS}.loss_mode=kl: as a loss, its gradient does not depend on the"),
    ({f"{LOSS}.loss_mode": "k4"}, "low_var_kl, k3, forward_kl_topk, forward_kl_topk_tail."),
    (
        {**TAUGHT, f"{LOSS}.loss_mode": "forward_kl_topk", f"{LOSS}.use_policy_gradient": True},
        "it is the same whichever token was sampled",
    ),
    ({**TAUGHT, f"{LOSS}.log_prob_min_clamp": -9.0}, f"{LOSS}.log_prob_min_clamp is for loss_mode=forward_kl_topk"),
    ({f"{LOSS}.log_prob_min_clamp": 0.0}, f"{LOSS}.log_prob_min_clamp=0.0 is out of range"),
    (
        {
            **TAUGHT,
            f"{LOSS}.loss_mode": "forward_kl_topk",
            f"{ACTOR}.strategy": "fsdp2",
            f"{ACTOR}.ulysses_sequence_parallel_size": 2,
            "trainer.n_gpus_per_node": 2,
        },
        "devices that share sequences give the log-prob of the sampled token alone",
    ),
    (
        {
            **TAUGHT,
            f"{LOSS}.use_policy_gradient": True,
            f"{CORRECTION}.bypass_mode": True,
            f"{CORRECTION}.loss_type": "reinforce",
        },
        f"{LOSS}.use_policy_gradient=True with {CORRECTION}.loss_type=reinforce",
    ),
    ({**ALONE, "algorithm.use_kl_in_reward": True}, f"algorithm.use_kl_in_reward=True with {LOSS}.use_task_rewards"),
    ({**ALONE, **REWARD_MODEL}, f"reward_model.enable=True with {LOSS}.use_task_rewards=False"),
    ({**ALONE, "algorithm.use_pf_ppo": True}, f"algorithm.use_pf_ppo=True with {LOSS}.use_task_rewards=False"),
    ({**ALONE, f"{LOSS}.distillation_loss_coef": 0.5}, "distillation_loss_coef=0.5 with"),
    ({**ALONE, "trainer.critic_warmup": 2}, f"trainer.critic_warmup=2 with {LOSS}.use_task_rewards=False"),
    # Keys and types
    ({f"{ACTOR}.clip_ration": 0.2}, f"{ACTOR}.clip_ration is not a key; did you mean {ACTOR}.clip_ratio?"),
    (
        {"actor_rollout_ref.clip_ratio": 0.2},
        f"actor_rollout_ref.clip_ratio is not a key; did you mean {ACTOR}.clip_ratio?",
    ),
    ({"traner.nnodes": 2}, "traner is not a key; did you mean trainer?"),
    ({"trainer.gpus_per_node": 2}, "did you mean trainer.n_gpus_per_node?"),
    ({f"{ACTOR}.ppo_micro_batch_per_gpu": 2}, f"did you mean {ACTOR}.ppo_micro_batch_size_per_gpu?"),
    ({"xyzzy": 1}, "xyzzy is not a key."),
    ({"trainer.nnodes": 1.5}, "trainer.nnodes wants a whole number; got 1.5 (float)."),
    ({"trainer.nnodes": True}, "trainer.nnodes wants a whole number; got True (bool)."),
    ({"trainer.nnodes": None}, "trainer.nnodes wants a whole number; got null."),
    ({"trainer.val_only": 1}, "trainer.val_only wants true or false; got 1 (int)."),
    ({"trainer.experiment_name": 7}, "quote it twice: \"trainer.experiment_name='7'\""),
    ({"trainer.logger": [1]}, "trainer.logger wants a list, each item text"),
    ({"trainer": 3}, "trainer is a section and wants keys below it; got 3 (int)."),
    ({"algorithm.gamma": "much"}, "algorithm.gamma wants a finite number; got 'much' (str)."),
    ({"algorithm.gamma": float("nan")}, "algorithm.gamma wants a finite number"),
    ({"critic.optim.betas": [0.9]}, "critic.optim.betas wants a list of 2, each item a finite number"),
    ({"critic.ppo_epochs": "x"}, "critic.ppo_epochs wants a whole number or null"),
    ({"data.train_files": 3}, "data.train_files wants text or a list, each item text or null"),
    ({"ray_kwargs.ray_init": [1]}, "ray_kwargs.ray_init wants a section with keys of its own"),
    ({"trainer.resume_mode": "atuo"}, "trainer.resume_mode='atuo' is not known; did you mean auto?"),
    ({"trainer.placement.name": "splitted"}, "did you mean split? Known: colocated, split."),
    ({"trainer.device": "gpu"}, "trainer.device=gpu is not known; GPUs are cuda."),
    ({"data.truncation": "lefft"}, "data.truncation='lefft' is not known; did you mean left?"),
    ({"algorithm.kl_penalty": "k4"}, "Known: kl, k1, abs, mse, k2, low_var_kl, k3."),
    ({"algorithm.kl_penalty": "k3+"}, "algorithm.kl_penalty='k3+' is not known; did you mean k3?"),
    ({f"{ACTOR}.kl_loss_type": "k4+"}, "low_var_kl, k3, kl+, k1+, abs+, mse+, k2+, low_var_kl+, k3+."),
    ({"algorithm.kl_ctrl.type": "adaptiv"}, "did you mean adaptive?"),
    ({"critic.loss_agg_mode": "token_mean"}, "did you mean token-mean?"),
    ({"critic.optim.lr_scheduler_type": "cosin"}, "did you mean cosine?"),
    ({f"{ACTOR}.kl_loss_type": "low_var"}, "did you mean low_var_kl?"),
    ({"data.seed": "???"}, "data.seed is marked as missing (???); set it."),
    ({"data.seed": "${trainer.sede}"}, "data.seed can't be resolved: Interpolation key 'trainer.sede'"),
    ({f"{ACTOR}.torchtitan.use_torch_compile": True}, "use_torch_compile=True is not supported yet: models run"),
    # LoRA
    ({f"{MODEL}.lora_rank": -1}, "actor_rollout_ref.model.lora_rank=-1 is out of range; set it to a number >= 0."),
    ({f"{MODEL}.lora_alpha": 0}, "actor_rollout_ref.model.lora_alpha=0"),
    (
        {f"{MODEL}.lora_rank": 8, f"{ACTOR}.strategy": "fsdp"},
        "has no LoRA; set actor_rollout_ref.model.lora_rank=0, or actor_rollout_ref.actor.strategy=local or fsdp2.",
    ),
    ({f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": []}, "target_modules=[] names no layers"),
    (
        {
            f"{MODEL}.lora_rank": 8,
            f"{ACTOR}.use_kl_loss": True,
            "trainer.n_gpus_per_node": 2,
            "trainer.placement.rollout_devices": 1,
        },
        "Set trainer.placement.rollout_on=[global_pool,rollout_pool].",
    ),
    # Choices
    ({"algorithm.adv_estimator": "gea"}, "algorithm.adv_estimator='gea' is not known; did you mean gae?"),
    (
        {"algorithm.adv_estimator": "gdop", f"{ROLLOUT}.n": 4},
        "algorithm.adv_estimator='gdop' is not known; did you mean gdpo?",
    ),
    ({f"{ACTOR}.policy_loss.loss_mode": "vanila"}, "did you mean vanilla?"),
    ({f"{ACTOR}.policy_loss.loss_mode": "dro"}, f"Set {ACTOR}.policy_loss.dro_beta, such as 0.1."),
    ({f"{ACTOR}.policy_loss.dro_beta": 0}, f"{ACTOR}.policy_loss.dro_beta=0.0 is out of range"),
    ({f"{ACTOR}.policy_loss.clip_cov_ratio": 0}, f"{ACTOR}.policy_loss.clip_cov_ratio=0.0 is out of range"),
    ({f"{ACTOR}.policy_loss.kl_cov_ratio": 2}, f"{ACTOR}.policy_loss.kl_cov_ratio=2.0 is out of range"),
    ({f"{ACTOR}.policy_loss.ppo_kl_coef": -1}, f"{ACTOR}.policy_loss.ppo_kl_coef=-1.0 is out of range"),
    ({f"{ACTOR}.policy_loss.clip_cov_lb": 6}, f"{ACTOR}.policy_loss.clip_cov_lb=6.0 is not below clip_cov_ub=5.0"),
    ({"trainer.otlp_endpoint": "localhost:4318"}, "trainer.otlp_endpoint='localhost:4318' is no address"),
    ({"trainer.prometheus_port": 0}, "trainer.prometheus_port=0 is out of range"),
    ({"trainer.record": "allways"}, "trainer.record=allways is neither never, every, on_anomaly nor a list of steps"),
    ({"trainer.record": [0, 3]}, "trainer.record=[0, 3] names no steps from 1 on"),
    ({f"{ROLLOUT}.on_weight_mismatch": "retry"}, f"{ROLLOUT}.on_weight_mismatch"),
    ({f"{ACTOR}.tau_pos": 0}, f"{ACTOR}.tau_pos=0.0 is out of range"),
    ({f"{ACTOR}.tau_neg": -1}, f"{ACTOR}.tau_neg=-1.0 is out of range"),
    ({f"{ACTOR}.loss_scale_factor": 0}, f"{ACTOR}.loss_scale_factor=0.0 is out of range"),
    ({f"{ACTOR}.policy_loss.loss_mode": "bypass_mode"}, f"without {CORRECTION}.bypass_mode=True, which turns it on"),
    (
        {
            f"{ACTOR}.policy_loss.loss_mode": "gspo",
            f"{CORRECTION}.bypass_mode": True,
            f"{CORRECTION}.loss_type": "reinforce",
        },
        f"loss_mode=gspo with {CORRECTION}.loss_type=reinforce, which is a loss of its own",
    ),
    # Rollout correction
    ({f"{CORRECTION}.rollout_is": "tokens"}, "did you mean token?"),
    ({f"{CORRECTION}.rollout_is_threshold": "2_0.5"}, f"{CORRECTION}.rollout_is_threshold=2_0.5 is not a threshold"),
    (
        {f"{CORRECTION}.rollout_is_threshold": True},
        f"{CORRECTION}.rollout_is_threshold wants text or a finite number; got True",
    ),
    ({f"{CORRECTION}.rollout_rs": "token_k1"}, "0 thresholds for 1 criteria of rollout_rs (token_k1): set one for all"),
    ({f"{CORRECTION}.rollout_rs": "geometric", f"{CORRECTION}.rollout_rs_threshold": 2}, "'geometric' is not known"),
    (
        {
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_threshold": 3.0,
            f"{ACTOR}.tis_imp_ratio_cap": 2.0,
        },
        f"{ACTOR}.tis_imp_ratio_cap=2.0 means {CORRECTION}.rollout_is=token with rollout_is_threshold=2.0",
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{ACTOR}.tis_imp_ratio_cap": 2.0},
        f"{ACTOR}.tis_imp_ratio_cap=2.0 means {CORRECTION}.rollout_is=token",
    ),
    ({f"{CORRECTION}.loss_type": "reinforced"}, "did you mean reinforce?"),
    (
        {f"{ROLLOUT}.trust_log_probs": True, f"{CORRECTION}.rollout_is": "token"},
        f"{ROLLOUT}.trust_log_probs=True with a correction ({CORRECTION})",
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{ROLLOUT}.do_sample": False},
        f"{CORRECTION}.bypass_mode=True with {ROLLOUT}.do_sample=False",
    ),
    ({f"{ACTOR}.strategy": "fdsp2"}, f"{ACTOR}.strategy='fdsp2' is not known; did you mean fsdp2?"),
    ({f"{ROLLOUT}.name": "vlm"}, f"{ROLLOUT}.name='vlm' is not known; did you mean vllm?"),
    ({f"{ROLLOUT}.name": "nativ"}, "did you mean native?"),
    ({"trainer.logger": ["console", "comet"]}, "trainer.logger=comet is not supported yet; use tensorboard"),
    ({"trainer.logger": ["tensorbord"]}, "trainer.logger='tensorbord' is not known; did you mean tensorboard?"),
    # Estimators
    *(
        ({**GRPO, **change}, f"{message} with algorithm.adv_estimator=grpo, which has no critic.")
        for change, message in (
            ({"algorithm.lam_critic": 1.0}, "algorithm.lam_critic=1.0"),
            ({"algorithm.lam_length_alpha": 0.05}, "algorithm.lam_length_alpha=0.05"),
            ({"algorithm.use_pf_ppo": True}, "algorithm.use_pf_ppo=True"),
        )
    ),
    ({**GRPO, "algorithm.gdpo_reward_keys": ["acc"]}, "algorithm.gdpo_reward_keys=['acc'] has no part in"),
    ({**GRPO, "algorithm.gdpo_reward_weights": [1]}, "algorithm.gdpo_reward_weights=[1.0] has no part in"),
    ({**GDPO, "algorithm.gdpo_reward_keys": None}, "algorithm.gdpo_reward_keys=[] with algorithm.adv_estimator=gdpo"),
    ({**GDPO, "algorithm.gdpo_reward_keys": ["acc", "acc"]}, "Name each once, as the reward function's dict does"),
    ({**GDPO, "algorithm.gdpo_reward_weights": [1, 2, 3]}, "algorithm.gdpo_reward_weights=[1.0, 2.0, 3.0] for"),
    ({**GDPO, "algorithm.gdpo_reward_weights": [0, 0]}, "not all of them 0, or leave it out"),
    (
        {**GDPO, "algorithm.use_kl_in_reward": True},
        f"the KL would have no effect. Set {ACTOR}.use_kl_loss=True instead.",
    ),
    ({**GDPO, f"{OVERLONG}.enable": True}, "so it would have no effect. Add overlong_penalty to them."),
    ({**GDPO, **REWARD_MODEL}, "so it would have no effect. Add model_score to them."),
    (
        {**GRPO, "algorithm.adv_estimator": "optimal_token_baseline", f"{ROLLOUT}.trust_log_probs": True},
        f"{ROLLOUT}.trust_log_probs=True with algorithm.adv_estimator=optimal_token_baseline: the squared",
    ),
    (
        {f"{ACTOR}.calculate_sum_pi_squared": True, f"{ROLLOUT}.trust_log_probs": True},
        f"{ROLLOUT}.trust_log_probs=True with {ACTOR}.calculate_sum_pi_squared=True: the squared probabilities",
    ),
    (
        {f"{ACTOR}.calculate_sum_pi_squared": True, "algorithm.rollout_correction.bypass_mode": True},
        "pass that it saves. Set algorithm.rollout_correction.bypass_mode=False.",
    ),
    ({f"{ACTOR}.unbiased_kl_loss": True}, f"without a KL loss; set {ACTOR}.use_kl_loss=True"),
    (
        {"algorithm.filter_groups.metric": "seq_final_reward", "algorithm.use_kl_in_reward": True},
        "groups are compared before the KL is known",
    ),
    # Ranges
    ({"algorithm.gamma": 5}, "algorithm.gamma=5.0 is out of range; set it in [0, 1]."),
    ({"algorithm.lam": -0.1}, "algorithm.lam=-0.1 is out of range"),
    ({"algorithm.lam_critic": 1.5}, "algorithm.lam_critic=1.5 is out of range; set it in [0, 1]."),
    ({"algorithm.lam_length_alpha": 0}, "algorithm.lam_length_alpha=0.0 is out of range; set it to a number > 0."),
    ({"algorithm.pf_ppo.weight_pow": -1}, "algorithm.pf_ppo.weight_pow=-1.0 is out of range"),
    ({"algorithm.pf_ppo.reweight_method": "max"}, "Known: pow, max_min, max_random."),
    ({"algorithm.kl_ctrl.horizon": 0}, "algorithm.kl_ctrl.horizon=0 is out of range; set it to a number >= 1."),
    ({"algorithm.kl_ctrl.kl_coef": -1}, "algorithm.kl_ctrl.kl_coef=-1.0 is out of range"),
    ({"algorithm.kl_ctrl.kl_coef": 0, "algorithm.kl_ctrl.type": "adaptive"}, "so it would stay 0. Set it above 0"),
    ({"data.keep_columns": ["level"], "data.val_files": "{missing}/x.parquet"}, "data.val_files: there is no file"),
    ({"actor_rollout_ref.nccl_timeout": 0}, "actor_rollout_ref.nccl_timeout=0 is out of range"),
    ({"data.apply_chat_template_kwargs": 3}, "data.apply_chat_template_kwargs wants a section with keys of its own"),
    ({"data.custom_cls.path": "{missing}.py", "data.custom_cls.name": "D"}, "data.custom_cls.path: there is no file"),
    ({"data.custom_cls.path": __file__, "data.custom_cls.name": "Zqx"}, "data.custom_cls.name=Zqx: "),
    ({"data.custom_cls.path": __file__}, "data.custom_cls.name is not set; set it to the name of a class"),
    ({"data.custom_cls.name": "D"}, "data.custom_cls.name=D has no file to be in; set data.custom_cls.path."),
    ({"data.sampler.class_path": __file__, "data.sampler.class_name": "Zqx"}, "has no such class"),
    (
        {
            "data.sampler.class_path": __file__,
            "data.sampler.class_name": "Path",
            "trainer.schedule.name": "pipelined",
            "trainer.schedule.max_staleness": 1,
        },
        "data.sampler.class_path with trainer.schedule.name=pipelined",
    ),
    ({"data.sampler.class_name": "S"}, "data.sampler.class_name=S has no file to be in"),
    ({"data.keep_columns": ["prompt", "level"]}, "data.keep_columns has level, and no file has such a column"),
    (
        {"algorithm.filter_groups.max_num_gen_batches": -2},
        "algorithm.filter_groups.max_num_gen_batches=-2 is out of range; set it to a number >= 1, or -1.",
    ),
    ({f"{ACTOR}.clip_ratio": -1}, f"{ACTOR}.clip_ratio=-1.0 is out of range; set it to a number >= 0."),
    ({f"{ACTOR}.clip_ratio_c": 1.0}, f"{ACTOR}.clip_ratio_c=1.0 is out of range; set it to a number > 1."),
    ({f"{ACTOR}.optim.lr": -1e-6}, f"{ACTOR}.optim.lr=-1e-06 is out of range"),
    ({f"{ACTOR}.optim.betas": [0.9, 1.0]}, f"{ACTOR}.optim.betas=[0.9, 1.0] is out of range; set each in [0, 1)."),
    ({"critic.optim.lr_warmup_steps_ratio": 2}, "critic.optim.lr_warmup_steps_ratio=2.0 is out of range"),
    ({"critic.grad_clip": 0}, "critic.grad_clip=0.0 is out of range; set it to a number > 0."),
    ({f"{ACTOR}.ppo_mini_batch_size": 0}, f"{ACTOR}.ppo_mini_batch_size=0 is out of range"),
    ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": -2}, f"{ACTOR}.ppo_micro_batch_size_per_gpu=-2 is out of range"),
    ({f"{ROLLOUT}.n": 0}, f"{ROLLOUT}.n=0 is out of range"),
    ({f"{ROLLOUT}.temperature": 0}, f"{ROLLOUT}.temperature=0.0 is out of range"),
    ({f"{ROLLOUT}.temperature": 1e-45}, f"{ROLLOUT}.temperature=1e-45 is out of range; set it to a number >= 0.01."),
    ({f"{ROLLOUT}.top_p": 1.5}, f"{ROLLOUT}.top_p=1.5 is out of range; set it in (0, 1]."),
    ({f"{ROLLOUT}.top_k": -2}, f"{ROLLOUT}.top_k=-2 is out of range; set it to a number >= 1, or -1."),
    ({"data.max_response_length": 0}, "data.max_response_length=0 is out of range"),
    ({"data.train_max_samples": -5}, "data.train_max_samples=-5 is out of range"),
    ({"trainer.n_gpus_per_node": 0}, "trainer.n_gpus_per_node=0 is out of range; set it in [1, 1024]."),
    ({"trainer.nnodes": -1}, "trainer.nnodes=-1 is out of range"),
    ({"trainer.save_freq": 0}, "trainer.save_freq=0 is out of range; set it to a number >= 1, or -1."),
    ({"trainer.total_training_steps": 0}, "trainer.total_training_steps=0 is out of range"),
    ({"trainer.columns_stay_bytes": -1}, "trainer.columns_stay_bytes=-1 is out of range"),
    ({"transfer_queue.num_storage_units": 0}, "transfer_queue.num_storage_units=0 is out of range"),
    ({"transfer_queue.enable": True}, "transfer_queue.enable=True needs TransferQueue, which is not installed: pip"),
    (
        {"transfer_queue.enable": True, "trainer.columns_stay_bytes": None},
        "transfer_queue.enable=True with trainer.columns_stay_bytes=null: no column stays that it could keep",
    ),
    ({"trainer.heartbeat_timeout_seconds": 0}, "trainer.heartbeat_timeout_seconds=0.0 is out of range"),
    # Files and models
    ({"data.train_files": None}, "data.train_files is not set; set it to a data file"),
    ({"data.train_files": []}, "data.train_files is not set"),
    ({"data.train_files": "{missing}"}, "data.train_files: there is no file {missing}."),
    ({"data.train_files": "{empty}"}, "data.train_files: {empty} is a folder."),
    (
        {"data.val_files": "{text}"},
        "data.val_files: {text} is no data file. Its name must end with .parquet, .jsonl, .json, .csv",
    ),
    (
        {"data.train_files": "{truncated}"},
        "data.train_files: {truncated} is a damaged parquet file: its end is missing.",
    ),
    ({"data.train_files": "{damaged}"}, "data.train_files: {damaged} is a damaged parquet file: "),
    (
        {"data.val_files": "{no_rows}"},
        "data.val_files: there are no rows in {no_rows}. Set it to files that have some.",
    ),
    ({"data.prompt_key": ""}, "data.prompt_key is empty"),
    (
        {"data.prompt_key": "question"},
        "data.prompt_key=question: {train} has no such column. Set it to one of those that it has: prompt.",
    ),
    (
        {"data.drop_last": True, "data.train_batch_size": 4096},
        "data.drop_last=True leaves nothing to train on: data.train_files has 2000 rows, less than one batch of "
        "data.train_batch_size=4096. Set data.drop_last=False or a smaller batch.",
    ),
    (
        {"data.drop_last": True, "data.train_max_samples": 100},
        "data.drop_last=True leaves nothing to train on: data.train_max_samples=100 is less than one batch of "
        "data.train_batch_size=1024.",
    ),
    ({"actor_rollout_ref.model.path": None}, "actor_rollout_ref.model.path is not set"),
    ({"actor_rollout_ref.model.path": "{missing}"}, "actor_rollout_ref.model.path: there is no folder {missing}."),
    ({"actor_rollout_ref.model.path": "{empty}"}, "{empty} has no config.json"),
    ({"actor_rollout_ref.model.path": "{no_type}"}, "{no_type}/config.json names no model_type, so it is no model."),
    ({"actor_rollout_ref.model.path": "{no_weights}"}, "actor_rollout_ref.model.path: {no_weights} has no weights"),
    (
        {"actor_rollout_ref.model.path": "{half}"},
        "{half} lacks model-2.safetensors, 1 of 2 files of weights. Download or save the model again.",
    ),
    (
        {"actor_rollout_ref.model.path": "{no_tokenizer}"},
        "actor_rollout_ref.model.path: {no_tokenizer} has no tokenizer",
    ),
    ({"actor_rollout_ref.model.tokenizer_path": "{empty}"}, "set actor_rollout_ref.model.tokenizer_path to a folder"),
    ({"actor_rollout_ref.model.path": "org/name with space"}, "is neither a folder nor a hub id"),
    ({"actor_rollout_ref.model.path": "m\u00f6del"}, "is neither a folder nor a hub id"),
    ({"actor_rollout_ref.model.tokenizer_path": "./nowhere"}, "actor_rollout_ref.model.tokenizer_path: there is no"),
    ({"critic.model.path": "{missing}"}, "critic.model.path: there is no folder {missing}."),
    ({"custom_reward_function.path": "{missing}.py"}, "custom_reward_function.path: there is no file {missing}.py."),
    ({"custom_reward_function.path": "{broken}"}, "custom_reward_function.path: {broken} is not Python in line 1"),
    (
        {"custom_reward_function.path": "{reward}", "custom_reward_function.name": "compute_scores"},
        "custom_reward_function.name=compute_scores: {reward} has no such function; did you mean compute_score?",
    ),
    ({"custom_reward_function.name": "a b"}, "custom_reward_function.name='a b' is not a function's name"),
    ({"trainer.default_local_dir": "{train}"}, "trainer.default_local_dir: {train} is a file."),
    (
        {"trainer.default_local_dir": "{train}/run"},
        "can't be made, because {train} is a file. Set it to another folder.",
    ),
    ({"trainer.default_local_dir": "/proc/run"}, "trainer.default_local_dir: /proc/run can't be made: "),
    (
        {"trainer.default_local_dir": "/tmp/" + "n" * 300},
        "can't be a path: File name too long. Set it to another.",
    ),
    ({"trainer.default_local_dir": "/tmp/" + "n/" * 3000}, "can't be a path: File name too long."),
    ({"trainer.rollout_data_dir": "/proc/run"}, "trainer.rollout_data_dir: /proc/run can't be made: "),
    ({"data.train_files": "/tmp/" + "n" * 300}, "can't be a path: File name too long."),
    ({f"{MODEL}.path": "n/" * 3000}, "can't be a path: File name too long."),
    ({"custom_reward_function.path": "a\0b"}, "can't be a path: embedded null byte."),
    ({"ray_kwargs.timeline_json_file": "{train}/t.json"}, "ray_kwargs.timeline_json_file: {train} is a file."),
    ({"ray_kwargs.timeline_json_file": "{empty}"}, "ray_kwargs.timeline_json_file: {empty} is a folder."),
    # Batches
    (
        {"data.train_batch_size": 16},
        f"{ACTOR}.ppo_mini_batch_size=256 is more than data.train_batch_size=16; both count prompts. "
        f"Set {ACTOR}.ppo_mini_batch_size to 16 or one of its divisors.",
    ),
    (
        {"data.train_batch_size": 1000},
        "does not divide data.train_batch_size=1000: the last mini-batch would be smaller than the others. "
        f"Set {ACTOR}.ppo_mini_batch_size to a divisor, such as 250. A step is 1,000 prompts x {ROLLOUT}.n=1 = 1,000 "
        "responses, an optimizer step 256 x 1 = 256.",
    ),
    ({"critic.ppo_mini_batch_size": 300}, "critic.ppo_mini_batch_size=300 does not divide data.train_batch_size=1024"),
    (
        {f"{ACTOR}.ppo_mini_batch_size": 2, "trainer.n_gpus_per_node": 4},
        f"{ACTOR}.ppo_mini_batch_size=2 gives 2 responses per optimizer step for the 4 devices of global_pool",
    ),
    # Algorithm and sampling
    (
        {"algorithm.adv_estimator": "grpo"},
        f"{ROLLOUT}.n=1 with algorithm.adv_estimator=grpo: a response is compared with others",
    ),
    ({"algorithm.adv_estimator": "rloo"}, f"{ROLLOUT}.n=1 with algorithm.adv_estimator=rloo"),
    ({"algorithm.filter_groups.enable": True}, f"algorithm.filter_groups.enable=True with {ROLLOUT}.n=1"),
    (
        {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2, "trainer.critic_warmup": 3},
        "trainer.critic_warmup=3 with algorithm.adv_estimator=grpo, which has no critic.",
    ),
    # Rewards
    ({"reward_model.enable": True}, "reward_model.model.path is not set, but reward_model.enable=True"),
    (
        {"reward_model.enable": True, "reward_model.model.path": "{missing}"},
        "reward_model.model.path: there is no folder {missing}.",
    ),
    ({"reward_model.enable": True, "reward_model.model.path": "{empty}"}, "{empty} has no config.json"),
    (
        {"reward_model.enable": True, "reward_model.model.path": "org/rm", "reward_model.model.tokenizer_path": "./no"},
        "reward_model.model.tokenizer_path: there is no folder",
    ),
    (
        {
            "reward_model.enable": True,
            "reward_model.model.path": "org/rm",
            "reward_model.model.input_tokenizer": "./no",
        },
        "reward_model.model.input_tokenizer: there is no folder",
    ),
    ({"reward_model.strategy": "fdsp2"}, "reward_model.strategy='fdsp2' is not known; did you mean fsdp2?"),
    ({"reward_model.on_error": "rais"}, "reward_model.on_error='rais' is not known; did you mean raise?"),
    ({"reward_model.num_workers": 0}, "reward_model.num_workers=0 is out of range"),
    ({"reward_model.weights": 3}, "reward_model.weights wants a section with keys of its own; got 3 (int)."),
    (
        {**REWARD_MODEL, "reward_model.weights": {"openai/gsm8k": {"modl": 1}}},
        "reward_model.weights of 'openai/gsm8k' is {{'modl': 1}}; write {{rule: 1.0, model: 0.2}}",
    ),
    (
        {**REWARD_MODEL, "reward_model.weights": {"openai/gsm8k": {"model": -1}}},
        "reward_model.weights of 'openai/gsm8k' has model=-1; set it to a number >= 0.",
    ),
    (
        {"reward_model.weights": {"openai/gsm8k": {"model": 1}}},
        "reward_model.weights has no part without a reward model; set reward_model.enable=True",
    ),
    (
        {"custom_reward_function.reward_kwargs": {"bonus": 1}},
        "custom_reward_function.reward_kwargs has no function to go to; set custom_reward_function.path.",
    ),
    (
        {"reward_model.sandbox.url": "sandbox:8080"},
        "reward_model.sandbox.url='sandbox:8080' is no address of a service",
    ),
    (
        {"reward_model.sandbox.url": "http://sandbox:8080", "reward_model.sandbox.wall_seconds": 60},
        "reward_model.sandbox.timeout_seconds=30 is shorter than a program may run "
        "(reward_model.sandbox.wall_seconds=60)",
    ),
    ({"reward_model.sandbox.memory_limit_mb": 32}, "reward_model.sandbox.memory_limit_mb=32 is out of range"),
    (
        {f"{OVERLONG}.enable": True, f"{OVERLONG}.len": 600},
        f"{OVERLONG}.len=600 is more than a response may have: 512 tokens",
    ),
    (
        {f"{OVERLONG}.enable": True, "reward_model.reward_kwargs.max_resp_len": 100},
        f"{OVERLONG}.len=512 is more than a response may have: 100 tokens",
    ),
    (
        {**REWARD_MODEL, "reward_model.strategy": "local", "trainer.n_gpus_per_node": 2},
        "reward_model.strategy=local works on one device, and global_pool has 2. Set reward_model.strategy=fsdp2 or "
        "trainer.n_gpus_per_node=1.",
    ),
    (
        {
            **REWARD_MODEL,
            "reward_model.strategy": "local",
            "trainer.n_gpus_per_node": 4,
            "trainer.placement.name": "split",
        },
        "reward_model.strategy=local works on one device, and critic_pool has 2.",
    ),
    ({f"{ROLLOUT}.n": 4, f"{ROLLOUT}.do_sample": False}, "greedy decoding gives the same response 4 times"),
    ({f"{ROLLOUT}.val_kwargs.n": 4}, f"Set {ROLLOUT}.val_kwargs.do_sample=True or {ROLLOUT}.val_kwargs.n=1."),
    ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, f"Set it to 1, or {ROLLOUT}.name=vllm."),
    ({f"{ROLLOUT}.enforce_eager": False}, f"Leave it out, or set {ROLLOUT}.name=vllm."),
    ({f"{ROLLOUT}.engine_kwargs.vllm": {"dtype": "bfloat16"}}, f"{ROLLOUT}.engine_kwargs is a setting of vLLM"),
    # Schedules
    ({"trainer.schedule.name": "pipeline"}, "did you mean pipelined? Known: sync, pipelined, streaming."),
    (
        {"trainer.schedule.on_update": "finish"},
        "trainer.schedule.on_update=finish has no part in trainer.schedule.name=",
    ),
    ({**STREAMING, f"{ROLLOUT}.name": "hf"}, f"{ROLLOUT}.name=hf samples whole batches; set native or vllm."),
    (
        {
            **STREAMING,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.engine_kwargs.vllm": {"async_scheduling": True},
        },
        "so weights can't change between two; leave it out",
    ),
    ({**STREAMING, "algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator=remax wants greedy responses"),
    (
        {**STREAMING, "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2, "algorithm.filter_groups.enable": True},
        "algorithm.filter_groups.enable=True draws further prompts",
    ),
    ({**STREAMING, "trainer.schedule.kv_cache": "keep"}, "trainer.schedule.kv_cache=keep wants a rollout with devices"),
    (
        {
            **STREAMING,
            "trainer.n_gpus_per_node": 2,
            "trainer.placement.name": "split",
            "trainer.placement.rollout_on": ["actor_rollout_ref_pool", "critic_pool"],
        },
        "the rollout is on actor_rollout_ref_pool and critic_pool; name one pool",
    ),
    (
        {f"{ROLLOUT}.weight_transfer": "broadcast"},
        f"{ROLLOUT}.weight_transfer=broadcast: the rollout has the actor's devices and shares its weights",
    ),
    (
        {
            f"{ROLLOUT}.weight_transfer": "broadcast",
            "trainer.n_gpus_per_node": 2,
            "trainer.placement.name": "split",
        },
        "Leave it out, or set trainer.placement.rollout_devices or rollout_on.",
    ),
    (
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{ACTOR}.strategy": "fsdp", "trainer.n_gpus_per_node": 2},
        f"{ACTOR}.strategy=fsdp keeps a sequence on one device; set "
        f"{ACTOR}.ulysses_sequence_parallel_size=1, or {ACTOR}.strategy=fsdp2.",
    ),
    (
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 3, f"{ACTOR}.strategy": "fsdp2"},
        "does not divide the 3 devices of global_pool. Set it to one of: 1, 3.",
    ),
    ({f"{ACTOR}.ulysses_sequence_parallel_size": 0}, f"{ACTOR}.ulysses_sequence_parallel_size=0 is out of range"),
    (
        {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.engine_kwargs.vllm": {"enable_lora": True}},
        f"{ROLLOUT}.engine_kwargs.vllm: enable_lora=True with {MODEL}.lora_rank=0: vLLM computes adapters of rank 1 to",
    ),
    (
        {
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.engine_kwargs.vllm": {"enable_lora": True},
            f"{ROLLOUT}.load_format": "dummy",
            f"{MODEL}.lora_rank": 8,
        },
        "only adapters are sent, so vLLM must have read the base weights. Set load_format=auto.",
    ),
    ({f"{ROLLOUT}.weight_transfer": "nccl"}, f"{ROLLOUT}.weight_transfer='nccl' is not known"),
    ({"trainer.schedule.max_staleness": -1}, "trainer.schedule.max_staleness=-1 is out of range"),
    (
        {"trainer.schedule.max_staleness": 2},
        "trainer.schedule.max_staleness=2 has no part in trainer.schedule.name=sync",
    ),
    (
        {**PIPELINED, f"{ROLLOUT}.trust_log_probs": True},
        f"{ROLLOUT}.trust_log_probs=True takes the log-probs of the weights that sampled",
    ),
    (
        {f"{ROLLOUT}.trust_log_probs": True, f"{ACTOR}.tis_imp_ratio_cap": 2.0},
        f"{ROLLOUT}.trust_log_probs=True with {ACTOR}.tis_imp_ratio_cap=2.0",
    ),
    (
        {f"{ROLLOUT}.trust_log_probs": True, f"{ROLLOUT}.do_sample": False},
        f"{ROLLOUT}.trust_log_probs=True with {ROLLOUT}.do_sample=False",
    ),
    # Conversations
    ({f"{ROLLOUT}.multi_turn.format": "herms"}, "did you mean hermes? Known: hermes, json."),
    ({f"{ROLLOUT}.agent.default_agent_loop": "tool_agnt"}, "did you mean tool_agent?"),
    ({f"{ROLLOUT}.agent.num_workers": 0}, f"{ROLLOUT}.agent.num_workers=0 is out of range"),
    ({f"{ROLLOUT}.agent.timeout_seconds": 0}, f"{ROLLOUT}.agent.timeout_seconds=0.0 is out of range"),
    ({f"{ROLLOUT}.agent.rewards": "turn"}, "did you mean turns?"),
    ({f"{ROLLOUT}.agent.agent_loop_config_path": "{missing}.yaml"}, f"{ROLLOUT}.agent.agent_loop_config_path"),
    ({f"{ROLLOUT}.multi_turn.max_assistant_turns": -1}, f"{ROLLOUT}.multi_turn.max_assistant_turns=-1 is out of range"),
    ({f"{ROLLOUT}.multi_turn.max_user_turns": -1}, f"{ROLLOUT}.multi_turn.max_user_turns=-1 is out of range"),
    ({f"{ROLLOUT}.multi_turn.max_tokens_per_turn": 0}, f"{ROLLOUT}.multi_turn.max_tokens_per_turn=0 is out of range"),
    ({f"{ROLLOUT}.multi_turn.max_parallel_calls": 0}, f"{ROLLOUT}.multi_turn.max_parallel_calls=0 is out of range"),
    ({f"{ROLLOUT}.multi_turn.max_tool_response_length": 0}, "max_tool_response_length=0 is out of range"),
    ({f"{ROLLOUT}.multi_turn.tool_response_truncate_side": "lft"}, "did you mean left?"),
    ({f"{ROLLOUT}.multi_turn.tool_config_path": "{missing}.yaml"}, f"{ROLLOUT}.multi_turn.tool_config_path"),
    ({**TALKS, f"{ROLLOUT}.name": "hf"}, f"{ROLLOUT}.name=hf samples whole batches; with"),
    ({**TALKS, "algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator=remax wants a greedy response"),
    ({**TALKS, **GRPO, "algorithm.filter_groups.enable": True}, "algorithm.filter_groups.enable=True is not supported"),
    (
        {**TALKS, **REWARD_MODEL, f"{ROLLOUT}.agent.rewards": "turns"},
        f"reward_model.enable=True and {ROLLOUT}.agent.rewards=turns",
    ),
    ({**TALKS, "data.custom_cls.path": __file__, "data.custom_cls.name": "Path"}, "they need the raw chat"),
    (
        {
            **TALKS,
            "trainer.n_gpus_per_node": 2,
            "trainer.placement.name": "split",
            "trainer.placement.rollout_on": ["actor_rollout_ref_pool", "critic_pool"],
        },
        "the rollout is on one pool; name one.",
    ),
    (
        {
            **TALKS,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.tensor_model_parallel_size": 2,
            "trainer.n_gpus_per_node": 2,
        },
        f"{ROLLOUT}.tensor_model_parallel_size=2: workers that share an engine sample in step, and a conversation",
    ),
    # Placement
    ({"trainer.placement.name": "split"}, "trainer.placement.name=split wants at least two devices"),
    (
        {"trainer.placement.name": "split", "trainer.n_gpus_per_node": 3},
        "trainer.n_gpus_per_node=3 does not divide into two equal pools; set trainer.placement.critic_devices",
    ),
    (
        {"trainer.placement.name": "split", "trainer.nnodes": 3},
        "trainer.nnodes=3 does not divide into two equal pools",
    ),
    (
        {"trainer.placement.name": "split", "trainer.n_gpus_per_node": 4, "trainer.placement.critic_devices": 4},
        "trainer.placement.critic_devices=4 leaves a pool without devices: trainer.n_gpus_per_node=4. "
        "Set it from 1 to 3.",
    ),
    ({"trainer.placement.critic_devices": 1}, "has no part in colocated placement"),
    (
        {f"{ACTOR}.strategy": "local", "trainer.n_gpus_per_node": 2},
        f"{ACTOR}.strategy=local works on one device, and global_pool has 2.",
    ),
    (
        {"critic.strategy": "local", "trainer.n_gpus_per_node": 4, "trainer.placement.name": "split"},
        "critic.strategy=local works on one device, and critic_pool has 2.",
    ),
    ({"trainer.cpus_per_device": 0, "trainer.device": "cpu"}, "trainer.cpus_per_device=0 on a CPU"),
    # The run
    ({"trainer.val_only": True}, "trainer.val_only=True has nothing to validate on; set data.val_files."),
    ({"trainer.test_freq": 5}, "trainer.test_freq=5 has nothing to validate on"),
    ({"trainer.log_val_generations": 2}, "trainer.log_val_generations=2 has nothing to validate on"),
    ({"trainer.validation_data_dir": "folder"}, "trainer.validation_data_dir has nothing to validate on"),
    ({"trainer.rollout_data_dir": "{train}"}, "trainer.rollout_data_dir: {train} is a file. Set it to a folder."),
    (
        {"trainer.rollout_data_dir": "d", "trainer.validation_data_dir": "d", "data.val_files": "{train}"},
        "/d is trainer.rollout_data_dir too",
    ),
    ({"trainer.max_actor_ckpt_to_keep": 0}, "trainer.max_actor_ckpt_to_keep=0 is out of range"),
    ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path is not set"),
    (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{missing}"},
        "trainer.resume_from_path: there is no folder {missing}.",
    ),
    (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{empty}"},
        "trainer.resume_from_path: {empty} is no checkpoint: it has no trainer.json.",
    ),
    (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{run}"},
        "{run} is no checkpoint: it has no trainer.json. Set it to one, such as {checkpoint}.",
    ),
    (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{pruned}"},
        "trainer.resume_from_path: {pruned} was pruned and can't be resumed from.",
    ),
    ({"trainer.resume_from_path": "{empty}"}, "trainer.resume_from_path has no part in trainer.resume_mode=auto"),
    ({"trainer.project_name": ""}, "trainer.project_name is empty; set it to a name."),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[" ".join(changes) for changes, _ in BAD])
def test_a_bad_config_is_refused_with_one_message(
    good: dict[str, Any], files: dict[str, Path], changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError) as caught:
        validate(with_changes(good, changes, files))
    [problem] = caught.value.problems
    assert message.format(**files) in problem
    # It begins with a key: one that was set, a section of it, or the one that it does not go with.
    about = problem.split("=")[0].split(":")[0].split()[0]
    assert about in known_keys() or any(key.startswith(about) for key in changes)


def test_problems_of_keys_and_of_values_are_listed_together(good: dict[str, Any], files: dict[str, Path]):
    changes = {"trainer.nodes": 2, "algorithm.gamma": 5, "trainer.seed": "x", "data.train_files": "{missing}"}
    with pytest.raises(ConfigError) as caught:
        validate(with_changes(good, changes, files))
    assert [problem.split()[0].rstrip(":") for problem in caught.value.problems] == [
        "trainer.seed",
        "trainer.nodes",
        "algorithm.gamma=5.0",
        "data.train_files",
    ]


def test_ten_mistakes_of_all_kinds_are_ten_messages(good: dict[str, Any], files: dict[str, Path]):
    changes = {
        "traner.nnodes": 1,
        "trainer.seed": "x",
        "trainer.device": "gpu",
        "algorithm.gamma": 5,
        "algorithm.adv_estimator": "gea",
        "data.val_files": "{text}",
        "actor_rollout_ref.model.path": "{empty}",
        "custom_reward_function.path": "{broken}",
        "trainer.resume_mode": "resume_path",
        f"{ROLLOUT}.name": "vlm",
    }
    with pytest.raises(ConfigError) as caught:
        validate(with_changes(good, changes, files))
    assert len(caught.value.problems) == len(changes)


def test_a_key_of_wrong_type_gets_no_second_message_about_its_default():
    with pytest.raises(ConfigError) as caught:
        validate({"data": {"train_files": 3}, "actor_rollout_ref": {"model": {"path": "org/name"}}})
    assert len(caught.value.problems) == 1


# --------------------------------------------------------------------------------------- nothing is fixed silently


def test_every_value_that_was_given_is_the_value_that_is_used():
    """All numbers, texts and switches at once, each set to something else than its default."""
    others: dict[Any, Callable[[Any], Any]] = {
        bool: lambda old: not old,
        int: lambda old: abs(old or 0) + 1,  # not 0, which is no limit in verl's words
        float: lambda old: (old or 0.0) + 0.5,
        str: lambda old: f"/{old or ''}x",  # absolute, as paths will be
    }
    config = OmegaConf.create()
    given: dict[str, Any] = {}
    for key in known_keys().values():
        kind = next((kind for kind in others if key.hint in (kind, kind | None)), None)
        if not key.is_section and kind is not None:
            given[key.name] = others[kind](key.default)
            OmegaConf.update(config, key.name, given[key.name], force_add=True)
    used = flat(to_dict(load_config(config)))
    assert used == flat(to_dict(PPOConfig())) | given
    assert len(given) > 100


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        is_section = f"{prefix}{name}" in known_keys() and known_keys()[f"{prefix}{name}"].is_section
        found |= flat(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return found


def test_settings_of_roles_that_a_run_has_not_are_told(good: dict[str, Any], files: dict[str, Path]):
    changes = {
        "algorithm.adv_estimator": "grpo",
        f"{ROLLOUT}.n": 2,
        "critic.optim.lr": 2e-5,
        "critic.model.path": "org/critic",
        "reward_model.max_length": 99,
        "distillation.teacher_key": "source",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 3,
    }
    cfg = validate(with_changes(good, changes, files))
    assert unused_settings(cfg) == [
        "critic.model.path=org/critic, critic.optim.lr=2e-05: not used, because algorithm.adv_estimator=grpo has no "
        "critic.",
        "distillation.teacher_key=source: not used, because distillation.enabled=False.",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3: not used, because no KL term is on, so there is no "
        "reference.",
        "reward_model.max_length=99: not used, because reward_model.enable=False.",
    ]
    with_roles = {**changes, "algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True, **REWARD_MODEL}
    with_roles |= {"critic.model.path": "{model}", **TAUGHT}
    assert unused_settings(validate(with_changes(good, with_roles, files))) == []


@pytest.mark.parametrize("strategy", ["torchtitan", "megatron"])
def test_a_teachers_likeliest_tokens_want_a_backend_that_knows_several(
    good: dict[str, Any], files: dict[str, Path], strategy: str
):
    changes = {**TAUGHT, f"{LOSS}.loss_mode": "forward_kl_topk", f"{ACTOR}.strategy": strategy}
    with pytest.raises(ConfigError, match=f"strategy={strategy}, which gives the log-prob of the sampled token alone"):
        validate(with_changes(good, changes, files))


def test_staleness_that_gains_no_time_is_told(good: dict[str, Any], files: dict[str, Path]):
    (note,) = unused_settings(validate(with_changes(good, PIPELINED, files)))
    assert "max_staleness=2: nothing is gained" in note
    apart = {**PIPELINED, "trainer.n_gpus_per_node": 2, "trainer.placement.rollout_devices": 1}
    assert unused_settings(validate(with_changes(good, apart, files))) == []


# ------------------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=b=c", "+foo", "trainer.nnodes", "data.val_files=[a"], "4 problems"),
        (["trainer.nnodes=", "x.y=1", "algorithm.gamma=7"], "trainer.nnodes wants a whole number; got '' (str)."),
        (["trainer.nnodes=1,2"], "Ambiguous value for argument"),
        (["trainer.dry_run=True", "trainer=null"], "trainer=null would drop all keys of the section trainer"),
        (["trainer.dry_run=True", "~trainer"], "~trainer would drop all keys of the section trainer"),
        (["hydra.run.dir={train}/x"], "hydra.run.dir can't be made: "),
        (["hydra.run.dir=/proc/x"], "hydra.run.dir can't be made: "),
        (["--config-dir={yaml}", "--config-name=broken"], "expected ',' or ']'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_mistake_on_the_command_line_ends_in_words(
    train_command: Callable[..., subprocess.CompletedProcess[str]],
    files: dict[str, Path],
    tmp_path: Path,
    arguments: list[str],
    message: str,
):
    (yaml := tmp_path / "yaml").mkdir()
    (yaml / "broken.yaml").write_text("trainer: [1\n")
    done = train_command(*(argument.format(yaml=yaml, **files) for argument in arguments), cwd=files["empty"])
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(files["empty"].iterdir())


def test_a_bad_config_is_answered_without_loading_torch_ray_or_transformers(files: dict[str, Path]):
    code = (
        "import sys\nfrom paceline.trainer.main_ppo import run_ppo\nfrom paceline.errors import ConfigError\n"
        "try:\n    run_ppo({'data': {'train_files': sys.argv[1]}, 'trainer': {'nnodez': 1}})\n"
        "except ConfigError:\n    print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, files["train"]], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

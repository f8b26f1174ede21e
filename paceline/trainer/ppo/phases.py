"""The phases of a step: what each asks of which worker group, and what it makes of the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from paceline.algorithms.advantages import estimator_needs
from paceline.algorithms.kl import KLController
from paceline.algorithms.rollout_correction import RolloutCorrection
from paceline.config import ActorConfig, CriticConfig, PPOConfig, RolloutConfig, ValSamplingConfig
from paceline.config.derived import component_weights, critic_config, update_sizes, uses_sum_pi_squared
from paceline.data.loader import PromptLoader
from paceline.errors import NonFiniteError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.schema import IMAGE_COLUMNS, MODEL_INPUTS
from paceline.single_controller.ray import RayWorkerGroup
from paceline.trainer.ppo.computed_columns import (
    component_metrics,
    compute_advantage,
    compute_rewards,
    draw_rows,
    mean_sum_pi_squared,
    nonfinite_places,
    nonfinite_problem,
)
from paceline.trainer.ppo.conversations import (
    Conversations,
    conversation_metrics,
    group_advantages,
    is_of_conversations,
    join_labels,
    last_rows,
    num_conversations,
    scored_by_turns,
    spread_scores,
)
from paceline.trainer.ppo.corrected_columns import correct_rollout, high_covariance
from paceline.trainer.ppo.dealing import call_balanced, deal_mini_batches, num_mini_batches, share_out
from paceline.trainer.ppo.dynamic_sampling import refill_groups
from paceline.trainer.ppo.old_log_probs import (
    LARGEST_DIFFERENCE,
    bound_of,
    chooses_tokens,
    probs_difference,
    rollout_has_log_probs,
    rollouts_own,
    rows_to_check,
    update_has_log_probs,
)
from paceline.trainer.ppo.policy_versions import staleness_metrics, with_versions
from paceline.trainer.ppo.recorder import Recorder
from paceline.trainer.ppo.rollouts_ahead import RolloutsAhead
from paceline.trainer.ppo.run_log import WAITING, RunLog
from paceline.trainer.ppo.saving import Checkpoints
from paceline.trainer.ppo.schedule import Schedule
from paceline.trainer.ppo.scoring import Scoring, baselines_of, reward_components
from paceline.trainer.ppo.step import Draw, Step, draw_prompts, make_requests
from paceline.trainer.ppo.stream import Stream
from paceline.trainer.ppo.streamed_rollouts import StreamedRollouts
from paceline.trainer.ppo.teachers import TAUGHT, Teachers
from paceline.trainer.ppo.weight_transfer import WeightTransfer
from paceline.trainer.ppo.worker_groups import WorkerGroups

logger = logging.getLogger(__name__)

OF_MODELS = ("old_log_probs", "sum_pi_squared", "ref_log_prob", *TAUGHT, "values")
ANSWERS = (*OF_MODELS, "token_level_scores", "reward_baselines")
"""Columns that come from models and graders."""
ROW = "row"
"""The number of a row in its batch, while a recorded step is dealt."""
COMPARED = "has_both_log_probs"
"""Of a batch whose old log-probs are not the rollout's own, so that the two can be compared."""


class Phases:
    """A method for each phase that `fit` names. `RayPPOTrainer` has the state that they share.

    What a worker group computes comes as a future; `None` is a phase that this run does without.
    """

    cfg: PPOConfig
    schedule: Schedule | Stream
    rollouts: RolloutsAhead | StreamedRollouts
    global_step: int
    train_dataloader: PromptLoader
    scoring: Scoring
    kl_ctrl: KLController
    correction: RolloutCorrection
    log: RunLog
    checkpoints: Checkpoints
    use_critic: bool
    use_reference: bool
    learns_from_rewards: bool
    groups: WorkerGroups
    actor_rollout_wg: RayWorkerGroup
    critic_wg: RayWorkerGroup
    ref_policy_wg: RayWorkerGroup
    rm_wg: RayWorkerGroup | None
    teacher_wg: RayWorkerGroup
    teachers: Teachers | None
    rollout_wg: RayWorkerGroup | None
    weight_transfer: WeightTransfer | None
    conversations: Conversations | None

    def draw_requests(self, purpose: str, step: int) -> tuple[DataProto, DataProto, Draw]:
        """Requests for the next prompts, their labels, and which prompts they are.

        Another purpose in one step draws other random numbers.
        """
        rows, draw = draw_prompts(self.train_dataloader, purpose)
        requests, labels = make_requests(
            rows,
            n=self.cfg.actor_rollout_ref.rollout.n,
            seed=self.cfg.trainer.seed,
            purpose=purpose,
            step=step,
        )
        return requests, labels, draw

    def draw_step(self, number: int) -> Step:
        """A step with its prompts, the next ones of the data."""
        requests, labels, draw = self.draw_requests("training", number)
        step = Step(number, requests, labels, before=draw.before)
        step.add(draw)
        return step

    def issue_rollout(self, step: Step) -> None:
        """Let the weights of `step.version` sample its responses, perhaps ahead of its turn."""
        with self.log.calls_of(step.number, step.version):
            step.responses = self.generate(step.requests, labels=step.labels, version=step.version)
            step.greedy = self.generate_greedy(step.requests, step.version)

    def generate(
        self,
        requests: DataProto,
        sampling: RolloutConfig | ValSamplingConfig | None = None,
        *,
        labels: DataProto | None = None,
        version: int | None = None,
    ) -> DataProtoFuture:
        """Responses to the requests, with their log-probs, by the weights of this version, if one is named; or
        conversations, whose loops read the `labels`."""
        self.set_sampling(requests, sampling)
        requests.meta_info["version"] = version
        if self.conversations is not None:
            labels = DataProto() if labels is None else labels
            return self._issued(self.conversations.issue(requests, labels, requests.meta_info["sampling"], version))
        groups = self.groups.generating
        shares = share_out(len(requests), [group.world_size for group in groups])
        parts = [
            group.generate_sequences(requests[rows])
            for group, rows in zip(groups, shares, strict=True)
            if rows.stop > rows.start
        ]
        return self._issued(DataProtoFuture.concat(parts) if len(parts) > 1 else parts[0])

    def set_sampling(self, requests: DataProto, sampling: RolloutConfig | ValSamplingConfig | None = None) -> None:
        """Say how the responses to these requests are sampled."""
        rollout = self.cfg.actor_rollout_ref.rollout
        sampling = sampling or rollout
        names = ("do_sample", "temperature", "top_p", "top_k")
        requests.meta_info["sampling"] = {
            **{name: getattr(sampling, name) for name in names},
            "ignore_eos": rollout.ignore_eos,
        }

    def generate_greedy(self, requests: DataProto, version: int) -> DataProtoFuture | None:
        """The most likely response to each prompt, if ReMax wants it for a baseline."""
        if not self.learns_from_rewards or not estimator_needs(self.cfg.algorithm.adv_estimator).needs_baseline:
            return None
        rollout = self.cfg.actor_rollout_ref.rollout
        greedy = replace(rollout, do_sample=False)
        return self.generate(requests[:: rollout.n], greedy, version=version)

    def take_responses(self, step: Step) -> None:
        """Wait for the responses. With dynamic sampling, further prompts replace groups of equal scores."""
        assert step.responses is not None  # its rollout was issued
        with self.log.phase(WAITING):
            responses = step.responses.get()
        if "policy_versions" not in responses.batch:
            responses = with_versions(responses, step.version)
        step.batch = join_labels(step.labels, responses)
        if is_of_conversations(step.batch):
            step.metrics |= conversation_metrics(step.batch)
        settings = self.cfg.algorithm.filter_groups
        if settings.enable:
            wanted = self.cfg.data.train_batch_size * self.cfg.actor_rollout_ref.rollout.n
            step.batch, metrics = refill_groups(
                step.batch,
                self.grade,
                lambda purpose: self._draw_responses(step, purpose),
                settings,
                step=step.number,
                wanted=wanted,
                source_key=self.cfg.data.reward_fn_key,
                components=[name for name, weight in component_weights(self.cfg.algorithm).items() if weight],
            )
            step.metrics |= metrics
        if self.schedule.max_staleness:
            step.metrics |= staleness_metrics(step.batch, self.schedule.version)

    def _draw_responses(self, step: Step, purpose: str) -> DataProto:
        """Responses to further prompts, by the newest weights."""
        requests, labels, draw = self.draw_requests(purpose, step.number)
        step.add(draw)
        version = self.schedule.version
        with self.log.calls_of(step.number, version):
            responses = self.generate(requests, labels=labels, version=version)
        return labels.union(with_versions(responses.get(), version))

    def compute_old_log_probs(self, batch: DataProto) -> DataProtoFuture:
        """Log-probs under the policy before the update, and how far those of the rollout are from them.

        All rows are computed, or some: to verify that the rollout's log-probs are the policy's. With bypass_mode of the
        rollout correction, those of the rollout are used as they are.
        """
        if self.correction.bypass:
            return DataProtoFuture.of(rollouts_own(batch))
        if not rollout_has_log_probs(self.cfg):
            return self._compute_all_log_probs(batch)
        rows = batch[rows_to_check(batch.batch["response_mask"], self.cfg.trainer.seed, self.global_step)]
        # The rollout's numbers of these rows come back with the answer: they alone, and not all that lies beside them.
        asked = {"compared": True} if "rollout_log_probs" in batch.batch else {}
        computed = self._infer(self.actor_rollout_wg, self.actor_rollout_wg.compute_log_prob, rows, asked)
        return computed.then(lambda answer: self._verified_log_probs(batch, rows, answer))

    def _compute_all_log_probs(self, batch: DataProto) -> DataProtoFuture:
        def measured(computed: DataProto) -> DataProto:
            computed.meta_info[COMPARED] = True
            computed.meta_info["metrics"] = probs_difference(batch, computed.batch["old_log_probs"])
            return computed

        asked = {"sum_pi_squared": True} if uses_sum_pi_squared(self.cfg) else {}
        computed = self._infer(self.actor_rollout_wg, self.actor_rollout_wg.compute_log_prob, batch, asked)
        return computed.then(measured)

    def _verified_log_probs(self, batch: DataProto, rows: DataProto, computed: DataProto) -> DataProto:
        """The rollout's log-probs, or none where the update's own forward pass gives them; all of the actor's if the
        computed rows differ by more than rounding."""
        beside = computed.select(_present(computed, "rollout_log_probs"), [], [])
        compared = rows.select(["response_mask"], [], []).union(beside) if len(beside.batch.keys()) else rows
        metrics = probs_difference(compared, computed.batch["old_log_probs"])
        found, bound = metrics.get(LARGEST_DIFFERENCE, 0.0), bound_of(self.cfg)
        if bound is not None and not found <= bound:  # NaN is beyond every bound
            logger.warning(
                "step %d: probabilities of sampled tokens differ by up to %.2g between rollout and actor, which is "
                "more than rounding (%.2g); the actor computes the log-probs of all responses",
                self.global_step,
                found,
                bound,
            )
            return self._compute_all_log_probs(batch).get()
        left_out = update_has_log_probs(self.cfg, num_conversations(batch))
        answer = DataProto() if left_out else rollouts_own(batch)
        return replace(answer, meta_info={"metrics": metrics})

    def compute_ref_log_probs(self, batch: DataProto) -> DataProtoFuture | None:
        """Log-probs under the models that stay as they are: the reference, where a KL term needs them, and teachers."""
        reference = None
        if self.use_reference:
            reference = self._infer(self.ref_policy_wg, self.ref_policy_wg.compute_ref_log_prob, batch)
        if self.teachers is None:
            return reference
        group = self.teacher_wg
        taught = self.teachers.issue(
            batch, lambda rows, asked: self._infer(group, group.compute_teacher_log_prob, rows, asked)
        )
        return taught if reference is None else reference.then(lambda answer: answer.union(taught.get()))

    def compute_values(self, batch: DataProto) -> DataProtoFuture | None:
        """The critic's values, where there is a critic."""
        return self._infer(self.critic_wg, self.critic_wg.compute_values, batch) if self.use_critic else None

    def score(self, batch: DataProto, graded: DataProtoFuture | None = None) -> DataProtoFuture | None:
        """Token-level scores; None if dynamic sampling put them there. `graded` if rules were asked before."""
        return None if "token_level_scores" in batch.batch else self.grade(batch, graded=graded)

    def grade(
        self, batch: DataProto, *, validation: bool = False, graded: DataProtoFuture | None = None
    ) -> DataProtoFuture:
        """Token-level scores: rules in processes of their own, the reward model on its pool."""
        by_model = self.cfg.reward_model.validate or not validation
        rm_wg = self.rm_wg if by_model else None
        if not is_of_conversations(batch):
            scores = self.scoring.issue(batch, self.groups.reward, rm_wg, validation=validation, graded=graded)
            return self._issued(scores)
        rewards = self.cfg.actor_rollout_ref.rollout.agent.rewards
        if rewards == "turns":
            return DataProtoFuture.of(scored_by_turns(batch))
        whole = batch[last_rows(batch)]
        graded = self._issued(self.scoring.issue(whole, self.groups.reward, rm_wg, validation=validation))
        return graded.then(lambda scored: spread_scores(batch, scored, with_turns=rewards == "both"))

    def score_baselines(self, step: Step) -> DataProtoFuture | None:
        """The score of the greedy response to the same prompt, for each response."""
        if step.greedy is None:
            return None
        n = self.cfg.actor_rollout_ref.rollout.n
        scores = self.grade(step.labels[::n].union(step.greedy.get()))
        return scores.then(lambda scored: baselines_of(scored, n))

    def join(self, step: Step, *columns: DataProtoFuture | None) -> None:
        """Wait for columns and put them into the batch; meanwhile, a checkpoint of the step before is completed."""
        self.finish_checkpoint()
        for future in columns:
            if future is not None:
                answer = future.get()
                step.metrics |= answer.meta_info.pop("metrics", {})
                step.batch = step.batch.union(answer)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that was begun, if there is one."""
        with self.log.phase("save_checkpoint") if self.checkpoints.is_unfinished else nullcontext():
            self.checkpoints.finish()

    def compute_advantages(self, step: Step) -> None:
        """Rewards (less the KL penalty, if asked), then advantages and returns.

        A number that is not finite ends the run, or leaves the step out: then nothing that outlasts the step changes.
        """
        with self.log.phase("adv"):
            if self._leave_out(step, self._answers):
                return
            step.metrics |= mean_sum_pi_squared(step.batch)
            step.batch, metrics = compute_rewards(step.batch, self.cfg.algorithm, self.kl_ctrl.value)
            step.metrics |= metrics
            if COMPARED in step.batch.meta_info:
                step.batch, metrics = correct_rollout(step.batch, self.correction)
                step.metrics |= metrics
            if not self.learns_from_rewards:
                return
            algorithm = self.cfg.algorithm
            weights = component_weights(algorithm)
            components = reward_components(step.batch, weights) if weights else {}
            step.metrics |= component_metrics(components)

            def with_advantages(rows: DataProto) -> DataProto:
                return compute_advantage(
                    rows,
                    algorithm.adv_estimator,
                    gamma=algorithm.gamma,
                    lam=algorithm.lam,
                    norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                    lam_critic=algorithm.lam_critic,
                    lam_length_alpha=algorithm.lam_length_alpha,
                    reward_components=components if rows is step.batch else reward_components(rows, weights),
                    component_weights=weights,
                )

            step.batch = self._compared(step.batch, with_advantages)
            is_left_out = self._leave_out(step, ("token_level_rewards", "advantages", "returns"))
            if algorithm.use_pf_ppo and not is_left_out:
                seed = self.cfg.trainer.seed
                step.rows_to_train = draw_rows(step.batch, algorithm.pf_ppo, seed=seed, step=step.number)

    def _compared(self, batch: DataProto, compute: Callable[[DataProto], DataProto]) -> DataProto:
        """Advantages of the batch: where they compare responses, those of conversations and not of their rows."""
        needs = estimator_needs(self.cfg.algorithm.adv_estimator)
        if not is_of_conversations(batch) or not needs.needs_groups or needs.needs_sum_pi_squared:
            return compute(batch)
        rewards = self.cfg.actor_rollout_ref.rollout.agent.rewards
        return group_advantages(batch, compute, by_turns=rewards != "end")

    @property
    def _answers(self) -> list[str]:
        """Columns of models and graders that the step rests on, where it has them."""
        return [*ANSWERS, *(["rollout_log_probs"] if self.correction.is_on else [])]

    def _leave_out(self, step: Step, names: Sequence[str]) -> bool:
        """Whether a column is not finite, so that this step updates nothing; an error if the run is to stop then."""
        broken = nonfinite_places(step.batch, names)
        if not broken:
            return False
        problem = f"step {step.number}: {nonfinite_problem(broken)}"
        if self.cfg.trainer.on_nonfinite == "stop":
            raise NonFiniteError(f"{problem}; nothing was updated. trainer.on_nonfinite=skip leaves such steps out.")
        logger.warning("%s; this step updates nothing", problem)
        counts = {f"training/nonfinite/{name}": float(places.sum()) for name, places in broken.items()}
        step.metrics |= {"training/skipped_step": 1.0, **counts}
        step.is_left_out = True
        return True

    def update_critic(self, step: Step) -> DataProtoFuture | None:
        """Fit the values to the returns."""
        if not self.use_critic or step.is_left_out:
            return None
        columns = [*MODEL_INPUTS, "values", "returns", *_present(step.batch, "loss_mask")]
        dealt = self._deal(step, columns, critic_config(self.cfg), self.critic_wg)
        update = self._issued(self.critic_wg.update_critic(dealt), is_update=True)
        Recorder.note_update(step, "critic", self.critic_wg)
        return update

    def update_actor(self, step: Step) -> DataProtoFuture | None:
        """Improve the policy, also where it generates; not while the critic warms up."""
        if step.number < self.cfg.trainer.critic_warmup or step.is_left_out:
            return None
        actor = self.cfg.actor_rollout_ref.actor
        columns = [*MODEL_INPUTS, *(["advantages"] if self.learns_from_rewards else [])]
        beside = ("old_log_probs", "rollout_is_weights", "loss_mask", "top_tokens", *TAUGHT)
        columns += _present(step.batch, *IMAGE_COLUMNS, *beside)
        columns += ["ref_log_prob"] if actor.use_kl_loss else []
        seed = [self.cfg.trainer.seed, step.number]
        dealt = self._deal(
            step,
            columns,
            actor,
            self.actor_rollout_wg,
            columns_of=(lambda rows, number: high_covariance(rows, actor.policy_loss, [*seed, number]))
            if chooses_tokens(self.cfg)
            else None,
        )
        dealt.meta_info["version"] = self.schedule.version + 1
        if self.rollout_wg is None:
            self.rollouts.before_new_weights()
        with self.log.calls_of(step.number, self.schedule.version + 1):
            update = self._issued(self.actor_rollout_wg.update_actor(dealt), is_update=True)
        Recorder.note_update(step, "actor", self.actor_rollout_wg)
        if self.rollout_wg is not None:
            self.rollouts.before_new_weights()
        with self.log.calls_of(step.number, self.schedule.version + 1):
            self.send_weights(self.schedule.version + 1)
        self.rollouts.new_weights()
        return update

    def send_weights(self, version: int) -> None:
        """Bring the policy to a rollout on other devices. That runs beside the critic's update, or behind it where the
        critic has these devices too."""
        if self.weight_transfer is not None:
            self._issued(self.weight_transfer.send(version), is_update=True)

    def _issued(self, future: DataProtoFuture, *, is_update: bool = False) -> DataProtoFuture:
        """With less than full overlap, what was issued must end before the next call."""
        overlap = self.cfg.trainer.overlap
        if overlap == "none" or (overlap == "updates" and not is_update):
            future.get()
        return future

    def _infer(
        self,
        group: RayWorkerGroup,
        method: Callable[[DataProto], DataProtoFuture],
        batch: DataProto,
        asked: Mapping[str, object] | None = None,
    ) -> DataProtoFuture:
        """A data-parallel call on the model inputs, with rows dealt so that all devices have the same work.

        `asked` tells the worker what it is to answer besides.
        """
        beside = _present(batch, *IMAGE_COLUMNS)
        beside += ["rollout_log_probs"] if asked and "compared" in asked else []
        inputs = batch.select(batch_keys=[*MODEL_INPUTS, *beside], non_tensor_batch_keys=[])
        inputs.meta_info = {**inputs.meta_info, **(asked or {})}
        shards = group.world_size if self.cfg.trainer.balance_batch else 1
        return self._issued(call_balanced(method, inputs, shards))

    def _deal(
        self,
        step: Step,
        columns: list[str],
        section: ActorConfig | CriticConfig,
        group: RayWorkerGroup,
        columns_of: Callable[[DataProto, int], dict[str, Tensor]] | None = None,
    ) -> DataProto:
        mini_batch_size, passes = update_sizes(section)
        batch = step.batch.select(batch_keys=columns, non_tensor_batch_keys=[], meta_info_keys=[])
        if step.recorded is not None:
            batch = batch.union(DataProto.from_dict({ROW: torch.arange(len(batch))}))
        rows_per_mini_batch = mini_batch_size * self.cfg.actor_rollout_ref.rollout.n
        if (conversations := num_conversations(step.batch)) < len(batch):  # more rows, and as many optimizer steps
            rows_per_mini_batch = -(-len(batch) // num_mini_batches(conversations, rows_per_mini_batch))
        dealt = deal_mini_batches(
            batch if step.rows_to_train is None else batch[step.rows_to_train],
            rows_per_mini_batch=rows_per_mini_batch,
            num_shards=group.world_size,
            epochs=passes,
            shuffle_seed=[self.cfg.trainer.seed, step.number] if section.shuffle else None,
            balance=self.cfg.trainer.balance_batch,
            columns_of=columns_of,
        )
        if step.recorded is not None:
            role = "critic" if group is self.critic_wg else "actor"
            step.order[role] = dealt.pop(batch_keys=[ROW]).batch[ROW]
        return dealt


def _present(batch: DataProto, *names: str) -> list[str]:
    """Those of these columns that the batch has."""
    return [name for name in names if name in batch.batch]

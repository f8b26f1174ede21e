"""The worker of the role Teacher: frozen models that say how likely each sampled token is to them."""

from __future__ import annotations

from paceline.config import PPOConfig
from paceline.config.derived import FORWARD_ROWS, actor_goes_by_tokens, by_tokens, teacher_models
from paceline.engine import Engine
from paceline.engine.top_tokens import Likeliest
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch
from paceline.workers.role_worker import RoleWorker, RunContext, micro_batches, role_method


class TeacherWorker(RoleWorker):
    """All teachers of a run, on one pool."""

    leaves_inputs_alone = True

    def __init__(self, config: PPOConfig, role: str, run: RunContext) -> None:
        super().__init__(role, run)
        self.config = config
        self.engines: dict[str, Engine] = {}

    @property
    def trained_engine(self) -> Engine | None:
        return None

    @role_method(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        offload = self.config.distillation.fsdp_config
        for name, model in teacher_models(self.config).items():
            self.engines[name] = self.build_engine(None, model, kind="causal_lm", offload=offload)

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """What the teacher `meta_info["teacher"]` says: the log-probs of the responses or, with `top_k`, so many of its
        likeliest tokens with theirs, of the first `vocabulary`.

        At the temperature of the rollout, as the policy's own are, so that the distance is least where they agree.
        """
        asked, section = data.meta_info, self.config.distillation
        rows = section.micro_batch_size_per_gpu
        goes_by_tokens = by_tokens(None, rows, otherwise=actor_goes_by_tokens(self.config.actor_rollout_ref.actor))
        output = self.engines[asked["teacher"]].infer_batch(
            data,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            likeliest=Likeliest(asked["top_k"], asked["vocabulary"]) if "top_k" in asked else None,
            **micro_batches(goes_by_tokens, rows, section.forward_max_token_len_per_gpu, usual_rows=FORWARD_ROWS),
        )
        if "top_k" in asked:
            return DataProto.from_dict(tensors={name: output[name] for name in ("top_tokens", "top_log_probs")})
        return DataProto.from_dict(tensors={"teacher_log_probs": output["log_probs"]})

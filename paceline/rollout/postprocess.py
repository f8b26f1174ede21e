"""From padded prompt columns to token lists, and from completions back to the columns of a batch."""

from __future__ import annotations

import torch

from paceline.errors import DataError
from paceline.protocol import DataProto
from paceline.protocol.image_columns import GRIDS, PIXELS, ImageInputs, image_inputs
from paceline.rollout.rollout_interface import Completion


def prompt_token_lists(data: DataProto) -> list[list[int]]:
    """The prompts' token ids without padding, from `input_ids` and `attention_mask` (batch, prompt)."""
    rows = zip(data.batch["input_ids"], data.batch["attention_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def prompt_images(data: DataProto) -> list[ImageInputs] | None:
    """The images of each prompt; None where prompts are text."""
    if PIXELS not in data.batch:
        return None
    rows = zip(data.batch[PIXELS], data.batch[GRIDS], strict=True)
    return [image_inputs(pixels[None], grids[None]) for pixels, grids in rows]


def to_batch(
    prompts: DataProto,
    completions: list[Completion],
    response_length: int,
    pad_token_id: int,
    *,
    with_versions: bool = False,
) -> DataProto:
    """The batch of prompts and their responses.

    Args:
        prompts: input_ids and attention_mask (batch, prompt), left-padded; not changed.
        completions: one per prompt.
        response_length: width to which responses are padded on the right.
        with_versions: add policy_versions (batch, response).

    Returns:
        prompts (batch, prompt); responses, response_mask, rollout_log_probs (batch, response);
        input_ids, attention_mask, position_ids (batch, prompt + response). The response mask is 1 on the response's
        tokens, the end-of-sequence token included, also where that is the padding token.
    """
    prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    if len(completions) != len(prompt_ids):
        raise DataError(
            f"there are {len(prompt_ids)} prompts and {len(completions)} completions; one per prompt is needed."
        )
    responses = torch.full((len(completions), response_length), pad_token_id, dtype=torch.long)
    response_mask = torch.zeros(len(completions), response_length, dtype=torch.long)
    log_probs = torch.zeros(len(completions), response_length, dtype=torch.float32)
    versions = torch.zeros(len(completions), response_length if with_versions else 0, dtype=torch.long)
    for row, completion in enumerate(completions):
        length = len(completion.token_ids)
        if length > response_length:
            raise DataError(
                f"response {row} has {length} tokens, more than the response length {response_length}; "
                "sample with max_tokens of at most data.max_response_length."
            )
        responses[row, :length] = torch.tensor(completion.token_ids, dtype=torch.long)
        response_mask[row, :length] = 1
        log_probs[row, :length] = torch.tensor(completion.log_probs, dtype=torch.float32)
        if with_versions:
            versions[row, :length] = torch.tensor(completion.versions, dtype=torch.long)
    attention_mask = torch.cat([prompt_mask.long(), response_mask], dim=1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": responses,
            "input_ids": torch.cat([prompt_ids, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "rollout_log_probs": log_probs,
            **({"policy_versions": versions} if with_versions else {}),
            **{name: prompts.batch[name] for name in (PIXELS, GRIDS) if name in prompts.batch},
        }
    )

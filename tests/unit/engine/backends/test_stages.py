"""A model in stages on several ranks computes and learns what it does in one piece."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.engine.backends.stages import Stages

COUNT, WIDTH, ROWS = 3, 4, 5


def layers() -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)]
    for layer in made:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


def micro_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]


def loss_of(answers: Tensor) -> Tensor:
    return (answers[0] * answers[1]).sum()


def run_rank(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=COUNT)
    stages, layer = Stages(dist.group.WORLD), layers()[rank]

    def answers_to(states: Tensor) -> Tensor:
        hidden = layer(states if stages.is_first else stages.hidden_before((ROWS, WIDTH), torch.device("cpu"))).tanh()
        if not stages.is_last:
            return stages.answers_behind(hidden, (2, ROWS))
        answers = hidden[:, :2].T
        stages.tell(answers)
        return answers

    seen = []
    for states in micro_batches():
        with torch.no_grad():
            seen.append(answers_to(states))
        loss_of(answers_to(states)).backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    torch.save({"answers": torch.stack(seen), "gradients": gradients}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_stages_compute_and_learn_as_one_model(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forked = multiprocessing.get_context("fork")  # torch is loaded already
    ranks = [forked.Process(target=run_rank, args=(rank, port, tmp_path)) for rank in range(COUNT)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * COUNT

    whole, answers = layers(), []
    for states in micro_batches():
        for layer in whole:
            states = layer(states).tanh()
        answers.append(states[:, :2].T)
        loss_of(answers[-1]).backward()
    for rank, layer in enumerate(whole):
        seen = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(seen["answers"], torch.stack(answers).detach())
        for found, parameter in zip(seen["gradients"], layer.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)

"""Random masked batches for property tests, and the changes under which results must not (or only so) change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

from paceline.algorithms.aggregation import LossNormaliser

QUICK = settings(max_examples=50, deadline=None, derandomize=True)

COLUMNS = (
    "log_prob",
    "old_log_prob",
    "ref_log_prob",
    "advantages",
    "rewards",
    "values",
    "old_values",
    "returns",
)


@dataclass(frozen=True)
class Batch:
    """Random columns, (rows, width) float64 so that a wrong formula can't hide behind rounding."""

    mask: torch.Tensor
    columns: dict[str, torch.Tensor]
    groups: list[str]

    def __getitem__(self, column: str) -> torch.Tensor:
        return self.columns[column]

    def with_columns(self, **columns: torch.Tensor) -> Batch:
        return Batch(self.mask, {**self.columns, **columns}, self.groups)

    def rows(self, order: list[int]) -> Batch:
        columns = {name: column[order] for name, column in self.columns.items()}
        return Batch(self.mask[order], columns, [self.groups[row] for row in order])

    def padded_right(self, width: int) -> Batch:
        def pad(x: torch.Tensor, value: float) -> torch.Tensor:
            return torch.cat([x, torch.full((len(x), width), value, dtype=x.dtype)], dim=1)

        columns = {name: pad(column, 7.0) for name, column in self.columns.items()}
        return Batch(pad(self.mask, 0), columns, self.groups)

    def with_padding_row(self) -> Batch:
        """One more row: a copy of the first with nothing valid, as dispatch adds it."""
        longer = self.rows([*range(len(self.mask)), 0])
        longer.mask[-1] = 0
        return longer

    def with_garbage(self) -> Batch:
        """NaN, infinities and a huge number outside the mask."""
        garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=torch.float64)
        filling = garbage.repeat(self.mask.numel())[: self.mask.numel()].view_as(self.mask)
        columns = {name: torch.where(self.mask.bool(), x, filling) for name, x in self.columns.items()}
        return Batch(self.mask, columns, self.groups)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 1) -> Batch:
    """Up to 5 rows of up to 6 tokens; masks with holes, right padding and whole rows of padding."""
    num_rows = draw(st.integers(min_rows, 5))
    width = draw(st.integers(1, 6))
    bits = draw(st.integers(0, 2 ** (num_rows * width) - 1))
    mask = torch.tensor([bits >> position & 1 for position in range(num_rows * width)]).view(num_rows, width)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    numbers = torch.randn(len(COLUMNS), num_rows, width, dtype=torch.float64, generator=generator)
    groups = draw(st.text("abc", min_size=num_rows, max_size=num_rows))
    return Batch(mask, dict(zip(COLUMNS, numbers.unbind(), strict=True)), list(groups))


def normaliser_of(mask: torch.Tensor) -> LossNormaliser:
    """The normaliser of a whole mini-batch with this mask."""
    return LossNormaliser(float(mask.bool().sum()), float(mask.bool().any(dim=-1).sum()), mask.shape[-1])


def sum_all(loss_mat: torch.Tensor) -> torch.Tensor:
    """The simplest aggregation."""
    return loss_mat.sum()


def assert_equal(actual: torch.Tensor, expected: torch.Tensor | list[list[float]] | float) -> None:
    """Equal up to the rounding of float64 sums."""
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-7, atol=1e-9)


def tensor(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)

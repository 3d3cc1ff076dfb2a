"""A run's numbers in TensorBoard: `pip install 'fedbilevel[tensorboard]'`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from fedbilevel.errors import InputError
from fedbilevel.runs.experiment import Snapshot


class TensorBoard:
    """An observer for `fedbilevel.solve` and for runs, which writes every row of metrics against rounds.

    Use it in a `with` block, so that the last rows are on disk when the block ends.
    """

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise InputError("TensorBoard needs tensorboardX: pip install 'fedbilevel[tensorboard]'") from None
        self._writer = SummaryWriter(str(folder))

    def __call__(self, moment: Snapshot) -> None:
        """Write the moment's numbers, if metrics were due."""
        if moment.metrics is None:
            return
        for name, value in moment.row().items():
            if value is not None:
                self._writer.add_scalar(name, value, moment.totals.rounds)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.close()

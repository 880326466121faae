"""Tells a person on standard error how far a fetch has come: a bar on a terminal, one line anywhere else."""

from twostep.terminal import StatusLine, bar


def megabytes(count: int) -> str:
    """Bytes in decimal megabytes, as package indexes and disks count them."""
    return f"{count / 1e6:.1f} MB"


class Progress(StatusLine):
    def advance(self, done: int, total: int) -> None:
        """Redraws the bar; `total` may be short of the truth."""
        self.show(f"  {bar(done, total)} {megabytes(done)} of {megabytes(total)}")

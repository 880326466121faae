"""What a batch says of itself on standard error, on a terminal and elsewhere."""

from io import StringIO

from twostep.engine.request_progress import RequestProgress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_every_ten_seconds_without_a_terminal() -> None:
    stream, clock = StringIO(), Clock()
    progress = RequestProgress(8, stream=stream, clock=clock)
    for _ in range(5):
        clock.now_s += 4
        progress.finished(tokens=50)
    assert stream.getvalue() == "twostep: 3/8 requests, 12 output tokens/s, 0:12, 0:20 left\n"


def test_one_line_is_written_anew_on_a_terminal() -> None:
    stream, clock = Terminal(), Clock()
    progress = RequestProgress(2, stream=stream, clock=clock)
    for _ in range(2):
        clock.now_s += 2
        progress.finished(tokens=50)
    progress.clear()
    shown = [text.strip() for text in stream.getvalue().split("\r") if text.strip()]
    assert shown == [
        "━" * 8 + " " * 8 + " 1/2 requests, 25 output tokens/s, 0:02, 0:02 left",
        "━" * 16 + " 2/2 requests, 25 output tokens/s, 0:04",
    ]
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r")


def test_a_terminal_is_not_flooded() -> None:
    stream, clock = Terminal(), Clock()
    progress = RequestProgress(1000, stream=stream, clock=clock)
    for _ in range(1000):
        clock.now_s += 0.001
        progress.finished(tokens=1)
    assert stream.getvalue().count("requests") in (9, 10)


def test_requests_of_an_earlier_run_say_nothing_of_the_speed() -> None:
    stream, clock = StringIO(), Clock()
    progress = RequestProgress(100, before=90, stream=stream, clock=clock)
    clock.now_s += 3600
    progress.finished(tokens=7200)
    assert stream.getvalue() == "twostep: 91/100 requests, 2 output tokens/s, 1:00:00, 9:00:00 left\n"


def test_nothing_to_do_and_no_time_passed() -> None:
    assert RequestProgress(0, clock=Clock()).summary() == "0/0 requests, - output tokens/s, 0:00"

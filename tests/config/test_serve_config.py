"""Settings of `twostep serve`: which source overrides which, what set a value, what is refused and in which words."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from twostep.config.configs import EngineConfig, SchedulerSettings, ServerConfig, serve_settings
from twostep.config.effective import config_answer, config_schema, effective_lines
from twostep.config.settings import BY_NAME, ENGINE_PARTS, FLAGGED, PRESETS, of_parts
from twostep.config.sources import service_links, value_of
from twostep.config.values import MemoryBytes, MemoryShare, text_of
from twostep.core.policies import TimeBudget, TokenBudget, Unchunked
from twostep.engine.backend import Capabilities
from twostep.errors import InvalidParameterError
from twostep.store.catalogue import DEFAULT_MODEL


def configs(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None
) -> tuple[ServerConfig, EngineConfig]:
    settings = serve_settings(flags or {}, environ or {})
    return settings.server, settings.engine


def set_by(config: ServerConfig, name: str) -> tuple[Any, str]:
    [row] = [row for row in config.effective if row.name == name]
    return row.value, row.set_by


def refusal(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        configs(flags, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "config"), [(["server"], ServerConfig), (ENGINE_PARTS, EngineConfig)])
def test_fields_are_the_settings(parts: list[Any], config: Any) -> None:
    settable = {setting.name for setting in of_parts(*parts)}
    assert {field.name for field in fields(config)} - {"effective"} == settable


def test_a_scheduler_s_fields_are_its_settings() -> None:
    fields_ = {field.name for field in fields(SchedulerSettings)}
    assert fields_ == {setting.name for setting in of_parts("scheduler")} | {"blocks", "windows"}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_default_is_a_value_that_may_be_given(name: str) -> None:
    setting = BY_NAME[name]
    assert value_of(setting, setting.default) == setting.default


def test_the_default_model_is_in_the_catalogue() -> None:
    assert BY_NAME["model"].default == DEFAULT_MODEL


# --- precedence ---------------------------------------------------------------------------------------------------


def test_nobody_said_anything() -> None:
    server, engine = configs()
    assert set_by(server, "port") == (8000, "default")
    assert set_by(server, "host") == ("127.0.0.1", "default")
    assert set_by(server, "preset") == ("chat", "default")
    assert set_by(server, "max_num_seqs") == (engine.max_num_seqs, "preset chat")


def test_a_flag_goes_before_a_variable_that_before_the_file_that_before_the_preset(toml: Path) -> None:
    toml.write_text("max_num_seqs = 3\nport = 3\nthreads = 1\n")
    flags = {"config": str(toml), "port": "1"}
    server, engine = configs(flags, {"TWOSTEP_PORT": "2", "TWOSTEP_MAX_NUM_SEQS": "2"})
    assert (server.port, engine.max_num_seqs, engine.threads) == (1, 2, 1)
    assert set_by(server, "port") == (1, "--port")
    assert set_by(server, "max_num_seqs") == (2, "TWOSTEP_MAX_NUM_SEQS")
    assert set_by(server, "threads") == (1, str(toml))
    assert set_by(server, "chunking") == (text_of(engine.chunking), "preset chat")


def test_the_file_may_choose_the_preset_and_a_variable_the_file(toml: Path) -> None:
    toml.write_text('preset = "batch"\nmodel = "mine.gguf"\nmax_num_seqs = 7\n')
    server, engine = configs({}, {"TWOSTEP_CONFIG": str(toml)})
    assert set_by(server, "preset") == ("batch", str(toml))
    assert (engine.chunking, engine.max_num_seqs) == (PRESETS["batch"]["chunking"], 7)
    assert (server.served_model_name, set_by(server, "model")) == (("mine",), ("mine.gguf", str(toml)))


def test_settings_of_every_kind_from_everywhere(toml: Path) -> None:
    toml.write_text(
        'host = "::1"\napi_key = ["a", "b"]\nallowed_origins = "*"\nrequest_timeout_s = 5\npriority_preempts = true\n'
        'kv_memory = 0.25\nrecord = "run.rec"\n'
    )
    given = {
        "TWOSTEP_HOST": "::1", "TWOSTEP_API_KEY": "a, b", "TWOSTEP_ALLOWED_ORIGINS": "*",
        "TWOSTEP_REQUEST_TIMEOUT_S": "5", "TWOSTEP_PRIORITY_PREEMPTS": "yes", "TWOSTEP_KV_MEMORY": "0.25",
        "TWOSTEP_RECORD": "run.rec",
    }  # fmt: skip
    flags = {
        "host": ["::1"], "api_key": ["a", "b"], "allowed_origins": ["*"], "request_timeout_s": "5",
        "priority_preempts": True, "kv_memory": "0.25", "record": "run.rec",
    }  # fmt: skip
    for server, engine in (configs({"config": str(toml)}), configs({}, given), configs(flags)):
        assert (server.host, server.api_key, server.allowed_origins) == (("::1",), ("a", "b"), ("*",))
        assert (server.request_timeout_s, engine.priority_preempts) == (5.0, True)
        assert (engine.kv_memory, engine.record) == (MemoryShare(0.25), Path("run.rec"))


def test_kv_memory_in_bytes() -> None:
    assert configs({"kv_memory": "2GiB"})[1].kv_memory == MemoryBytes(2 << 30)


# --- presets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_contradicts_nothing_and_only_sets_defaults(preset: str) -> None:
    server, engine = configs({"preset": preset})
    assert {row.name for row in server.effective if row.set_by == f"preset {preset}"} == {
        "enable_prefix_caching", "chunking", "itl_budget", "max_num_seqs", "max_num_batched_tokens",
    }  # fmt: skip
    server, engine = configs({"preset": preset, "enable_prefix_caching": False, "max_num_seqs": "5"})
    assert (engine.enable_prefix_caching, engine.max_num_seqs) == (False, 5)


def test_presets_lean_to_what_they_are_for() -> None:
    chat, rag, batch = (configs({"preset": name})[1] for name in ("chat", "rag", "batch"))
    assert chat.enable_prefix_caching
    assert rag.enable_prefix_caching
    assert chat.max_num_batched_tokens < rag.max_num_batched_tokens <= batch.max_num_batched_tokens
    assert batch.max_num_seqs > chat.max_num_seqs
    assert isinstance(chat.chunking, TimeBudget)
    assert isinstance(rag.chunking, TimeBudget)
    assert batch.chunking == TokenBudget(batch.max_num_batched_tokens)


# --- another name for one thing -----------------------------------------------------------------------------------


def test_an_itl_budget_is_a_chunk_policy() -> None:
    server, engine = configs({"itl_budget": "12.5"})
    assert engine.chunking == TimeBudget(12_500_000)
    assert set_by(server, "chunking") == ("time=12.5", "--itl-budget")
    assert set_by(server, "itl_budget") == (12.5, "--itl-budget")


def test_either_name_goes_by_who_said_it() -> None:
    server, engine = configs({"itl_budget": "30"}, {"TWOSTEP_CHUNKING": "tokens=64"})
    assert engine.chunking == TimeBudget(30_000_000)
    server, engine = configs({"chunking": "tokens=64"}, {"TWOSTEP_ITL_BUDGET": "30"})
    assert (engine.chunking, set_by(server, "itl_budget")) == (TokenBudget(64), (None, "--chunking"))


def test_both_names_in_one_place_are_refused() -> None:
    problem = refusal({"itl_budget": "30", "chunking": "none"})
    assert problem == "--itl-budget and --chunking set the same thing; give one of the two"


def test_an_itl_budget_may_be_chosen_for_each_step(tmp_path: Path) -> None:
    """From every door; what is chosen is in the plans and the metrics."""
    toml = tmp_path / "server.toml"
    toml.write_text('itl_budget = "auto"\n')
    doors = [
        configs({"itl_budget": "auto"}),
        configs({"chunking": "time=auto"}),
        configs({}, {"TWOSTEP_ITL_BUDGET": "auto"}),
        configs({"config": str(toml)}),
    ]
    assert {engine.chunking for _, engine in doors} == {TimeBudget(None)}
    assert {set_by(server, "itl_budget")[0] for server, _ in doors} == {"auto"}
    assert EngineConfig(itl_budget="auto").to_json()["chunking"] == "time=auto"


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_an_itl_budget_is_a_time(budget: str) -> None:
    assert refusal({"itl_budget": budget}).startswith(
        f"--itl-budget is {budget!r}; it has to be auto or milliseconds from 0.001"
    )


@pytest.mark.parametrize("flags", [["a,b"], ["a", "b"], ["a, b"]])
def test_a_model_may_have_several_names(flags: list[str], toml: Path) -> None:
    toml.write_text('served_model_name = ["a", "b"]\n')
    for server, _ in (configs({"served_model_name": flags}), configs({"config": str(toml)})):
        assert server.served_model_name == ("a", "b")
        assert next(row.value for row in server.effective if row.name == "served_model_name") == "a,b"


def test_hosts_may_be_several() -> None:
    server, _ = configs({"host": ["127.0.0.1", "::1"]})
    assert (server.host, set_by(server, "host")) == (("127.0.0.1", "::1"), ("127.0.0.1,::1", "--host"))
    for host in ("127.0.0.1,", ",", ""):
        assert refusal({"host": [host]}).startswith(f"--host is {host!r}; it has to be texts")


# --- what is refused ----------------------------------------------------------------------------------------------


NOT_ALLOWED = [
    ("port", "many", "an integer from 0 to 65535"),
    ("port", "65536", "an integer from 0 to 65535"),
    ("drain_s", "long", "a number from 0"),
    ("drain_s", "nan", "a number from 0"),
    ("drain_s", "inf", "a number from 0"),
    ("max_queue", "-1", "an integer from 0"),
    ("stall_s", "0", "a number from 0.1"),
    ("root_path", "llm/", "a path such as /llm, without a slash at its end"),
    ("log", "xml", "text, json or off"),
    ("preset", "fast", "chat, rag or batch"),
    ("block_size", "32", "16"),
    ("max_num_seqs", "0", "an integer from 1"),
    ("max_num_batched_tokens", "0", "an integer from 1"),
    ("max_model_len", "1", "an integer from 2"),
    ("chunking", "often", "none, tokens=N, time=MILLISECONDS or time=auto"),
    ("chunking", "tokens=0", "none, tokens=N, time=MILLISECONDS or time=auto"),
    ("chunking", f"time={'9' * 400}", "none, tokens=N, time=MILLISECONDS or time=auto"),
    ("batching", "static", "continuous, static=SIZE or static=SIZE,wait=MILLISECONDS"),
    ("admission", "luck", "priority, fcfs or shortest-prefill"),
    ("kv_memory", "much", "a share above 0 and at most 1, such as 0.5, a size in B"),
    ("kv_memory", "0.1B", "a share above 0 and at most 1, such as 0.5, a size in B"),
    ("threads", "100000", f"an integer from 1 to the number of CPUs, which is {os.cpu_count()} here"),
    ("record", "", "the path of a file"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "allowed"), NOT_ALLOWED)
def test_a_value_that_is_not_allowed_is_refused_in_the_same_words_from_everywhere(
    toml: Path, name: str, value: str, allowed: str
) -> None:
    """Named as the user called it: by flag, by variable, by the key of a file."""
    setting = BY_NAME[name]
    shown = repr(value) if len(repr(value)) <= 60 else f"{value!r:.60}..."
    problem = f"is {shown}; it has to be {allowed}"
    assert refusal({name: value}).startswith(f"{setting.flag} {problem}")
    assert refusal({}, {setting.variable: value}).startswith(f"{setting.variable} {problem}")
    toml.write_text(f'{name} = "{value}"\n')
    assert refusal({"config": str(toml)}).startswith(f"{toml}: {name} {problem}")
    if setting.part in ENGINE_PARTS:
        with pytest.raises(InvalidParameterError) as caught:
            EngineConfig(**{name: value})
        assert str(caught.value).startswith(f"{name} {problem}")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"api_key": ["a", ""]}, "--api-key is not shown; it has to be texts, separated by commas, none of them empty"),
        ({"config": "no/such.toml"}, "config: no/such.toml: No such file or directory"),
    ],
)
def test_values_that_are_none(flags: dict[str, Any], problem: str) -> None:
    assert refusal(flags).startswith(problem)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"admission": "fcfs", "priority_preempts": True},
            "--priority-preempts needs an order by priority, but --admission is fcfs: the preempted requests would be "
            "admitted again first",
        ),
        (
            {"max_num_seqs": "600", "max_num_batched_tokens": "512"},
            "--max-num-batched-tokens is 512; it has to be at least 856: 600 for decodes (--max-num-seqs), 256 for "
            "prompts in prefill",
        ),
        (
            {"max_num_batched_tokens": "100"},
            "--max-num-batched-tokens is 100; it has to be at least 257: 1 for decodes (max_num_seqs (preset chat, "
            "moved by --max-num-batched-tokens)), 256 for prompts in prefill",
        ),
        (
            {"chunking": "tokens=4096", "max_num_batched_tokens": "1024"},
            "--chunking is tokens=4096, but --max-num-batched-tokens is 1024: no step holds such a chunk",
        ),
        (
            {"chunking": "none", "max_num_batched_tokens": "1024", "max_model_len": "2048"},
            "--chunking is none and --max-model-len is 2048, but --max-num-batched-tokens is 1024: no step holds the "
            "longest prompt",
        ),
    ],
)
def test_contradictions_are_refused_with_the_reason(flags: dict[str, Any], problem: str) -> None:
    assert refusal(flags).startswith(problem)


@pytest.mark.parametrize(
    ("flags", "name", "value", "because"),
    [
        ({"chunking": "none"}, "max_num_batched_tokens", None, "--chunking"),
        ({"chunking": "none", "max_model_len": "2048"}, "max_num_batched_tokens", 2048, "--chunking"),
        ({"chunking": "none", "max_model_len": "20"}, "max_num_batched_tokens", 32, "--chunking"),
        ({"chunking": "none", "max_num_seqs": "600"}, "max_num_batched_tokens", None, "--chunking"),
        ({"chunking": "tokens=4096"}, "max_num_batched_tokens", 4096, "--chunking"),
        ({"max_num_seqs": "600"}, "max_num_batched_tokens", 856, "--max-num-seqs"),
        ({"max_num_batched_tokens": "280"}, "max_num_seqs", 24, "--max-num-batched-tokens"),
        ({"chunking": "none", "max_num_batched_tokens": "20"}, "max_num_seqs", 20, "--max-num-batched-tokens"),
        ({"preset": "batch", "max_num_batched_tokens": "600"}, "chunking", "tokens=600", "--max-num-batched-tokens"),
        ({"preset": "batch", "max_num_batched_tokens": "400"}, "max_num_seqs", 144, "--max-num-batched-tokens"),
        ({"preset": "rag", "max_num_seqs": "1000"}, "max_num_batched_tokens", 1256, "--max-num-seqs"),
    ],
)
def test_a_setting_moves_defaults_that_contradict_it(
    flags: dict[str, Any], name: str, value: object, because: str
) -> None:
    server, _ = configs(flags)
    assert set_by(server, name) == (value, f"preset {flags.get('preset', 'chat')}, moved by {because}")
    for given in flags.keys() - {"preset"}:
        assert set_by(server, given)[1].startswith("--"), "the user's word stays"


def test_defaults_that_contradict_nothing_stay() -> None:
    flags = {"chunking": "tokens=512", "max_num_seqs": "256", "max_model_len": "8192"}
    assert set_by(configs(flags)[0], "max_num_batched_tokens") == (512, "preset chat")
    assert set_by(configs({"max_num_batched_tokens": "288"})[0], "max_num_seqs") == (32, "preset chat")


@pytest.mark.parametrize("preset", PRESETS)
def test_no_single_setting_contradicts_a_preset(preset: str) -> None:
    """Whatever a user says alone, in a flag, in the environment or in a file, is served."""
    alone = [{"chunking": "none"}, {"itl_budget": "5"}, {"admission": "fcfs"}, {"priority_preempts": "true"}]
    alone += [{"chunking": f"tokens={tokens}"} for tokens in (1, 64, 511, 513, 1025, 100_000)]
    alone += [{"max_num_seqs": str(seats)} for seats in (1, 255, 257, 769, 5000)]
    alone += [{"max_num_batched_tokens": str(tokens)} for tokens in (257, 511, 513, 1023, 100_000)]
    alone += [{"enable_prefix_caching": "false"}, {"max_model_len": "2"}, {"kv_memory": "1MiB"}]
    for settings in alone:
        environ = {f"TWOSTEP_{name.upper()}": value for name, value in settings.items()}
        configs({}, {**environ, "TWOSTEP_PRESET": preset})


def test_uncut_prompts_with_steps_that_hold_them() -> None:
    engine = configs({"chunking": "none", "max_num_batched_tokens": "2048", "max_model_len": "2048"})[1]
    assert (engine.chunking, engine.max_num_batched_tokens) == (Unchunked(), 2048)


# --- the environment ----------------------------------------------------------------------------------------------


def test_an_unknown_variable_is_an_error() -> None:
    problem = refusal({}, {"TWOSTEP_PROT": "1", "PATH": "/bin"})
    assert problem.startswith("environment variable TWOSTEP_PROT is not a setting; did you mean TWOSTEP_PORT")
    assert refusal({}, {"TWOSTEP_QQ": "1"}).endswith("TWOSTEP_QQ is not a setting; see `twostep serve --help`")


def test_variables_that_are_for_others() -> None:
    server, _ = configs({}, {"TWOSTEP_MODELS": "/models", "TWOSTEP_ISA": "portable"})
    assert set_by(server, "model")[1] == "default"


def test_a_variable_s_value_is_read_as_a_flag_s() -> None:
    assert refusal({}, {"TWOSTEP_PORT": "x"}) == "TWOSTEP_PORT is 'x'; it has to be an integer from 0 to 65535"
    problem = refusal({}, {"TWOSTEP_ENABLE_PREFIX_CACHING": "maybe"})
    assert problem == "TWOSTEP_ENABLE_PREFIX_CACHING is 'maybe'; it has to be true or false"


def links_of(service: str, port: str = "8000", address: str = "10.0.0.7") -> dict[str, str]:
    """What Kubernetes puts into the environment of each pod beside a service with one port, named http."""
    name = service.upper().replace("-", "_")
    whole = f"{name}_PORT_{port}_TCP"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": port,
        f"{name}_SERVICE_PORT_HTTP": port,
        f"{name}_PORT": f"tcp://{address}:{port}",
        whole: f"tcp://{address}:{port}",
        f"{whole}_PROTO": "tcp",
        f"{whole}_PORT": port,
        f"{whole}_ADDR": address,
    }


@pytest.mark.parametrize("service", ["twostep", "twostep-chat", "twostep-port", "twostep-max-num-seqs", "twostep-2"])
@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
def test_what_kubernetes_sets_for_services_is_ignored(service: str, address: str) -> None:
    links = links_of(service, address=address)
    server, _ = configs({}, links | {"TWOSTEP_MAX_QUEUE": "5"})
    assert (server.port, server.max_queue) == (8000, 5)
    assert service_links(links | {"TWOSTEP_MAX_QUEUE": "5", "HOME": "/"}) == list(links)


def test_settings_beside_kubernetes_variables() -> None:
    """A pod's own variables go before those of services."""
    links = links_of("twostep") | {"TWOSTEP_PORT": "8001"}
    assert configs({}, links)[0].port == 8001
    assert "TWOSTEP_PORT" not in service_links(links)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TWOSTEP_CHAT_PORT", "8001"),
        ("TWOSTEP_CHAT_SERVICE_HOST", "no address"),
        ("TWOSTEP_SERVICE_PORTS", "80"),
        ("TWOSTEP_CHAT_PORT_TCP", "tcp://10.0.0.7:80"),
        ("TWOSTEP_CHAT_PORT_80_HTTP", "http://10.0.0.7:80"),
    ],
)
def test_variables_that_only_look_like_those_of_services(variable: str, value: str) -> None:
    assert refusal({}, {variable: value}).startswith(f"environment variable {variable} is not a setting; ")
    assert refusal({}, {"TWOSTEP_PORT": "http://10.0.0.7:80"}).endswith("; it has to be an integer from 0 to 65535")


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "'prot' is not a setting; did you mean port"),
        ("max-num-seqs = 1", "'max-num-seqs' is not a setting; did you mean max_num_seqs"),
        ('config = "other.toml"', "'config' is not a setting"),
        ("[server]\nport = 1", "'server' is not a setting"),
        ('port = "8000"', "port is '8000'; it has to be an integer"),
        ("port = true", "port is True; it has to be an integer"),
        ("port = 8000.5", "port is 8000.5; it has to be an integer"),
        ("enable_prefix_caching = 1", "enable_prefix_caching is 1; it has to be true or false"),
        ("api_key = [1]", "api_key is not shown; it has to be texts, separated by commas"),
        ("preset = [\"a\"]", "preset is ['a']; it has to be chat, rag or batch"),
    ],
)  # fmt: skip
def test_keys_and_values_that_are_none(toml: Path, text: str, problem: str) -> None:
    toml.write_text(text)
    assert refusal({"config": str(toml)}).startswith(f"{toml}: {problem}")


@pytest.mark.parametrize("content", [b"port =", b"\xff"])
def test_a_file_that_is_not_toml(toml: Path, content: bytes) -> None:
    toml.write_bytes(content)
    assert refusal({"config": str(toml)}).startswith(f"config: {toml} is not TOML: ")


# --- what is in effect --------------------------------------------------------------------------------------------

READY = Capabilities(
    max_sequence_tokens=1600,
    max_model_len=1600,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    kv_blocks=100,
    isa="avx2",
    threads=4,
    description=("weights: 1 GiB",),
)


def test_the_answer_of_v1_config() -> None:
    server, _ = configs({"api_key": ["secret", "other"], "allowed_origins": ["https://a.example"], "threads": "1"})
    answer = config_answer(server, READY)
    assert answer["settings"]["max_num_seqs"] == {"value": 32, "set_by": "preset chat"}
    assert answer["settings"]["max_model_len"] == {"value": 1600, "set_by": "default"}
    assert answer["settings"]["threads"] == {"value": 4, "set_by": "--threads"}
    assert answer["settings"]["kv_memory"] == {"value": "0.5", "set_by": "default"}
    assert answer["settings"]["block_size"] == {"value": 16, "set_by": "default"}
    assert answer["settings"]["allowed_origins"]["value"] == ["https://a.example"]
    assert answer["settings"]["api_key"] == {"value": "2 given, not shown", "set_by": "--api-key"}
    assert (answer["kv_blocks"], answer["instruction_set"], answer["arithmetic"]) == (100, "avx2", ["weights: 1 GiB"])
    assert answer["settings"].keys() == {setting.name for setting in FLAGGED}


def test_lines_say_value_and_who_set_it() -> None:
    server, _ = configs({"max_num_seqs": "5", "api_key": ["secret"]})
    printed = [line.split(maxsplit=2) for line in effective_lines(server, READY)]
    assert ["max_num_seqs", "5", "--max-num-seqs"] in printed
    assert ["record", "-", "default"] in printed
    assert ["enable_prefix_caching", "yes", "preset chat"] in printed
    assert "secret" not in "\n".join(effective_lines(server, READY))


def test_the_answer_of_v1_config_is_as_described() -> None:
    """Whatever is set: schemas of the table hold for what the table shows."""
    flags = [{}, {"api_key": ["a"], "itl_budget": "20", "record": "x", "host": ["::1", "127.0.0.1"]}]
    for given in [*flags, *({"preset": preset} for preset in PRESETS)]:
        jsonschema.validate(json.loads(json.dumps(config_answer(configs(given)[0], READY))), config_schema())

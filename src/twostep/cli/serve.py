"""`twostep serve [MODEL]`: the OpenAI-compatible server."""

import argparse
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from twostep.cli.subcommands import Subcommands
from twostep.server.options import LIST, SETTINGS, SWITCH, Setting
from twostep.server.presets import PRESETS

if TYPE_CHECKING:
    from twostep.engine.backend import Capabilities
    from twostep.server.config import ServerConfig
    from twostep.server.http.listening import Listeners


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP with the OpenAI API",
        description="Every option can also be set by an environment variable, such as TWOSTEP_MAX_NUM_SEQS for "
        "--max-num-seqs, or in a TOML file: max_num_seqs = 32. Precedence: options, variables, file, preset.",
    )  # fmt: skip
    http, engine = (parser.add_argument_group(title) for title in ("HTTP", "engine"))
    groups = {"start": parser, "server": http, "engine": engine}
    for setting in SETTINGS:
        _add_option(groups[setting.part], setting)
    parser.set_defaults(run=run)


def _add_option(group: "argparse._ActionsContainer", setting: Setting) -> None:
    """The namespace gets only options that were given; their text is parsed together with that of variables."""
    help_ = setting.help + _preset_values(setting)
    if setting.name == "model":
        group.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=help_)
    elif setting.kind is SWITCH:
        action = argparse.BooleanOptionalAction
        group.add_argument(setting.flag, action=action, default=argparse.SUPPRESS, help=help_)
    else:
        how = "append" if setting.kind is LIST else "store"
        group.add_argument(setting.flag, action=how, metavar=setting.metavar, default=argparse.SUPPRESS, help=help_)


def _preset_values(setting: Setting) -> str:
    """The defaults of a setting whose default depends on the preset."""
    values = {name: str(preset[setting.name]) for name, preset in PRESETS.items() if setting.name in preset}
    if len(set(values.values())) < 2:
        return ""
    return f" ({', '.join(f'{name}: {value}' for name, value in values.items())})"


def run(options: argparse.Namespace) -> None:
    from twostep.server.choice import choose
    from twostep.server.front import serve
    from twostep.server.sources import service_links
    from twostep.store.resolve import resolve
    from twostep.store.wheel_download import FetchProgress
    from twostep.terminal import StatusLine

    names = {setting.name for setting in SETTINGS}
    choice = choose({name: value for name, value in vars(options).items() if name in names}, os.environ)
    config, engine_config = choice.configs()
    if links := service_links(os.environ):
        StatusLine().say(f"ignored environment variables that Kubernetes sets for services: {', '.join(links)}")
    serve(config, engine_config, resolve(choice.model, FetchProgress()), _announce)


def _announce(config: "ServerConfig", capabilities: "Capabilities", listeners: "Listeners") -> None:
    print(*_lines(config, capabilities, listeners), sep="\n", flush=True)


def _lines(config: "ServerConfig", capabilities: "Capabilities", listeners: "Listeners") -> Iterator[str]:
    """What a user needs to know to use the server and to understand its behaviour."""
    from twostep.server.effective import lines

    yield "settings, and where they come from:"
    yield from (f"  {line}" for line in lines(config, capabilities))
    yield "memory and steps:"
    yield from (f"  {line}" for line in capabilities.description)
    if not listeners.loopback and not config.api_keys:
        yield f"note: no --api-key is set: anyone who can reach {' or '.join(config.hosts)} can use the server"
    names, urls = " and ".join(config.served_model_names), listeners.urls
    yield f"twostep serves {names} at {' and '.join(urls)}, ready for requests; try"
    yield f"  {curl(urls[0], config)}"


def curl(address: str, config: "ServerConfig") -> str:
    """An example command; it names the variable of the key, not the key."""
    question = {"role": "user", "content": "Why is the sky blue?"}
    body = json.dumps({"model": config.served_model_names[0], "messages": [question], "max_tokens": 64})
    key = ' -H "Authorization: Bearer $TWOSTEP_API_KEY"' if config.api_keys else ""
    return f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"

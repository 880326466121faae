"""`twostep serve [MODEL]`: the OpenAI-compatible server."""

import argparse
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from twostep.cli.options import add_settings, given_settings
from twostep.cli.subcommands import Subcommands
from twostep.config.settings import FLAGGED, SERVER_PRESET, Setting

if TYPE_CHECKING:
    from twostep.config.configs import ServerConfig
    from twostep.engine.backend import Capabilities
    from twostep.engine.process.engine_process import EngineProcess
    from twostep.server.http.listening import Listeners


GROUPS = {"server": "HTTP", "scheduler": "scheduler", "engine": "engine"}
"""Titles in the help."""


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP with the OpenAI API",
        description="Every option can also be set by an environment variable, such as TWOSTEP_MAX_NUM_SEQS for "
        "--max-num-seqs, or in a TOML file: max_num_seqs = 32. Precedence: options, variables, file, preset.",
    )  # fmt: skip
    add_settings(parser, of_part("start"), SERVER_PRESET)
    for part, title in GROUPS.items():
        add_settings(parser.add_argument_group(title), of_part(part), SERVER_PRESET)
    parser.set_defaults(run=run)


def of_part(part: str) -> list[Setting]:
    return [setting for setting in FLAGGED if setting.part == part]


def run(options: argparse.Namespace) -> None:
    """The engine's process starts first: it imports its modules while this one does."""
    from twostep.engine.process.engine_process import EngineProcess, single_threaded_numpy

    single_threaded_numpy()
    with EngineProcess() as engine:
        _serve(options, engine)


def _serve(options: argparse.Namespace, engine: "EngineProcess") -> None:
    from twostep.config.configs import serve_settings
    from twostep.config.sources import service_links
    from twostep.server.front import serve
    from twostep.store.resolve import resolve
    from twostep.store.wheel_download import FetchProgress
    from twostep.terminal import StatusLine

    settings = serve_settings(given_settings(options, FLAGGED), os.environ)
    if links := service_links(os.environ):
        StatusLine().say(f"ignored environment variables that Kubernetes sets for services: {', '.join(links)}")
    path, config = resolve(settings.model, FetchProgress()), settings.engine
    if settings.calibrate:
        from twostep.cli.calibrate import calibrate_for

        config = calibrate_for(path, config)
    serve(settings.server, config, path, _announce, engine)


def _announce(config: "ServerConfig", capabilities: "Capabilities", listeners: "Listeners") -> None:
    print(*_lines(config, capabilities, listeners), sep="\n", flush=True)


def _lines(config: "ServerConfig", capabilities: "Capabilities", listeners: "Listeners") -> Iterator[str]:
    """What a user needs to know to use the server and to understand its behaviour."""
    from twostep.config.effective import effective_lines

    yield "settings, and where they come from:"
    yield from (f"  {line}" for line in effective_lines(config, capabilities))
    yield "memory and steps:"
    yield from (f"  {line}" for line in capabilities.description)
    if not listeners.loopback and not config.api_key:
        yield f"note: no --api-key is set: anyone who can reach {' or '.join(config.host)} can use the server"
    names, urls = " and ".join(config.served_model_name), listeners.urls
    yield f"twostep serves {names} at {' and '.join(urls)}, ready for requests; try"
    yield f"  {curl(urls[0], config)}"


def curl(address: str, config: "ServerConfig") -> str:
    """An example command; it names the variable of the key, not the key."""
    question = {"role": "user", "content": "Why is the sky blue?"}
    body = json.dumps({"model": config.served_model_name[0], "messages": [question], "max_tokens": 64})
    key = ' -H "Authorization: Bearer $TWOSTEP_API_KEY"' if config.api_key else ""
    return f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"

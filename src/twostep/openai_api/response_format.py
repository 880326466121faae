"""Reads the fields that constrain the answer's form: OpenAI's `response_format`, vLLM's and llama.cpp's fields."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from twostep.engine.refusals import shown
from twostep.engine.text.structured_output import ANY_OBJECT, Kind, StructuredOutput
from twostep.errors import InvalidParameterError, TwostepError
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.fields import Fields


class RequestedForm(NamedTuple):
    field: str
    """The field that requests it; empty for none."""
    form: StructuredOutput | None = None
    """None: any text."""


def read_structured(fields: Fields) -> RequestedForm:
    """The form that one of the fields requests. Raises `ApiError`, also if several fields request one.

    `strict` of a JSON schema makes no difference: every schema is enforced, or refused if that is not possible.
    """
    read = {name: reader(name, value) for name, reader in _READERS.items() if (value := fields.take(name)) is not None}
    forms = {name: form for name, form in read.items() if form is not None}
    if len(forms) > 1:
        raise ApiError(f"{' and '.join(forms)} each set the answer's form; send one of them", param=next(iter(forms)))
    return next((RequestedForm(name, form) for name, form in forms.items()), RequestedForm(""))


def with_field_name(error: TwostepError, field: str) -> TwostepError:
    """Replaces the engine's parameter name `structured` by the field of the body; other errors are unchanged."""
    if not field or not isinstance(error, InvalidParameterError) or error.param != "structured":
        return error
    return InvalidParameterError(str(error).replace("structured", field, 1), field)


def _response_format(name: str, value: object) -> StructuredOutput | None:
    """llama.cpp puts the schema beside the type, which may then also be `json_object`."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        allowed = "an object with type 'text', 'json_object' or 'json_schema'"
        raise ApiError(f"{name} is {shown(value)}; it has to be {allowed}", param=name)
    if kind == "text":
        return None
    if value.get("json_schema") is not None:
        return _named_schema(f"{name}.json_schema", value["json_schema"])
    if value.get("schema") is not None:
        return _schema(f"{name}.schema", value["schema"])
    return ANY_OBJECT if kind == "json_object" else _named_schema(f"{name}.json_schema", None)


def _named_schema(name: str, value: object) -> StructuredOutput:
    if not isinstance(value, Mapping) or not isinstance(value.get("schema"), Mapping):
        raise _refused(name, value, "an object with a name and a schema")
    if not isinstance(value.get("strict"), bool | None):
        raise _refused(f"{name}.strict", value["strict"], "true or false")
    return _schema(name, value["schema"])


def _schema(name: str, value: object) -> StructuredOutput:
    """A schema as JSON or as JSON text."""
    if not isinstance(value, Mapping | str):
        raise _refused(name, value, "a JSON schema")
    return _form(name, "json_schema", value if isinstance(value, str) else json.dumps(value))


def _choice(name: str, value: object) -> StructuredOutput:
    if not isinstance(value, list):
        raise _refused(name, value, "a list of strings")
    return _form(name, "choice", json.dumps(value))


def _text(kind: Kind) -> Callable[[str, object], StructuredOutput]:
    def read(name: str, value: object) -> StructuredOutput:
        if not isinstance(value, str):
            raise _refused(name, value, "a string")
        return _form(name, kind, value)

    return read


def _json_object(name: str, value: object) -> StructuredOutput | None:
    if not isinstance(value, bool):
        raise _refused(name, value, "true or false")
    return ANY_OBJECT if value else None


def _structured_outputs(name: str, value: object) -> StructuredOutput | None:
    """vLLM's newer field: an object with one member."""
    if not isinstance(value, Mapping):
        raise _refused(name, value, f"an object with one of {', '.join(_OUTPUTS)}")
    chosen = {key: member for key, member in value.items() if not (member is None or _is_default(key, member))}
    if len(chosen) != 1 or not chosen.keys() <= _OUTPUTS.keys():
        raise _refused(name, value, f"an object with one of {', '.join(_OUTPUTS)}")
    [(key, member)] = chosen.items()
    return _OUTPUTS[key](f"{name}.{key}", member)


def _is_default(key: str, member: object) -> bool:
    """Options that vLLM's client sends with their default value."""
    return member is False and key in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def _llama_grammar(name: str, value: object) -> StructuredOutput | None:
    """GBNF or Lark; an empty grammar is none."""
    return None if value == "" else _text("grammar")(name, value)


def _form(name: str, kind: Kind, text: str) -> StructuredOutput:
    try:
        return StructuredOutput(kind, text)
    except InvalidParameterError as error:
        raise ApiError(f"{name}: {error}", param=name.partition(".")[0]) from None


def _refused(name: str, value: object, allowed: str) -> ApiError:
    return ApiError(f"{name} is {shown(value)}; it has to be {allowed}", param=name.partition(".")[0])


_Reader = Callable[[str, Any], StructuredOutput | None]
_OUTPUTS: dict[str, _Reader] = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("grammar"),
    "json_object": _json_object,
}
_READERS: dict[str, _Reader] = {
    "response_format": _response_format,
    "guided_json": _schema,
    "guided_regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("grammar"),
    "structured_outputs": _structured_outputs,
    "grammar": _llama_grammar,
    "json_schema": _schema,
}

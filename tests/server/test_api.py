"""The API over HTTP as clients see it: the official one, and byte for byte."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.http_server import NAME, Host, Served

HELLO: Any = [{"role": "user", "content": "Say hello."}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    """Those of a stream, without the last, which is checked."""
    reply = http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *told, last, nothing = reply.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in told]


def texts(chunks: list[Any], choices: int = 1) -> list[str]:
    """By choice, of a stream of either endpoint."""
    made = [""] * choices
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        made[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return made


# --- the official client ------------------------------------------------------------------------------------------


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert whole.id.startswith("chatcmpl-")
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage
    assert whole.usage.completion_tokens == 8
    chunks = list(client.chat.completions.create(messages=HELLO, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_completions_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="One, two,", **GREEDY)
    assert whole.id.startswith("cmpl-")
    chunks = list(client.completions.create(prompt="One, two,", stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""


@pytest.mark.parametrize("stream", [False, True])
def test_replies_name_their_id_in_a_header_too(http: httpx.Client, stream: bool) -> None:
    reply = http.post("/v1/completions", json={"prompt": "One, two,", "stream": stream, **GREEDY})
    assert f'"id":"{reply.headers["X-Request-Id"]}"' in reply.text.replace(" ", "")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "alias/of-it"]
    assert client.models.retrieve("alias/of-it").owned_by == "twostep"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.models.retrieve("gpt-4")


def test_another_model_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="some-lora-adapter", messages=HELLO)
    assert error.value.code == "model_not_found"


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")


def test_log_probabilities(client: openai.OpenAI) -> None:
    """CASES 29: asking for none beside the chosen token is not "off"."""
    none = client.completions.create(prompt="One, two,", logprobs=0, **GREEDY).choices[0].logprobs
    assert none
    assert none.token_logprobs
    assert len(none.token_logprobs) == 8
    chat = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **GREEDY).choices[0]
    assert chat.logprobs
    assert chat.logprobs.content
    assert "".join(entry.token for entry in chat.logprobs.content) == chat.message.content
    assert [len(entry.top_logprobs) for entry in chat.logprobs.content] == [2] * 8


def test_connections_send_at_once(server: Served) -> None:
    """Nagle's algorithm would hold each token back until the one before is acknowledged."""
    listener = server.front.servers[0].sockets[0]
    assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# --- what a stream is made of -------------------------------------------------------------------------------------


def test_a_choice_that_ends_before_others_says_so_then(http: httpx.Client) -> None:
    asked = {"prompt": "One day", "n": 4, "seed": 1, "max_tokens": 60, "stop": [".", ","]}
    chunks = events(http, "/v1/completions", **asked)
    told = [(choice["index"], choice["finish_reason"]) for chunk in chunks for choice in chunk["choices"]]
    ends = {index: place for place, (index, reason) in enumerate(told) if reason}
    assert sorted(ends) == [0, 1, 2, 3]
    assert all(index not in [later for later, _ in told[place + 1 :]] for index, place in ends.items())
    assert min(ends.values()) < len(told) - 4


def test_the_shape_of_a_stream(http: httpx.Client) -> None:
    """CASES 26, 27."""
    chunks = events(http, "/v1/chat/completions", messages=HELLO, n=2, **GREEDY)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[0]["delta"]["content"] != "", "a chunk with only a role is no token"
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_usage_in_a_stream(http: httpx.Client) -> None:
    """CASES 26: only if asked, in a chunk without choices."""
    asked = {"prompt": "One, two,", "stream_options": {"include_usage": True}, **GREEDY}
    *others, last = events(http, "/v1/completions", **asked)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"] == 8
    assert all(chunk["usage"] is None and "timings" not in chunk for chunk in others)


def test_usage_so_far_in_each_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http, "/v1/completions", prompt="One, two,", stream_options=options, **GREEDY)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(1, 9), 8, 8]


def test_several_prompts_and_choices(http: httpx.Client) -> None:
    prompts = ["One, two,", [5000, 5001, 5002]]
    asked = {"prompt": prompts, "n": 2, "model": NAME, "max_tokens": 6, "seed": 3}
    whole = post(http, "/v1/completions", **asked)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    chunks = events(http, "/v1/completions", **asked)
    assert texts(chunks, 4) == [choice["text"] for choice in whole["choices"]]
    alone = post(http, "/v1/completions", **{**asked, "prompt": prompts[1]})
    assert [choice["text"] for choice in alone["choices"]] == texts(chunks, 4)[2:]


def test_echo(http: httpx.Client) -> None:
    asked = {"prompt": "One, two,", "echo": True, **GREEDY}
    whole = post(http, "/v1/completions", **asked)["choices"][0]["text"]
    assert whole.startswith("One, two,")
    assert texts(events(http, "/v1/completions", **asked)) == [whole]


def test_log_probabilities_and_ids_streamed_as_whole(http: httpx.Client) -> None:
    asked = {"prompt": "One, two,", "logprobs": 1, "return_token_ids": True, **GREEDY}
    whole = post(http, "/v1/completions", **asked)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(http, "/v1/completions", **asked)]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [id_ for chunk in chunks for id_ in chunk.get("token_ids", [])] == whole["token_ids"]
    for name, entries in whole["logprobs"].items():
        assert [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get(name, [])] == entries


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_log_probabilities_end_before_a_stop_string_streamed_as_whole(http: httpx.Client, path: str) -> None:
    """The stop string, of several tokens, is held back from a stream until it is whole."""
    chat = path != "/v1/completions"
    asked = {"messages": HELLO, "logprobs": True} if chat else {"prompt": "One, two,", "logprobs": 0}
    free = post(http, path, **asked, **GREEDY)["choices"][0]
    text = free["message"]["content"] if chat else free["text"]
    asked = {**asked, **GREEDY, "stop": text[len(text) // 2 :]}
    whole = post(http, path, **asked)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(http, path, **asked)]
    for name, entries in whole["logprobs"].items():
        assert [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get(name) or []] == (entries or [])
    shown = [entry["token"] for entry in whole["logprobs"]["content"]] if chat else whole["logprobs"]["tokens"]
    kept = text[: len(text) // 2]
    assert "".join(shown).startswith(kept)
    assert len("".join(shown[:-1])) < len(kept)


def test_characters_arrive_whole(http: httpx.Client, server: Served) -> None:
    """CASES 24: what of a stream's text is not Unicode yet waits; at the end both ways have the same."""
    tokenizer = server.state.models[0].model.tokenizer
    ids = {id_ for text in ("👩‍🚀", "語", "🇩🇪") for id_ in tokenizer.encode(text, special=False)}
    asked = {"prompt": "x", "max_tokens": 60, "logit_bias": dict.fromkeys(map(str, ids), 60), "seed": 5, "model": NAME}
    whole = post(http, "/v1/completions", **asked)["choices"][0]["text"]
    chunks = events(http, "/v1/completions", **asked)
    assert texts(chunks) == [whole]
    assert any(ord(character) > 0xFFFF for character in whole), "no character of several tokens in this test"
    assert len(chunks) < 60, "nothing was held back"


def test_nothing_of_a_stop_string_is_sent(http: httpx.Client) -> None:
    """CASES 25."""
    asked = {"prompt": "One, two,", **GREEDY, "max_tokens": 40}
    free = post(http, "/v1/completions", **asked)["choices"][0]["text"]
    stop = free[len(free) // 2 : len(free) // 2 + 6]
    whole = post(http, "/v1/completions", stop=stop, **asked)["choices"][0]
    assert whole["text"] == free[: free.index(stop)]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    chunks = events(http, "/v1/completions", stop=stop, **asked)
    assert texts(chunks) == [whole["text"]]
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


# --- requests -----------------------------------------------------------------------------------------------------


def test_seed_and_temperature(http: httpx.Client) -> None:
    """CASES 29."""

    def said(**params: Any) -> str:
        body = post(http, "/v1/completions", prompt="Once upon a time", max_tokens=12, **params)
        return str(body["choices"][0]["text"])

    assert said(seed=1) == said(seed=1) != said(seed=2)
    assert said() != said()
    assert said(temperature=0) == said(temperature=0)


def test_an_answer_can_go_on_from_the_last_message(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, "}]
    tokens = post(http, "/tokenize", messages=messages, continue_final_message=True, return_token_strs=True)
    assert "".join(tokens["token_strs"]).endswith("assistant\nOne, two, ")
    post(http, "/v1/chat/completions", messages=messages, continue_final_message=True, **GREEDY)


BAD_SAMPLING = [
    ("temperature", -1), ("temperature", "hot"), ("temperature", float("nan")), ("top_p", 2), ("top_k", -2),
    ("min_p", 3), ("n", 0), ("n", 1.5), ("n", 10**6), ("max_tokens", 0), ("max_tokens", "many"), ("max_tokens", 10**7),
    ("min_tokens", -1), ("seed", "x"), ("seed", 2**70), ("stop", [""]), ("stop", 5), ("stop_token_ids", [10**9]),
    ("logit_bias", {"a": 1}), ("logit_bias", {"5": 1e9}), ("presence_penalty", 3), ("repetition_penalty", 0),
    ("stream", "yes"), ("ignore_eos", 1), ("priority", "first"), ("stream_options", {"include_usage": True}),
    ("prompt_logprobs", 1), ("best_of", 3), ("cache_salt", 3), ("cache_salt", "\ud800"),
    ("repetition_penalty", 5e-324),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING, ids=str)
def test_bad_values_are_named(http: httpx.Client, name: str, value: object) -> None:
    """CASES 29, 32: never 422 or 500."""
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
        content = json.dumps({**prompt, "max_tokens": 5, name: value})
        assert_refused(http.post(path, content=content), name)


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/v1/completions", "", None),
        ("/v1/completions", "{", None),
        ("/v1/completions", "[]", None),
        ("/v1/completions", b"\xff", None),
        ("/v1/completions", "[" * 100_000, None),
        ("/v1/completions", '{"prompt": ' + "[" * 500 + "]" * 500 + "}", "prompt"),
        ("/v1/completions", '{"prompt": "x", "seed": 1' + "0" * 5000 + "}", None),
        ("/v1/completions", "{}", "prompt"),
        ("/v1/completions", '{"prompt": []}', "prompt"),
        ("/v1/completions", '{"prompt": [-1]}', "prompt"),
        ("/v1/completions", '{"prompt": [999999]}', "prompt"),
        ("/v1/completions", r'{"prompt": "\ud800"}', None),
        ("/v1/chat/completions", "{}", "messages"),
        ("/v1/chat/completions", '{"messages": []}', "messages"),
        ("/v1/chat/completions", '{"messages": [{"content": "x"}]}', "messages"),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": 3}]}', "messages"),
        ("/tokenize", "{}", "messages"),
        ("/tokenize", '{"prompt": 3}', "prompt"),
        ("/detokenize", "{}", "tokens"),
        ("/detokenize", '{"tokens": [3, "x"]}', "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_bodies(http: httpx.Client, path: str, content: str | bytes, param: str | None) -> None:
    assert_refused(http.post(path, content=content), param)


def assert_refused(reply: httpx.Response, param: str | None, status: int = 400) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    assert "\n" not in error["message"]


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(http: httpx.Client) -> None:
    """CASES 30. Streamed too: nothing has been sent yet."""
    for stream in (False, True):
        reply = http.post("/v1/completions", json={"prompt": [5000] * 9000, "stream": stream})
        assert_refused(reply, None)
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert {"9000", "8192"} <= set(reply.json()["error"]["message"].replace(",", " ").split())


def test_one_bad_prompt_refuses_all_and_leaves_nothing(http: httpx.Client, server_host: Host) -> None:
    assert_refused(http.post("/v1/completions", json={"prompt": ["x", [5000] * 9000], "max_tokens": 2000}), None)
    snapshot = server_host.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)


def test_unknown_fields_are_named_once(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """CASES 32."""
    for _ in range(2):
        post(http, "/v1/completions", prompt="x", max_tokens=1, surprise=1)
    assert [record.getMessage() for record in caplog.records if "surprise" in record.getMessage()] == [
        "requests have the field 'surprise', which is unknown here and ignored"
    ]


def test_wrong_paths_and_methods(http: httpx.Client) -> None:
    assert_refused(http.get("/v1/nothing"), None, 404)
    reply = http.get("/v1/completions")
    assert_refused(reply, None, 405)
    assert reply.headers["allow"] == "POST"


# --- the rest -----------------------------------------------------------------------------------------------------


def test_cached_tokens_are_always_told(http: httpx.Client) -> None:
    """CASES 14; 35: a reply that is not streamed has a TTFT too."""
    prompt = list(range(6000, 6100))
    first, second = (post(http, "/v1/completions", prompt=prompt, **GREEDY) for _ in range(2))
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)] == [0, 96]
    assert second["timings"]["cached_n"] == 96
    assert first["timings"]["ttft_ms"] >= first["timings"]["queue_ms"] >= 0
    assert first["timings"]["prefill_chunks"] == 2


def test_only_those_with_the_same_salt_find_each_others_kv(http: httpx.Client) -> None:
    asked = {"prompt": list(range(7000, 7100)), **GREEDY}
    replies = [post(http, "/v1/completions", **asked, cache_salt=salt) for salt in ("mine", "yours", "mine")]
    assert [reply["timings"]["cached_n"] for reply in replies] == [0, 0, 96]
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1


def test_tokens_and_back(http: httpx.Client) -> None:
    tokens = post(http, "/tokenize", prompt="Hello 👩‍🚀<|im_end|>", return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 8192
    assert post(http, "/detokenize", tokens=tokens["tokens"]) == {"prompt": "Hello 👩‍🚀<|im_end|>"}
    assert post(http, "/tokenize", prompt="")["tokens"] == []
    chat = post(http, "/tokenize", messages=HELLO)
    assert chat["count"] == post(http, "/v1/chat/completions", messages=HELLO, **GREEDY)["usage"]["prompt_tokens"]


def test_effective_values_are_served(http: httpx.Client) -> None:
    """CASES 10, 19: with the arithmetic that led to them."""
    config = http.get("/v1/config").json()
    assert config["kv_blocks"] == 1200
    assert any("KV per token" in line for line in config["arithmetic"])


def test_the_description(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= described["paths"].keys()
    page = http.get("/docs").text
    assert all(path in page for path in described["paths"])
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_a_conversation_with_tools_is_tokenised_as_it_is_answered(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = {"messages": HELLO, "tools": [tool]}
    counted = http.post("/tokenize", json=asked).json()["count"]
    answered = post(http, "/v1/chat/completions", **asked, max_tokens=1)["usage"]["prompt_tokens"]
    assert counted == answered > http.post("/tokenize", json={"messages": HELLO}).json()["count"]


def test_who_asks_for_another_part_of_the_api_is_told_where_to_go(http: httpx.Client) -> None:
    reply = http.post("/v1/responses", json={"input": "x"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"].endswith("unknown path; use /v1/chat/completions")

"""Each part of a reward, their sum, and how each can fail: never a silent score."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hybridrl.config.choices import RewardFailure, TaskName
from hybridrl.config.schema import CodeRewardConfig, FormatRewardConfig, HttpRewardConfig, RewardConfig
from hybridrl.errors import DataError
from hybridrl.rewards.answers import final_answer
from hybridrl.rewards.code import io_tests, program_of
from hybridrl.rewards.parts import make_parts, total
from hybridrl.rewards.request import ScoreRequest, score_request
from hybridrl.rewards.result import FailureKind
from hybridrl.rewards.score import make_scorer
from tests.unit.rewards.samples import sample


def request(final: str, answer: str = "", data_source: str = "", extra_info: str = "") -> ScoreRequest:
    return ScoreRequest("question", f"{final}<eos>", final, answer, data_source, extra_info)


def score(config: RewardConfig, *args: str) -> object:
    return total(make_parts(config), request(*args))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("<answer>1</answer> <answer> 2\n</answer>", "2"),
        ("<answer>1</answer> \\boxed{3}", "3"),
        (" plain ", "plain"),
        ("\\boxed{open", "\\boxed{open"),
    ],
)
def test_the_final_answer_is_the_last_one_that_is_marked(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_a_stop_token_is_no_part_of_the_final_text() -> None:
    assert score_request(sample("12 <eos>", "12"), ("<end>", "<eos>")).final == "12"
    assert score_request(sample("12 <eos> ", "12"), ("<eos>",)).final == "12 <eos>"


def test_exact_and_format_pay_one_or_nothing() -> None:
    exact = RewardConfig(exact_weight=2.0)
    assert [score(exact, text, "12") for text in ("12", "<answer>12</answer>", "12.0", "")] == [2.0, 2.0, 0.0, 0.0]
    form = RewardConfig(format=FormatRewardConfig(0.5, "<think>.*</think>.+"))
    assert [score(form, text) for text in ("<think>a\nb</think>c", "<think>a</think>", "c")] == [0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("It is $\\boxed{\\frac{2}{4}}$", "0.5", 1.0),
        ("The answer is 7", "7", 1.0),
        ("The answer is 8", "7", 0.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_math_pays_for_equal_expressions(response: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert score(RewardConfig(math_weight=1.0), response, answer) == reward


def test_math_refuses_a_ground_truth_that_is_no_expression() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(DataError, match="answer '' is no mathematical expression"):
        score(RewardConfig(math_weight=1.0), "7", "")


def test_every_reasoning_gym_answer_earns_its_reward_after_json() -> None:
    gym = pytest.importorskip("reasoning_gym")
    for name in ("basic_arithmetic", "leg_counting", "countdown", "letter_jumble"):
        entry = gym.create_dataset(name, size=1, seed=3)[0]
        info = json.dumps({"question": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]})
        config = RewardConfig(reasoning_gym_weight=1.0)
        assert score(config, f"<answer>{entry['answer']}</answer>", "", f"reasoning_gym/{name}", info) == 1.0
        assert score(config, "no idea", "", f"reasoning_gym/{name}", info) < 1.0  # type: ignore[operator]
    with pytest.raises(DataError, match="data_source 'gsm8k', expected one that starts with reasoning_gym/"):
        score(config, "1", "", "gsm8k")


CODE = RewardConfig(code=CodeRewardConfig(weight=1.0, test_timeout_s=1.5, timeout_s=5.0, memory_mib=256))
SUM = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("```python\nprint(sum(map(int, input().split())))\n```", SUM, 1.0),
        ("Try\n```\nno\n```\nthen\n```py\nprint(3)\n```", SUM, 0.5),
        ("print(3); raise ValueError", SUM, 0.0),
        ("not a program", SUM, 0.0),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3", 1.0),
        ("def add(a, b): return a - b", "assert add(1, 2) == 3", 0.0),
        ("import sys; sys.exit(0)", "assert add(1, 2) == 3", 0.0),
        ("import os; os._exit(0)", "assert False", 0.0),
    ],
)
def test_code_pays_the_share_of_tests_passed(response: str, answer: str, reward: float) -> None:
    assert score(CODE, response, answer) == reward


def test_the_time_of_all_tests_of_a_program_is_bounded() -> None:
    answer = json.dumps({"inputs": [""] * 50, "outputs": ["1"] * 50})
    config = RewardConfig(code=CodeRewardConfig(weight=1.0, test_timeout_s=1.0, timeout_s=2.0))
    assert score(config, "while True: pass", answer) == 0.0


@pytest.mark.parametrize("answer", ["", "[1]", '{"inputs": ["1"], "outputs": []}', '{"inputs": [1], "outputs": ["1"]}'])
def test_tests_that_cannot_be_read_are_refused(answer: str) -> None:
    with pytest.raises(DataError, match=r"answer is (empty|JSON), expected"):
        io_tests(answer)


def test_without_a_fenced_block_the_response_is_the_program() -> None:
    assert program_of("print(1)") == "print(1)"


@contextmanager
def service(*replies: tuple[int, bytes]) -> Iterator[tuple[str, list[tuple[str | None, dict[str, str]]]]]:
    """Serve the given replies one after the other, the last one for ever; also yields what was asked."""
    waiting, asked = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.headers["Authorization"], json.loads(body)))
            status, content = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def http(url: str, **settings: object) -> RewardConfig:
    return RewardConfig(http=HttpRewardConfig(weight=1.0, url=url, backoff_s=0.01, **settings))  # type: ignore[arg-type]


def test_a_service_is_asked_again_after_a_fault_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "t0ken")
    with service((503, b"busy"), (429, b""), (200, b'{"reward": 0.25}')) as (url, asked):
        assert score(http(url, token_variable="REWARD_TOKEN"), "12", "13", "gsm8k") == 0.25
    sent = {"prompt": "question", "response": "12<eos>", "answer": "13", "data_source": "gsm8k"}
    assert asked == [("Bearer t0ken", sent)] * 3


@pytest.mark.parametrize(
    ("reply", "num_asked", "message"),
    [
        ((500, b"broken"), 3, "no reward after 3 attempts; the last one: status 500: broken"),
        ((404, b"nothing here"), 1, "no reward after 1 attempts; the last one: status 404: nothing here"),
        ((200, b"<html>"), 1, "the reply is not JSON: b'<html>'"),
        ((200, b'{"score": 1}'), 1, "got {'score': 1}, expected"),
        ((200, b'{"reward": NaN}'), 1, "got {'reward': nan}, expected"),
        ((200, b'{"reward": true}'), 1, "got {'reward': True}, expected"),
    ],
)
def test_a_service_that_fails_gives_no_score(reply: tuple[int, bytes], num_asked: int, message: str) -> None:
    with service(reply) as (url, asked), pytest.raises(DataError) as caught:
        score(http(url), "12")
    assert message in str(caught.value)
    assert len(asked) == num_asked


def test_a_service_that_is_not_there_gives_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    with service((200, b"")) as (url, _):
        pass
    with pytest.raises(DataError, match=r"no reward after 2 attempts; the last one: .*refused"):
        score(http(url, num_attempts=2), "12")
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with pytest.raises(DataError, match=r"reward.http.token_variable: REWARD_TOKEN is not set; export it"):
        make_parts(http(url, token_variable="REWARD_TOKEN"))


def test_the_rate_of_requests_is_bounded() -> None:
    import time

    with service((200, b'{"reward": 1}')) as (url, _):
        (part,) = make_parts(http(url, requests_per_s=20.0))
        started = time.monotonic()
        for _ in range(5):
            part.part(request("12"))
    assert time.monotonic() - started >= 4 / 20


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    config = RewardConfig(exact_weight=1.0, format=FormatRewardConfig(0.5, "[0-9]+"))
    scorer = make_scorer(config, TaskName.FILE, ("<eos>",))
    rewards = scorer.score([sample("12<eos>", "12"), sample("13<eos>", "12"), sample("x", "12")]).rewards
    scorer.close()
    assert rewards.tolist() == [1.5, 0.5, 0.0]


def test_a_failed_part_drops_the_sample_and_names_the_part(tmp_path: object) -> None:
    config = RewardConfig(code=CodeRewardConfig(weight=1.0), exact_weight=1.0, on_error=RewardFailure.DROP)
    scorer = make_scorer(config, TaskName.FILE)
    result = scorer.score([sample("print(1)", '{"inputs": []}'), sample("print(1)", "assert True")])
    config.on_error = RewardFailure.FAIL
    with pytest.raises(DataError) as caught:
        scorer.score([sample("print(1)", '{"inputs": []}')])
    scorer.close()
    assert (result.is_scored.tolist(), result.num_failures[FailureKind.EXCEPTION]) == ([False, True], 1)
    assert "sample 0 of prompt p0 (prompts.jsonl:0): exception: " in str(caught.value)
    assert "in the part of the reward called code" in str(caught.value)


def test_an_attack_costs_its_own_sample_only() -> None:
    config = RewardConfig(code=CODE.code, num_processes=2)
    attacks = [
        "import os\nwhile True: os.fork()",
        "x = bytearray(1 << 40)",
        "while True: pass",
        "while True: print('x' * 999)",
    ]
    scorer = make_scorer(config, TaskName.FILE)
    result = scorer.score([sample(text, "assert True", i) for i, text in enumerate([*attacks, "x = 1"])])
    scorer.close()
    assert result.is_scored.all()
    assert result.rewards.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]

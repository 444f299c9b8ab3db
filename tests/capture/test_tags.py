"""Tags: which there may be, how they nest, and what happens when there is no room for more."""

from __future__ import annotations

import pytest

import routeprof
from routeprof.capture.tags import check_tag
from routeprof.errors import InvalidTagError
from tests.capture.oracle import begin, call
from tests.capture.recordings import LAYERS, recorder_of, same_loads, serve, some


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "  ",
        "a\nb",
        "a\rb",
        "\ta",
        "a\x00",
        "\x1b[31m",
        "a\u2028b",
        "=1+1",
        "+1",
        "-1",
        "@x",
        "all",
        "untagged",
        "x" * 201,
        "\ud800",
        None,
        3,
    ],
)
def test_tags_that_cannot_be_written_everywhere(tag):
    with pytest.raises(InvalidTagError, match="tag"):
        check_tag(tag)


@pytest.mark.parametrize("tag", ["code", "客户 7", "x" * 200, "a,b", 'say "hi"', "a=b", "'"])
def test_other_tags(path, random, tag):
    recorder, capture = recorder_of(path, LAYERS)
    with recorder.tag(tag):
        serve(capture, some(random))
    recorder.close()
    assert routeprof.load(path).tags == (tag,)


def test_a_refused_tag_leaves_the_one_before(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    with recorder.tag("outer"):
        with pytest.raises(InvalidTagError), recorder.tag("all"):
            pass
        serve(capture, some(random))
    recorder.close()
    assert routeprof.load(path).tags == ("outer",)


def test_tags_nest_and_come_back(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    steps = {name: [] for name in (None, "a", "b")}

    def one(name):
        steps[name].append(some(random))
        serve(capture, steps[name][-1])

    one(None)
    with recorder.tag("a"):
        one("a")
        with recorder.tag("b"):
            one("b")
            with recorder.tag("a"):
                one("a")
            one("b")
        one("a")
    one(None)
    with recorder.tag("b"):
        one("b")
    recorder.close()
    profile = routeprof.load(path)
    assert profile.tags == (None, "a", "b")
    for name, own in steps.items():
        same_loads(profile.select(tag=name or "untagged"), LAYERS, own)


@pytest.mark.parametrize("level", ["windows", "steps"])
def test_more_tags_than_there_are_slots(path, random, level):
    recorder, capture = recorder_of(path, LAYERS, level=level)
    steps = {f"tag {number}": [] for number in range(30)}
    for turn in range(3):
        for name, own in steps.items():
            with recorder.tag(name):
                for _ in range(1 + turn):
                    own.append(some(random))
                    serve(capture, own[-1])
    recorder.close()
    profile = routeprof.load(path)
    assert set(profile.tags) == steps.keys()
    for name, own in steps.items():
        selected = profile.select(tag=name)
        same_loads(selected, LAYERS, own)
        assert selected.layers()["steps"].tolist() == [6, 6]
        if level == "steps":
            assert len(selected.steps()) == 12
    same_loads(profile, LAYERS, [step for own in steps.values() for step in own])


def test_too_many_tags_open_at_once(path):
    recorder, _ = recorder_of(path, LAYERS)
    room = recorder.streams[0].layout.tags - 1
    with pytest.raises(InvalidTagError, match="close one"):
        _nested(recorder, [f"tag {number}" for number in range(room + 1)])
    _nested(recorder, [f"again {number}" for number in range(room)])
    recorder.close()


def _nested(recorder, names) -> None:
    if names:
        with recorder.tag(names[0]):
            _nested(recorder, names[1:])


def test_a_tag_that_finds_no_room_during_a_pass_is_refused_at_once(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    steps = {}
    for number in range(recorder.streams[0].layout.tags - 1):
        with recorder.tag(f"tag {number}"):
            steps[f"tag {number}"] = some(random)
            serve(capture, steps[f"tag {number}"])
    running = steps["untagged"] = some(random)
    begin(capture, running)
    with pytest.raises(InvalidTagError, match="between passes"), recorder.tag("one more"):
        pass
    for one in running.calls:
        call(capture, one)
    capture.end()
    recorder.close()
    profile = routeprof.load(path)
    for name, step in steps.items():
        same_loads(profile.select(tag=name), LAYERS, [step])

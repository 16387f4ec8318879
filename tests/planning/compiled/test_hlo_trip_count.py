"""Trip counts that follow from the text of a loop, and loops whose count does not."""

from collections.abc import Callable

import pytest

from rungs.planning.compiled.hlo import Module, trip_count


def program(
    condition: str = "ROOT %lt = pred[] compare(%i.1, %limit), direction=LT",
    following: str = "%next = s32[] add(%i.2, %step)",
    first: str = "%first = s32[] constant(0)",
    limit: int = 5,
    step: int = 1,
    computations: str = "",
) -> Module:
    """Return a program with a loop written as XLA's TPU compiler writes it, without its count."""
    return Module.parse(f"""HloModule loops, is_scheduled=true

{computations}
%body (carried.2: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %carried.2 = (s32[]{{:T(128)}}, f32[4]{{0:T(128)}}) parameter(0)
  %get.2 = s32[]{{:T(128)}} get-tuple-element(%carried.2), index=0, backend_config={{"size":"1"}}
  %i.2 = s32[]{{:T(128)}} copy(%get.2)
  %x = f32[4]{{0:T(128)}} get-tuple-element(%carried.2), index=1
  %step = s32[] constant({step})
  {following}
  ROOT %out = (s32[], f32[4]) tuple(%next, %x)
}}

%condition (carried.1: (s32[], f32[4])) -> pred[] {{
  %carried.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%carried.1), index=0
  %limit = s32[]{{:T(128)}} constant({limit}), metadata={{op_name="limit"}}
  {condition}
}}

ENTRY %main (p: f32[4], n: s32[]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %n = s32[] parameter(1)
  {first}
  %begin = s32[]{{:T(128)}} copy(%first)
  %in = (s32[], f32[4]{{0}}) tuple(%begin, %p)
  %loop = (s32[], /*index=1*/f32[4]) while(%in), condition=%condition, body=%body
  ROOT %result = f32[4]{{0}} get-tuple-element(%loop), index=1
}}
""")


def counted(module: Module) -> int | None:
    return trip_count(module.find("main", "loop"))


@pytest.mark.parametrize("first", [0, 2, 7])
@pytest.mark.parametrize("step", [1, 3, -1, -3])
@pytest.mark.parametrize("limit", [-4, 5, 8])
@pytest.mark.parametrize(
    ("direction", "goes_on"),
    [
        ("LT", int.__lt__),
        ("LE", int.__le__),
        ("GT", int.__gt__),
        ("GE", int.__ge__),
        ("NE", int.__ne__),
    ],
)
def test_counts_agree_with_the_loop_itself(
    first: int, step: int, limit: int, direction: str, goes_on: Callable[[int, int], bool]
) -> None:
    number, steps = first, 0
    while goes_on(number, limit) and steps < 100:
        number, steps = number + step, steps + 1
    found = counted(
        program(
            f"ROOT %lt = pred[] compare(%i.1, %limit), direction={direction}",
            first=f"%first = s32[] constant({first})",
            limit=limit,
            step=step,
        )
    )
    assert found == (steps if steps < 100 else None) or (steps == 0 and found is None)


COMPARE = """%compared (a: s32[], b: s32[]) -> pred[] {
  %b = s32[] parameter(1)
  %a = s32[] parameter(0)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%following (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%two, %c)
}
"""


def test_conditions_and_steps_inside_fusions() -> None:
    found = counted(
        program(
            "ROOT %f = pred[] fusion(%i.1, %limit), kind=kLoop, calls=%compared",
            "%next = s32[] fusion(%i.2), kind=kLoop, calls=%following",
            computations=COMPARE,
        )
    )
    assert found == 3  # 0, 2, 4


def test_a_step_may_be_subtracted() -> None:
    condition = "ROOT %gt = pred[] compare(%i.1, %limit), direction=GT"
    following = "%next = s32[] subtract(%i.2, %step)"
    first = "%first = s32[] constant(9)"
    assert counted(program(condition, following, first)) == 4


def test_the_known_count_is_used_if_the_text_has_it() -> None:
    module = Module.parse(
        "HloModule m\nENTRY %main (p: f32[]) -> f32[] {\n  %loop = f32[] while(%p), body=%b, "
        'condition=%c, backend_config={"known_trip_count":{"n":"7"}}\n}\n'
    )
    assert counted(module) == 7


@pytest.mark.parametrize(
    "change",
    [
        {"first": "%first = s32[] copy(%n)"},
        {"following": "%next = s32[] multiply(%i.2, %step)"},
        {"following": "%next = s32[] add(%i.2, %i.2)"},
        {"following": "%next = s32[] subtract(%step, %i.2)"},
        {"condition": "ROOT %lt = pred[] compare(%limit, %i.1), direction=LT"},
        {"condition": "ROOT %lt = pred[] compare(%i.1, %i.1), direction=LT"},
        {"condition": "ROOT %lt = pred[] not(%limit)"},
        {"step": 0},
    ],
)
def test_loops_that_do_not_count_in_steps_are_unknown(change: dict[str, str]) -> None:
    assert counted(program(**change)) is None  # type: ignore[arg-type]

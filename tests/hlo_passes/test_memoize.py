"""An analysis runs once for a subject, and is not kept beyond it."""

import gc
import weakref

from hlo_passes.analysis.traffic import traffic
from hlo_passes.memoize import memoized
from tests.hlo_passes.toys import module_of

TEXT = "HloModule m\nENTRY e {\n  p = f32[8] parameter(0)\n  ROOT n = f32[8] negate(p)\n}\n"


class Subject:
    pass


def test_each_subject_is_analysed_once() -> None:
    seen: list[Subject] = []

    @memoized
    def analysis(subject: Subject) -> int:
        seen.append(subject)
        return len(seen)

    one, other = Subject(), Subject()
    assert [analysis(one), analysis(other), analysis(one)] == [1, 2, 1]
    assert seen == [one, other]


def test_two_analyses_of_one_name_do_not_meet() -> None:
    def double(factor: int):
        @memoized
        def scaled(subject: Subject) -> int:
            return factor

        return scaled

    subject = Subject()
    assert (double(2)(subject), double(3)(subject)) == (2, 3)


def test_what_was_found_goes_with_the_module() -> None:
    module = module_of(TEXT)
    found = traffic(module)
    assert traffic(module) is found
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_each_further_argument_is_another_question() -> None:
    seen: list[object] = []

    @memoized
    def analysis(subject: Subject, factor: int, offset: int = 0) -> int:
        seen.append((factor, offset))
        return 10 * factor + offset

    subject = Subject()
    asked = [analysis(subject, 1), analysis(subject, 2), analysis(subject, 1, offset=3)]
    assert asked == [10, 20, 13]
    assert [analysis(subject, 1, offset=3), analysis(subject, 2)] == [13, 20]
    assert seen == [(1, 0), (2, 0), (1, 3)]

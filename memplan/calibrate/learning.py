"""What profiles say of a machine: corrections of its model, by kind of kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hlo_passes.errors import ProfileFileError
from hlo_passes.hardware.corrections import Correction, learned, nearest
from hlo_passes.hardware.machine import Machine
from memplan.profiles import Profile


def corrected(machine: Machine, profiles: Mapping[str, Profile], when: str) -> Machine:
    """Returns the machine with what steps took that ran on it, beside what its model has for them.

    Args:
      machine: that the profiles are of; what was corrected in it before they were taken stays so.
      profiles: one or more, by what they are called in sources.
      when: they were read, for the sources too.

    Raises:
      ProfileFileError: when one is of another machine, or has no kernel of a known kind.
    """
    for name, profile in profiles.items():
        if profile.machine != machine.name:
            expected, found = f"one of {machine.name}", f"one of {profile.machine}"
            raise ProfileFileError(name, expected, found)
    samples = [sample for profile in profiles.values() for sample in profile.samples]
    if not samples:
        raise ProfileFileError(", ".join(profiles), "seconds of kernels", "none")
    before = {of.kind: of.factor for of in machine.corrections}
    now = {of.kind: of for of in learned(samples)}
    kinds = dict.fromkeys((*before, *now))
    corrections: list[Correction] = []
    for kind in kinds:
        of = nearest(now, kind)
        assert of is not None
        once = nearest(before, kind) or 1.0
        corrections.append(Correction(kind, once * of.factor, once * of.spread))
    said = f"learned from {', '.join(profiles)}, {when}"
    sources = dict(machine.sources)
    sources |= {
        f"corrections.{kind}.{name}": said for kind in kinds for name in ("factor", "spread")
    }
    return replace(machine, corrections=tuple(corrections), sources=tuple(sources.items()))

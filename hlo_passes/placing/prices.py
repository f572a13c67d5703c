"""What a plan is charged for beside the seconds of its step.

    cost = seconds + byte_s · bytes moved + joule_s · joules of what is computed again

A planner that compares seconds compares such costs with the same searches. All that is worth
something beside time is a price here: energy is static watts times seconds, and joules for each
byte and each operation, so that it is the static watts times a cost (`energy_prices`); the fewest
bytes are those of a price that no time outweighs; and what there is in between is a bound on the
one while the other is least (Everett, "Generalized Lagrange multiplier method for solving problems
of optimum allocation of resources", Operations Research 11, 1963).
"""

from __future__ import annotations

from dataclasses import dataclass

from hlo_passes.errors import NoEnergyError
from hlo_passes.hardware.machine import Machine

# A byte that moves is as bad as what the link takes for so many: no step of a program that has
# anything to compute is that much slower without them.
_NO_TIME_OUTWEIGHS = 100.0


@dataclass(frozen=True, slots=True)
class Prices:
    """
    Attributes:
      byte_s: seconds that each byte is worth that moves between the device and the host.
      joule_s: seconds that each joule is worth of what is computed again.
    """

    byte_s: float = 0.0
    joule_s: float = 0.0

    def __bool__(self) -> bool:
        return self != FREE

    def times(self, strength: float) -> Prices:
        """The same, all of them lower or higher."""
        return Prices(self.byte_s * strength, self.joule_s * strength)


FREE = Prices()
"""With these a cost is the seconds of a step."""


def traffic_prices(machine: Machine) -> Prices:
    """Returns prices with which the fewest bytes cost least."""
    return Prices(byte_s=_NO_TIME_OUTWEIGHS / machine.host_link.bytes_per_s)


def energy_prices(machine: Machine) -> Prices:
    """Returns prices with which the fewest joules cost least.

    Raises:
      NoEnergyError: when the machine file says nothing of energy.
    """
    link = machine.host_link
    joules = machine.transfer_joules(1, link.source, link.destination)
    if joules is None or machine.static_w is None or not machine.has_energy:
        raise NoEnergyError(machine.name)
    return Prices(byte_s=joules / machine.static_w, joule_s=1 / machine.static_w)

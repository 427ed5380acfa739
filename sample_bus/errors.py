"""Errors of the sample bus.

BusError
├── WireError            a message that does not decode or validate
├── SampleTooLarge       a sample beyond bus.max_sample_bytes
├── PeerLost             the other daemon fell silent or never came
├── RequestFailed        a control request was answered with an error
├── Refused              the trainer does not take this client
├── AddressInUse         another trainer listens there
└── Ended                the run is over; carries its end
"""

from __future__ import annotations


class BusError(Exception):
    """Raised when the bus cannot do what was asked."""


class WireError(BusError):
    """Raised when bytes are not a valid message. The message names the field, what was got and what was expected."""


class SampleTooLarge(BusError):
    """Raised when a sample is larger than the bus carries."""


class PeerLost(BusError):
    """Raised when the other daemon did not appear, or fell silent, within its deadline."""


class RequestFailed(BusError):
    """Raised when a control request was refused or not answered in time."""


class Refused(BusError):
    """Raised when the trainer does not take this client, with the trainer's reason. Trying again does not help."""


class AddressInUse(BusError):
    """Raised when the hub's address cannot be had: another process listens there, or the address is not usable."""


class Ended(BusError):
    """Raised when something is asked of a run that is over."""

"""Errors of the sample bus.

BusError
├── WireError            a message that does not decode or validate
├── SampleTooLarge       a sample beyond bus.max_sample_bytes
├── PeerLost             the other daemon fell silent or never came
├── RequestFailed        a control request was answered with an error
├── Refused              the trainer does not take this client
├── AddressInUse         another trainer listens there
├── NotDurable           the broker cannot keep the promise of durability
├── Insecure             a listener beyond this host without authentication
├── JournalError         a journal or spool cannot be used
│   └── JournalDamaged   a record before the last one is damaged
├── RunChanged           the trainer began another run
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


class NotDurable(BusError):
    """Raised when the broker's settings cannot keep samples over its own death. Names the settings and the remedy."""


class Insecure(BusError):
    """Raised when a bus beyond this host has no authentication and `bus.allow_insecure` is not set; or when keys do not fit."""


class JournalError(BusError):
    """Raised when a journal or spool cannot be opened, read or written. Names the path."""


class JournalDamaged(JournalError):
    """Raised when a record is damaged that is not the torn tail of the last write."""


class RunChanged(BusError):
    """Raised when a record waited while the trainer began another run, or its stream began anew: it belongs to none that goes
    on."""


class Ended(BusError):
    """Raised when something is asked of a run that is over."""

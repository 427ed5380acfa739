"""Errors of the settings.

ConfigError
└── RevisionMoved    live settings were changed by someone else meanwhile
"""


class ConfigError(Exception):
    """Raised when a setting is unknown, of the wrong type, out of range or contradicts another one.

    The message is one line: the key, what was got, what was expected. Command lines print it and exit with 2.
    """


class RevisionMoved(ConfigError):
    """Raised when a change names the revision that it expects, and settings are at another one by now."""

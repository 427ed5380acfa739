"""Errors of the settings.

ConfigError
"""


class ConfigError(Exception):
    """Raised when a setting is unknown, of the wrong type, out of range or contradicts another one.

    The message is one line: the key, what was got, what was expected. Command lines print it and exit with 2.
    """

"""Everything launchguard raises on purpose.

LaunchguardError
|-- InputError      the user's command, file or option is wrong: exit 2, never a traceback
|   `-- NotTold     launchguard lacks a fact that the job itself does not need (device, model): `run` warns and launches
|-- Unpredictable   the input is fine, but launchguard cannot tell what it needs: verdict "unknown"
"""

from __future__ import annotations


class LaunchguardError(Exception):
    """A fact, where it stands and what to do about it.

    message: the fact with the value in it, lower case, no period.
    where:   "file:line key" or the option; empty when the message says it.
    help:    the remedy; empty when there is none to offer.
    code:    stable name of the kind of error ("LG252"), with a page in `launchguard explain`; empty for a kind without one.
    """

    def __init__(self, message: str, *, where: str = "", help: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.help = help
        self.code = code


class InputError(LaunchguardError):
    """The user's input cannot be used."""


class NotTold(InputError):
    """Nothing is wrong with the job, but launchguard has not been told what it must know to predict it."""


class Unpredictable(LaunchguardError):
    """A valid job that launchguard cannot simulate; the message names the op, line or setting that stopped it."""

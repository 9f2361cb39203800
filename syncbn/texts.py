"""Puts names, values and exceptions into words that every store, log file and terminal takes."""

import traceback

SHOWN_CHARACTERS = 60  # of a value in an error


def printable(text: str) -> str:
    """The text, with escapes for surrogates, which no UTF-8 can hold: names of files have them for bytes of others."""
    return text.encode(errors="backslashreplace").decode()


def in_words(error: BaseException) -> str:
    """The class and the text, as the last line of a traceback has them: also of an exception whose text raises."""
    return printable("".join(traceback.format_exception_only(error)).strip())


def in_short(value: object) -> str:
    """The value as Python shows it, cut."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4,300 digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."

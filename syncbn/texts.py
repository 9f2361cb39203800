"""Puts names and exceptions into words that every store, log file and terminal takes."""

import traceback


def printable(text: str) -> str:
    """The text, with escapes for surrogates, which no UTF-8 can hold: names of files have them for bytes of others."""
    return text.encode(errors="backslashreplace").decode()


def in_words(error: BaseException) -> str:
    """The class and the text, as the last line of a traceback has them: also of an exception whose text raises."""
    return printable("".join(traceback.format_exception_only(error)).strip())

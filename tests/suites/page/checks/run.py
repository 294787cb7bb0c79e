"""One check of the page in Chromium: `run.py NAME`. PAGE_SERVER names the server's program."""

import sys

import access
import filters
import formats
import hostile
import keyboard
import large
import live
import views

MODULES = (access, filters, formats, hostile, keyboard, large, live, views)


def main(name):
    found = [getattr(module, name) for module in MODULES if getattr(getattr(module, name, None), "__module__", "") == module.__name__]
    if len(found) != 1:
        raise SystemExit(f"no check is called {name}")
    found[0]()
    print("done")


main(sys.argv[1])

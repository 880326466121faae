"""The type of the argument of each command's `add_to`; argparse has no public name for it."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object

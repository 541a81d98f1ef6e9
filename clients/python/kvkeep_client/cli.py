"""The ``kvkeep`` command's way in, which works, to say what is missing, without its extra."""

import sys


def main() -> None:
    """Run the command line of this process. Raises: SystemExit, always."""
    try:
        # typer and rich come with the extra only, so this import may fail.
        from kvkeep_client.commands import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit("The kvkeep command needs one more install: pip install 'kvkeep-client[cli]'")
    app(prog_name="kvkeep")

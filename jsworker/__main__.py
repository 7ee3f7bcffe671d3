"""``python -m jsworker`` is the command ``jsworker``."""

from jsworker.cli.app import main

if __name__ == "__main__":
    main()

"""``python -m jsworker`` is the command ``jsworker``."""

from jsworker.cli import main

if __name__ == "__main__":
    main()

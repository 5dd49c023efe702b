"""``python -m asynctask``: the command line."""

from asynctask.cli import main

if __name__ == "__main__":
    main()

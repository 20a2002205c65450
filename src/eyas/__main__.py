"""`python -m eyas`: the command line where there is no console script, such as under torchrun."""

from eyas.cli.entry import main

if __name__ == "__main__":
    main()

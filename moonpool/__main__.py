"""`python -m moonpool` is the `moonpool` command."""

from moonpool.cli.main import main

if __name__ == "__main__":
    main()

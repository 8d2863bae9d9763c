"""``python -m gpukit`` is the command ``gpukit``."""

from gpukit.cli import main

if __name__ == "__main__":
    main()

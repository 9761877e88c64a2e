"""Versions of installed packages."""

FARLOOP = "farloop"


def version_of(package: str = FARLOOP) -> str:
    """As it is installed here; a source tree that runs by its path alone is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"

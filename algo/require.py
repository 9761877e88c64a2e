"""What has to hold of what somebody asks for, or a sentence says why it cannot be. Pure."""


def require(holds: bool, sentence: str) -> None:
    """Raise ValueError with the sentence unless it holds."""
    if not holds:
        raise ValueError(sentence)

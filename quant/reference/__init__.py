"""The codecs in plain torch: the truth that every faster path must match byte for byte."""

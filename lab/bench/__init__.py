"""Measurements that a release stands on: what a codec, a method or a setting does to the model that comes out."""

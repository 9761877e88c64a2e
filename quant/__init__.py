"""How numbers become bytes: codecs with one byte layout each, and the blob header they travel under."""

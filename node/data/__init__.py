"""What a node trains on: corpora, token files, and batches of the samples that it is granted."""

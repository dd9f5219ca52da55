"""The empirical tangent kernel of a network, and the embeddings predicted from it."""

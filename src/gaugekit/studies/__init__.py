"""One file a study: a claim of a paper, the arms that test it on equal terms, and what came out."""

"""One file a family, each declaring `FAMILY` and where its weights are."""

"""The models: one file per family, written once for every torch device."""

"""The quick start's fictional encyclopedia, its questions and its tiny model, built by `build.py`."""

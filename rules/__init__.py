"""The built-in rule pack: one rule, one file. Installed as ``vramlint.rules``."""

"""The command line: doctor, formats, bench, certify.

The commands are public, as `kmp ...` or `python -m kmp ...`. The functions behind them are not.
"""

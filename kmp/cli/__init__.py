"""What `python -m kmp` does: doctor, formats, bench, certify."""

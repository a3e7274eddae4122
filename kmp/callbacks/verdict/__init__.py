"""The verdict on a run: its states, what they are judged by, and the rules."""
